"""Check implementations of a loss, of token scores or of a step over ranks: who passes what, and how to see it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance import report
from conformance.adapter import Implementation
from conformance.finding import Finding
from conformance.parts import PARTS, adapter_of, run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print versions, the table, notes and reproductions; exit with 1 if a named implementation could not run."""
    given = _parse(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts products reports each start and stop
    sys.path.insert(0, os.getcwd())  # where module:object is looked for
    try:
        if given.part == "page":
            path = Path(given.names[0])
            path.write_text(report.fill(path))
            return
        part = PARTS[given.part]
        adapters = [adapter_of(given.part, name) for name in given.names or part.known]
    except (ValueError, OSError) as error:
        sys.exit(f"conformance: {error}")
    # All of them first, Liger's before others: its interpreter must be chosen before a package loads Triton
    for adapter in sorted(adapters, key=lambda adapter: adapter.package != "liger-kernel"):
        adapter.why_not()
    print(_report(given.part, adapters, given.json))
    missing = [f"{adapter.spec} ({adapter.why_not()})" for adapter in adapters if adapter.why_not()]
    if given.names and missing:
        sys.exit(f"conformance: not run: {', '.join(missing)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the part, the names and the file."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    made = "page runs nothing, and makes the tables of a page from the JSON files beside it: PAGE-losses.json, ..."
    parser.add_argument("part", choices=[*PARTS, "page"], help=f"what to check; {made}")
    known = "; ".join(f"{name}: {', '.join(part.known)}" for name, part in PARTS.items())
    parser.add_argument("names", nargs="*", help=f"{known}; module:object for your own (default: all); the page")
    where = "write verdicts and reproductions to this file, beside those of other implementations in it"
    parser.add_argument("--json", type=Path, metavar="FILE", help=where)
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.part == "page" and (len(parsed.names) != 1 or parsed.json):
        parser.error("page takes one file, and nothing else")
    return parsed


def _report(part: str, adapters: Sequence[Implementation], path: Path | None) -> str:
    """Return the report of one part; with a path, the verdicts of all implementations in the file."""
    findings: dict[str, dict[str, Finding]] = {}
    for adapter in adapters:
        print(f"[{part}: {adapter.spec}]", file=sys.stderr)
        findings[adapter.spec] = run(adapter)
    if path:
        named = {adapter.name: findings[adapter.spec] for adapter in adapters}
        return report.table(PARTS[part], report.keep(path, named, adapters))
    said = [
        report.heading(adapters, part),
        report.table(PARTS[part], findings, report.figures),
        report.notes(adapters),
        report.reproductions(findings),
    ]
    return "\n\n".join(filter(None, said))


if __name__ == "__main__":
    main()
