"""Run the same checks on any implementation of linear + cross-entropy; a failure comes with five lines of code.

    python -m seqpar.testing.conformance torch seqpar my_module:my_adapter

`Adapter` describes an implementation, `CHECKS` are the checks, and `run` runs them.
"""

from seqpar.testing.conformance.adapter import EVERYTHING, Adapter, Options
from seqpar.testing.conformance.adapters import KNOWN, adapter_of
from seqpar.testing.conformance.checks import CHECKS, Check, Finding, run

__all__ = ["CHECKS", "EVERYTHING", "KNOWN", "Adapter", "Check", "Finding", "Options", "adapter_of", "run"]
