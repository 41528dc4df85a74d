"""List every implementation that is measured, by its name in the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.loss import ours, peers, plain_ways
from benchmarks.loss.plain_ways import Step
from benchmarks.loss.problems import Inputs, Problem
from conformance.adapter import why_missing

PLAIN = "plain"
COMPILED = "torch.compile"
CHECKPOINTED = "checkpointed chunks"
TORCH_DEFAULT = "torch op, default"
TORCH_BEST = "torch op, best"
CUT = "cut_cross_entropy"
TITAN_STYLE = "torchtitan-style"
ENGINE = "LossCompute"
OWN = "LossCompute, own generator"
OURS = [ENGINE, OWN]
ON_A_CPU = [PLAIN, COMPILED, CHECKPOINTED, TORCH_DEFAULT, TORCH_BEST, CUT, TITAN_STYLE, ENGINE, OWN]
ON_A_GPU = [PLAIN, COMPILED, TORCH_DEFAULT, CUT, "Liger", "Liger, float32 sums", "quack", ENGINE]


class Implementation(NamedTuple):
    """Describe how to make a step of an implementation, and what it cannot do.

    Args:
        prepare: makes a step for given inputs.
        missing: why it cannot run here; empty where it can.
        unsmoothed: why it is not run with label smoothing; empty where it is.
        bias: whether it has a bias; without one it is measured without.
        compiles: whether its first call at a shape compiles.
    """

    prepare: Callable[[Inputs], Step]
    missing: str = ""
    unsmoothed: str = ""
    bias: bool = True
    compiles: bool = False

    def why_not(self, problem: Problem) -> str:
        """Return why it is not run on that problem; empty where it is."""
        return self.missing or (self.unsmoothed if problem.smoothing else "")


NO_SMOOTHING = "no label smoothing"


BEST_OPTIONS = {"acc_policy": "accurate", "batch_chunk_size": 1024}
"""The fastest right options of torch's op in both dtypes, of 18 at N=2,048, D=512, V=8,000 (2026-11-21)."""


def known() -> dict[str, Implementation]:
    """Return all of them, whether they can run here or not."""
    no_op = "" if hasattr(F, "linear_cross_entropy") else f"torch {torch.__version__} has none"
    liger = why_missing("liger_kernel")
    return {
        PLAIN: Implementation(plain_ways.plain),
        COMPILED: Implementation(plain_ways.compiled, compiles=True),
        CHECKPOINTED: Implementation(plain_ways.checkpointed),
        TORCH_DEFAULT: Implementation(peers.torch_op({}), no_op),
        TORCH_BEST: Implementation(
            peers.torch_op(BEST_OPTIONS), no_op, "falls back to full logits under smoothing, whatever the options"
        ),
        CUT: Implementation(peers.cut_cross_entropy, why_missing(CUT), NO_SMOOTHING, bias=False, compiles=True),
        "Liger": Implementation(peers.liger(False), liger),
        "Liger, float32 sums": Implementation(peers.liger(True), liger),
        "quack": Implementation(peers.quack, why_missing("quack.linear_cross_entropy"), NO_SMOOTHING, bias=False),
        TITAN_STYLE: Implementation(plain_ways.titan_style),
        ENGINE: Implementation(ours.engine()),
        OWN: Implementation(ours.engine(known=False)),
    }
