"""Run the same checks on anybody's linear + cross-entropy; a failure comes with the lines that reproduce it.

    python -m conformance losses torch seqpar my_module:my_adapter
    python -m conformance scores torch seqpar my_module:my_score_adapter
    python -m conformance layouts torch seqpar my_module:my_layout_adapter

The first part checks a loss, which an `Adapter` describes; the second token scores (log-probability, entropy, top-k),
described by a `ScoreAdapter`; the third a training step over several ranks, described by a `LayoutAdapter`. `PARTS` has
the checks and the known implementations for each part, and `run` runs the checks of any adapter.
"""

from conformance.adapter import ALL_SCORES, EVERYTHING, Adapter, Options, ScoreAdapter
from conformance.finding import Check, Finding
from conformance.layout_adapter import EVERY_LAYOUT, LayoutAdapter, Work
from conformance.layout_cases import Case
from conformance.layout_checks import answers
from conformance.parts import PARTS, adapter_of, run
from conformance.plain import plain_loss, plain_scores
from conformance.problem import Problem

__all__ = [
    "ALL_SCORES",
    "EVERYTHING",
    "EVERY_LAYOUT",
    "PARTS",
    "Adapter",
    "Case",
    "Check",
    "Finding",
    "LayoutAdapter",
    "Options",
    "Problem",
    "ScoreAdapter",
    "Work",
    "adapter_of",
    "answers",
    "plain_loss",
    "plain_scores",
    "run",
]
