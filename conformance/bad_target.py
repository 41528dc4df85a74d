"""Check that a target that is not a class raises an error, in a process of its own, since it may not survive this."""

from __future__ import annotations

import torch

from conformance.adapter import DEVICE
from conformance.apart import EndedError, apart
from conformance.finding import Finding
from conformance.problem import Problem
from seqpar.testing.forks import autograd_works_in_a_fork

SILENCE = 60
"""The longest time in seconds that a call with a bad target may take."""


def out_of_range(x: Problem) -> Finding:
    """Check that a target of V, V + 7 or -1 raises an error."""
    # Forking saves the imports, but a fork cannot use CUDA, nor always autograd, whose error would look like a pass
    is_fork = DEVICE == "cpu" and autograd_works_in_a_fork()
    try:
        outcome = apart(_outcome, x, is_fork=is_fork, silence=SILENCE)
    except EndedError as ended:
        outcome = str(ended)
    if outcome.startswith("gave"):
        bad, classes = int(x.made()["target"][5]), x.vocab_size
        return Finding("fail", f"target {bad} of {classes} classes {outcome}, in silence")
    return Finding("pass", outcome)


def _outcome(x: Problem) -> str:
    """Return the outcome of one forward and backward."""
    # The parent's thread pool did not survive the fork
    torch.set_num_threads(1)
    try:
        return f"gave {float(x.answer()['loss'] or 0):.6g}"
    except Exception as raised:
        return f"raises {type(raised.__cause__ or raised).__name__}"
