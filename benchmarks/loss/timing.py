"""Time one problem, interleaved: the three products and every implementation, round after round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

import torch

from benchmarks.loss.plain_ways import CHUNK_ROWS, Step
from benchmarks.loss.problems import IGNORED, Inputs, Problem, fits_comfortably

WHOLE = "products, all rows"
CHUNKED = f"products, {CHUNK_ROWS} rows"
PRODUCTS = ("logits", "hidden gradient", "weight gradient")
LARGE = 1e12
"""Operations from which on every run of a problem is timed, because runs that only warm up would take too long."""


class Products:
    """Matrix products over the rows of some inputs that are not padding, and the memory that they write into.

        logits = hidden weight^T;  hidden gradient = logits weight;  weight gradient = logits^T hidden

    Args:
        x: the inputs.
        most: the most rows at a time; None is all.
    """

    def __init__(self, x: Inputs, most: int | None) -> None:
        self.unpadded_KD = x.hidden.detach()[x.target != IGNORED]
        self.weight_VD = x.weight.detach()
        self.logits_KV = self.weight_VD.new_ones(self._count(most), len(self.weight_VD))
        self.hidden_grad_KD = torch.ones_like(self.unpadded_KD)
        self.weight_grad_VD = torch.ones_like(self.weight_VD)

    def _count(self, rows: int | None) -> int:
        return min(rows or len(self.unpadded_KD), len(self.unpadded_KD))

    def run(self, rows: int | None, wanted: Collection[str] = PRODUCTS) -> None:
        """Make products, `rows` at a time or all at once (None); all three are what a loss and its gradients need."""
        count = self._count(rows)
        for start in range(0, len(self.unpadded_KD), count):
            hidden_KD = self.unpadded_KD[start : start + count]
            product_KV = self.logits_KV[: len(hidden_KD)]
            if "logits" in wanted:
                torch.mm(hidden_KD, self.weight_VD.t(), out=product_KV)
            if "hidden gradient" in wanted:
                torch.mm(product_KV, self.weight_VD, out=self.hidden_grad_KD[start : start + count])
            # The sum over the chunks: the first product writes it, the others add to it
            if "weight gradient" in wanted and start:
                self.weight_grad_VD.addmm_(product_KV.t(), hidden_KD)
            elif "weight gradient" in wanted:
                torch.mm(product_KV.t(), hidden_KD, out=self.weight_grad_VD)


def sizes_of_products(x: Inputs) -> dict[str, int | None]:
    """Return how many rows at a time are tried, by name: 512 and, where all logits fit comfortably, all (None)."""
    if fits_comfortably(x.problem, x.device):
        return {CHUNKED: CHUNK_ROWS, WHOLE: None}
    return {CHUNKED: CHUNK_ROWS}


def floors(x: Inputs) -> dict[str, Callable[[], None]]:
    """Return the products in chunks and, where all logits fit comfortably, all at once."""
    return {name: partial(Products(x, rows).run, rows) for name, rows in sizes_of_products(x).items()}


def forward_and_backward(step: Step) -> Callable[[], None]:
    """Return the step followed by its backward, unless the step has done that itself."""

    def run() -> None:
        loss = step()
        if loss is not None and loss.requires_grad:
            loss.backward()

    return run


def seconds(run: Callable[[], None], x: Inputs) -> float:
    """Return the seconds of one run, starting without gradients."""
    x.clear()
    return wall_seconds(run, x.device != "cpu")


def wall_seconds(run: Callable[[], object], on_accelerator: bool) -> float:
    """Return the seconds from the call to the end of its work, on an accelerator included."""
    if on_accelerator:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    if on_accelerator:
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def runs_in_a_row(problem: Problem) -> int:
    """Return how many runs follow each other, of which the last is timed."""
    if problem.products > LARGE:
        return 1
    return 2


def interleaved(
    runs: dict[str, Callable[[], None]], x: Inputs, rounds: int, count: Callable[[], object]
) -> dict[str, list[float]]:
    """Return the seconds of each run in every round.

    Of two runs in a row the second is timed: in use, a step follows its own kind, while after another implementation
    its memory comes from the system page by page. Large problems run once. Every round starts one run further on.

    Args:
        runs: by name.
        x: whose gradients are cleared before each run.
        rounds: how many.
        count: called after every run.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for _ in range(runs_in_a_row(x.problem)):
                taken = seconds(runs[name], x)
            times[name].append(taken)
            count()
    return times
