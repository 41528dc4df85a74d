"""Every implementation that is measured, by the name it has in the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.loss import ours, peers, plain_ways
from benchmarks.loss.plain_ways import Step
from benchmarks.loss.problems import Inputs, Problem

PLAIN, TORCH_DEFAULT, TORCH_BEST = "plain", "torch op, default", "torch op, best"
ENGINE, OWN, LINEAR = "LossCompute", "LossCompute, own generator", "linear_cross_entropy"
OWN_SMALL = f"{OWN}, 128 rows"
OURS = [ENGINE, OWN, OWN_SMALL, LINEAR]


class Implementation(NamedTuple):
    """How to make a step of it, and what it cannot do.

    Args:
        smoothing: whether it has label smoothing.
        bias: whether it has a bias; what has none is measured without.
        compiles: its first call at a shape compiles.
        note: what a reader of its row must know.
    """

    prepare: Callable[[Inputs], Step]
    smoothing: bool = True
    bias: bool = True
    compiles: bool = False
    note: str = ""


class Missing(NamedTuple):
    """Why an implementation has no figures here."""

    reason: str


def known(best_options: dict[str, Any]) -> dict[str, Implementation]:
    """All of them, installed or not; `best_options` is what was fastest for torch's op."""
    return {
        PLAIN: Implementation(plain_ways.plain),
        "torch.compile": Implementation(plain_ways.compiled, compiles=True),
        "checkpointed chunks": Implementation(plain_ways.checkpointed),
        TORCH_DEFAULT: Implementation(peers.torch_op({})),
        TORCH_BEST: Implementation(peers.torch_op(best_options)),
        "cut_cross_entropy": Implementation(
            peers.cut_cross_entropy, smoothing=False, bias=False, compiles=True, note="without bias"
        ),
        "torchtune": Implementation(peers.torchtune, smoothing=False, compiles=True),
        "torchtitan-style": Implementation(plain_ways.titan_style),
        "2018 loop": Implementation(plain_ways.loop_2018, note="its loss is a number"),
        ENGINE: Implementation(ours.engine()),
        OWN: Implementation(ours.engine(known=False)),
        OWN_SMALL: Implementation(ours.engine(known=False, chunk_tokens=128)),
        LINEAR: Implementation(ours.linear_cross_entropy),
    }


def implementations(best_options: dict[str, Any]) -> dict[str, Implementation | Missing]:
    """The same, with the reason in place of what cannot run here."""
    found: dict[str, Implementation | Missing] = {**known(best_options)}
    for name in ("cut_cross_entropy", "torchtune"):
        if reason := peers.why_missing(name):
            found[name] = Missing(reason)
    if not hasattr(F, "linear_cross_entropy"):
        for name in (TORCH_DEFAULT, TORCH_BEST):
            found[name] = Missing(f"torch {torch.__version__} has none")
    return found


def over_devices() -> dict[str, Implementation]:
    """The engine over one device and over the same device four times."""
    return {
        f"{name}, {count} replica{'s' * (count > 1)}": Implementation(ours.engine(count, known))
        for name, known in ((ENGINE, True), (OWN, False))
        for count in (1, 4)
    }


def why_not(name: str, implementation: Implementation | Missing, problem: Problem) -> str:
    """Why it is not run on that problem; empty where it is."""
    if isinstance(implementation, Missing):
        return implementation.reason
    if problem.smoothing and not implementation.smoothing:
        return "no label smoothing"
    if problem.smoothing and name == TORCH_BEST:
        return "falls back to full logits under smoothing, whatever the options"
    return ""


def notes(name: str, implementation: Implementation, problem: Problem) -> list[str]:
    """What a reader must know of that row."""
    found = [implementation.note] if implementation.note else []
    if problem.smoothing and name == TORCH_DEFAULT:
        found.append("falls back to full logits")
    return found
