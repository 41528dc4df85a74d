"""Check implementations of linear + cross-entropy: a table of who passes what, and five lines for each failure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from seqpar.testing.conformance import report
from seqpar.testing.conformance.adapters import KNOWN, adapter_of
from seqpar.testing.conformance.checks import run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print versions, the table, notes and reproductions."""
    parser = argparse.ArgumentParser(prog="python -m seqpar.testing.conformance", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"{', '.join(KNOWN)}; module:object for your own Adapter; none is all")
    names = parser.parse_args(arguments).names or list(KNOWN)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts products says when it starts and stops
    sys.path.insert(0, os.getcwd())  # where module:object is looked for
    try:
        adapters = [adapter_of(name) for name in names]
    except ValueError as error:
        sys.exit(f"conformance: {error}")
    for adapter in adapters:
        adapter.why_not()  # all of them first: Triton's interpreter must be chosen before anything loads Triton
    findings = {}
    for name, adapter in zip(names, adapters, strict=True):
        print(f"[{name}]", file=sys.stderr, flush=True)
        findings[name] = run(adapter)
    parts = [report.heading(adapters), report.table(findings), report.notes(adapters), report.reproductions(findings)]
    print("\n\n".join(part for part in parts if part))


if __name__ == "__main__":
    main()
