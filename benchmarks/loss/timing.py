"""Interleaved timing of one problem: the three products and every implementation, round after round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from benchmarks.loss.plain_ways import CHUNK_ROWS, Step
from benchmarks.loss.problems import IGNORED, Inputs, Problem, comfortable

WHOLE, CHUNKED = "products, all rows", f"products, {CHUNK_ROWS} rows"
LARGE = 1e12
"""Operations from which on a problem takes so long that nothing is run but to be measured."""
LINE_EVERY = 10.0
"""Seconds between two lines of progress."""


class Progress:
    """Lines on stderr: how much of a part is done, how fast, and how long the rest will take.

    Args:
        title: of the part.
        total: all of its work, in any unit.
    """

    def __init__(self, title: str, total: float) -> None:
        self.title, self.total, self.done, self.runs = title, total, 0.0, 0
        self.started = self.said = time.monotonic()

    def add(self, work: float, what: str) -> None:
        """A run is done, and with it so much work; says so every now and then."""
        self.done, self.runs = self.done + work, self.runs + 1
        now = time.monotonic()
        if now - self.said < LINE_EVERY:
            return
        self.said, spent = now, now - self.started
        left = spent * max(0.0, self.total / self.done - 1)
        rate = f"{self.runs / spent * 60:.0f} runs a minute"
        print(
            f"[{self.title}] {self.done / self.total:.0%} in {clock(spent)}, {rate}, {clock(left)} left; {what}",
            file=sys.stderr,
            flush=True,
        )


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def floor(x: Inputs, rows: int | None) -> Callable[[], None]:
    """The three matrix products of the rows that are kept, into memory that is there; None is all rows at once."""
    kept_KD = x.hidden.detach()[x.target != IGNORED]
    weight_VD = x.weight.detach()
    count = len(kept_KD) if rows is None else min(rows, len(kept_KD))
    logits_KV = torch.ones(count, len(weight_VD), dtype=weight_VD.dtype, device=x.device)
    hidden_grad_KD, weight_grad_VD = torch.ones_like(kept_KD), torch.ones_like(weight_VD)

    def step() -> None:
        for start in range(0, len(kept_KD), count):
            hidden_KD = kept_KD[start : start + count]
            product_KV = logits_KV[: len(hidden_KD)]
            torch.mm(hidden_KD, weight_VD.t(), out=product_KV)
            torch.mm(product_KV, weight_VD, out=hidden_grad_KD[start : start + count])
            if start:
                weight_grad_VD.addmm_(product_KV.t(), hidden_KD)
            else:
                torch.mm(product_KV.t(), hidden_KD, out=weight_grad_VD)

    return step


def floors(x: Inputs) -> dict[str, Callable[[], None]]:
    """The products in both ways; all rows at once only where their logits fit comfortably."""
    found = {CHUNKED: floor(x, CHUNK_ROWS)}
    if comfortable(x.problem, x.device):
        found[WHOLE] = floor(x, None)
    return found


def forward_and_backward(x: Inputs, step: Step) -> Callable[[], None]:
    """The step, and its backward where it has left it to the caller."""

    def run() -> None:
        loss: Tensor = step()
        if loss.requires_grad:
            loss.backward()

    return run


def seconds(run: Callable[[], None], inputs: Iterable[Inputs]) -> float:
    """Of one run, from inputs without gradients."""
    on_device = False
    for x in inputs:
        x.clear()
        on_device |= x.device != "cpu"
    if on_device:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    if on_device:
        torch.accelerator.synchronize()
    return time.perf_counter() - start


Runs = dict[tuple[Problem, str], Callable[[], None]]


def in_a_row(problem: Problem) -> int:
    """How many steps follow each other, of which the last is timed."""
    return 2 if problem.products <= LARGE else 1


def interleaved(
    runs: Runs, inputs: list[Inputs], rounds: int, said: Callable[[str], None], always: int | None = None
) -> dict[tuple[Problem, str], list[float]]:
    """Seconds of each, of two runs in a row the second, as its own steps follow each other in use: the memory of the
    first was another's, and comes from the system page by page. Of large problems there is one. Every round starts
    one further on. `always` says how many runs in a row there are, whatever the size."""
    keys = list(runs)
    times: dict[tuple[Problem, str], list[float]] = {key: [] for key in keys}
    for number in range(rounds):
        for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
            for _ in range((always or in_a_row(key[0])) - 1):
                seconds(runs[key], inputs)
            times[key].append(seconds(runs[key], inputs))
            said(f"{key[0]}: {key[1]}, round {number + 1} of {rounds}")
    return times
