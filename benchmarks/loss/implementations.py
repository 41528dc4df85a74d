"""List every implementation that is measured, by its name in the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.loss import ours, peers, plain_ways
from benchmarks.loss.plain_ways import Step
from benchmarks.loss.problems import Inputs, Problem
from seqpar.testing.conformance.adapter import why_missing

PLAIN = "plain"
AUTO_CHUNKED = "torch.compile, auto_chunker"
TORCH_DEFAULT = "torch op, default"
TORCH_BEST = "torch op, best"
ENGINE = "LossCompute"
OWN = "LossCompute, own generator"
OWN_SMALL = f"{OWN}, 128 rows"
LINEAR = "linear_cross_entropy"
OURS = [ENGINE, OWN, OWN_SMALL, LINEAR]


class Implementation(NamedTuple):
    """Describe how to make a step of an implementation, and what it cannot do.

    Args:
        prepare: makes a step for given inputs.
        smoothing: whether it has label smoothing.
        bias: whether it has a bias; without one it is measured without.
        compiles: whether its first call at a shape compiles.
        note: what a reader of its row must know.
    """

    prepare: Callable[[Inputs], Step]
    smoothing: bool = True
    bias: bool = True
    compiles: bool = False
    note: str = ""


class Missing(NamedTuple):
    """Say why an implementation has no figures here."""

    reason: str


def known(best_options: dict[str, Any]) -> dict[str, Implementation]:
    """Return all of them, installed or not; `best_options` are the fastest options of torch's op."""
    return {
        PLAIN: Implementation(plain_ways.plain),
        "torch.compile": Implementation(plain_ways.compiled, compiles=True),
        AUTO_CHUNKED: Implementation(plain_ways.auto_chunked, smoothing=False, compiles=True),
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
    """Return the same, with the reason in place of those that cannot run here."""
    found: dict[str, Implementation | Missing] = {**known(best_options)}
    for name in ("cut_cross_entropy", "torchtune"):
        reason = why_missing(name)
        if reason:
            found[name] = Missing(reason)
    reason = plain_ways.why_no_auto_chunker()
    if reason:
        found[AUTO_CHUNKED] = Missing(reason)
    reason = why_no_torch_op()
    if reason:
        found[TORCH_DEFAULT] = Missing(reason)
        found[TORCH_BEST] = Missing(reason)
    return found


def why_no_torch_op() -> str:
    """Return why torch's own chunked op cannot run; empty where it can."""
    if hasattr(F, "linear_cross_entropy"):
        return ""
    return f"torch {torch.__version__} has none"


def over_devices() -> dict[str, Implementation]:
    """Return the engine over one device and over the same device four times."""
    found = {}
    for name, known in ((ENGINE, True), (OWN, False)):
        found[f"{name}, 1 replica"] = Implementation(ours.engine(1, known))
        found[f"{name}, 4 replicas"] = Implementation(ours.engine(4, known))
    return found


def why_not(name: str, implementation: Implementation | Missing, problem: Problem) -> str:
    """Return why it is not run on that problem; empty where it is."""
    if isinstance(implementation, Missing):
        return implementation.reason
    if problem.smoothing and name == AUTO_CHUNKED:
        return "cuts no loss with smoothing, for which it is torch.compile"
    if problem.smoothing and not implementation.smoothing:
        return "no label smoothing"
    if problem.smoothing and name == TORCH_BEST:
        return "falls back to full logits under smoothing, whatever the options"
    return ""


def notes(name: str, implementation: Implementation, problem: Problem) -> list[str]:
    """Return what a reader must know of that row."""
    found = []
    if implementation.note:
        found.append(implementation.note)
    if problem.smoothing and name == TORCH_DEFAULT:
        found.append("falls back to full logits")
    return found
