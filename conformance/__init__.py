"""Run the same checks on anybody's linear + cross-entropy; a failure comes with the lines that repeat it.

    python -m conformance losses torch seqpar my_module:my_adapter
    python -m conformance scores torch seqpar my_module:my_score_adapter
    python -m conformance layouts torch seqpar my_module:my_layout_adapter

The first part checks a loss: `Adapter` describes an implementation, and `CHECKS` are the checks. The second checks the
scores of tokens (log-probability, entropy, top-k): `ScoreAdapter` and `SCORE_CHECKS`. The third checks a training step
over several ranks: `LayoutAdapter` and `LAYOUT_CHECKS`. `run` runs any.
"""

from conformance.adapter import ALL_SCORES, EVERYTHING, Adapter, Options, ScoreAdapter
from conformance.checks import CHECKS, SCORE_CHECKS
from conformance.finding import Check, Finding
from conformance.layout_adapter import EVERY_LAYOUT, LayoutAdapter, Work
from conformance.layout_cases import Case
from conformance.layout_checks import LAYOUT_CHECKS, answers
from conformance.layout_peers import KNOWN_LAYOUTS
from conformance.parts import adapter_of, run
from conformance.peers import KNOWN, KNOWN_SCORES
from conformance.plain import plain_loss, plain_scores
from conformance.problem import Problem

__all__ = [
    "ALL_SCORES",
    "CHECKS",
    "EVERYTHING",
    "EVERY_LAYOUT",
    "KNOWN",
    "KNOWN_LAYOUTS",
    "KNOWN_SCORES",
    "LAYOUT_CHECKS",
    "SCORE_CHECKS",
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
