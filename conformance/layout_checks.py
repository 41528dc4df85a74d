"""Run an implementation's training step on the ranks of a layout, and compare it with the plain loss in one process."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from conformance.adapter import found as found_by_name
from conformance.finding import Check, Finding, shown
from conformance.layout_adapter import LAYOUTS, LayoutAdapter
from conformance.layout_cases import MAY_RAISE, NAMES, NEEDS, Answer, Case, GoneError, cases
from conformance.layout_causes import cause_of
from seqpar.distributed.collectives import whole_tensor
from seqpar.testing.precision import EXACT, error
from seqpar.testing.ranks import RankError, ranks

FLOAT32 = 1e-5
"""The relative error allowed for an implementation that computes in float32."""
HANGS = re.compile("Timed out|were silent")
"""What a `RankError` says about ranks that wait for others that never come."""
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining")
"""Modules that torch loads only when they are first needed."""
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""How the line of a traceback that names the error begins."""


class Fault(NamedTuple):
    """What is wrong with a step."""

    cause: str
    numbers: str
    worst: str
    """The gradient that is farthest off, or "loss"."""


def layout_check(adapter: LayoutAdapter, layout: str, name: str, seed: int = 0) -> Finding:
    """Return the finding for one case of a layout, over each of its numbers of ranks; a failure is made smaller."""
    for case in cases(layout, seed)[name]:
        try:
            found = fault(adapter, case)
        except RankError as raised:
            said = _ended(str(raised))
            if name in MAY_RAISE and " raises " in said:
                return Finding("pass", said.partition(" raises ")[2].partition(":")[0])
            return Finding("fail", f"{case.ranks} ranks: {said}", shown(fault, adapter, case), is_raised=True)
        if found:
            case, found = _smallest(adapter, case, found)
            figure = f"{case.ranks} ranks: {found.cause}; {found.numbers}"
            return Finding("fail", figure, shown(fault, adapter, case))
    return Finding("pass")


def fault(adapter: LayoutAdapter, case: Case) -> Fault | None:
    """Return what is wrong with an implementation's step; None if every rank has the right loss and gradients."""
    allowed = EXACT if "float64" in adapter.offers else FLOAT32
    found = answers(adapter, case)
    size = case.ranks // case.groups
    for group in range(case.groups):
        right, got = case.right(group), found[group * size : (group + 1) * size][: case.staying * case.inner]
        errors = {n: [error(a.gradients[n], g) for a in got] for n, g in right.gradients.items()}
        if case.reduction == "sum":
            errors["loss"] = [abs(a.loss / right.loss - 1) for a in got]
        # Not `> allowed`, which is false for nan
        wrong = [name for name, each in errors.items() if not all(one <= allowed for one in each)]
        if wrong:
            worst = max(wrong, key=lambda name: max(errors[name]))
            losses = ""
            if "loss" in errors:
                losses = f"loss {', '.join(f'{a.loss:.4g}' for a in got)} ({right.loss:.4g} is right), "
            numbers = f"by rank: {losses}{worst} off by {', '.join(f'{one:.2g}' for one in errors[worst])}"
            return Fault(cause_of(case, group, got, right), numbers, worst)
    return None


def answers(adapter: LayoutAdapter, case: Case) -> list[Answer]:
    """Return the loss and the gradients of each rank; a split generator's rows are joined."""
    # Load before the ranks are forked from this process, because each of them would take a second for it
    _load(0, case.ranks, found_by_name(adapter.part, adapter.spec))
    # Also in ranks that already exist, while none waits for another: on a busy machine it may outlast a time-out
    ranks(case.ranks, _load, adapter)
    found = ranks(case.ranks, _step, adapter, case)
    return [_joined(found, rank, case) for rank in range(case.ranks)]


def _load(rank: int, world: int, adapter: LayoutAdapter) -> None:
    """Load what a step may need into one rank."""
    for module in PRELOADED:
        importlib.import_module(module)
    # This imports the adapter's package
    adapter.why_not()


def _step(rank: int, world: int, adapter: LayoutAdapter, case: Case) -> tuple[float, dict[str, Tensor | None]]:
    """Run the training step of one rank."""
    torch.manual_seed(rank)
    work, model = case.work(rank)
    loss = None
    # A rank that goes away during the step need not return anything
    with contextlib.suppress(GoneError):
        loss = adapter.function(work)
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    gradients = {n: None if grad is None else whole_tensor(grad) for n, grad in trained.items()}
    return math.nan if loss is None else float(loss), gradients


def _joined(found: list[tuple[float, dict[str, Tensor | None]]], rank: int, case: Case) -> Answer:
    """Return a rank's answer, completed from ranks that have other classes, layers or experts."""
    first = rank - rank % case.inner
    together = found[first : first + case.inner]
    loss, own = found[rank]
    complete: dict[str, Tensor] = {}
    for name, right in case.model().named_parameters():
        if not right.requires_grad:
            continue
        gradient = own.get(name)
        if case.row.inner == "experts":
            neighbours = found[rank - rank % case.near :][: case.near]
            gradient = next((g[name] for _, g in neighbours if name in g), None) if gradient is None else gradient
        if case.stage_count:
            gradient = next((g[name] for _, g in together if g[name] is not None), None)
        is_split = case.row.splits_classes and not case.whole_head and case.row.inner != "DTensor classes"
        if is_split and name == ("embed.weight" if case.tied else "head.weight"):
            rows = [case.rows_of(place) for place in range(case.inner)]
            parts = [g[name] for _, g in together]
            shapes = [(end - start, right.size(1)) for start, end in rows]
            gradient = torch.cat([torch.zeros(s) if p is None else p for p, s in zip(parts, shapes, strict=True)])
        complete[name] = torch.zeros_like(right) if gradient is None else gradient.to(right)
    if case.stage_count:
        loss = next((one for one, _ in together if not math.isnan(one)), math.nan)
    return Answer(loss, complete)


def _smallest(adapter: LayoutAdapter, case: Case, found: Fault) -> tuple[Case, Fault]:
    """Return the smallest case that fails for the same reason: few tokens, and if possible only one micro-batch."""
    few = [tuple(min(2 - (place > 0), n) for n in part) for place, part in enumerate(case.tokens)]
    smaller = [replace(case, tokens=tuple(few))]
    if not case.stage_count:
        smaller.insert(0, replace(case, tokens=tuple(part[:1] for part in few)))
    for one in smaller:
        # An error with so few tokens is a different problem
        with contextlib.suppress(RankError):
            again = fault(adapter, one)
            # The factor by which gradients are too large may differ with fewer tokens
            if again and again.cause.partition(": all")[0] == found.cause.partition(": all")[0]:
                return one, again
    return case, found


def _ended(message: str) -> str:
    """Return a line that says which rank raised which error, or that the step hangs."""
    said = {}
    for text in message.split("\nrank "):
        rank = text.removeprefix("rank ").partition(":")[0]
        said[rank] = next(filter(ERROR.match, reversed(text.splitlines())), text.strip().splitlines()[-1])
    own = [f"rank {rank} raises {line:.120}" for rank, line in said.items() if not HANGS.search(line)]
    if own:
        return own[0]
    return f"it hangs: rank {', '.join(said)} waited for the others until the time-out"


LAYOUT_CHECKS = tuple(
    Check(
        f"{layout}: {name}",
        partial(layout_check, layout=layout, name=name),
        frozenset({layout, NEEDS.get(name, layout)}),
    )
    for layout in LAYOUTS
    for name in NAMES[layout]
)
"""All layout checks, in the order of the table."""
