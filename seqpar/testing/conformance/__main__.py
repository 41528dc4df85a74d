"""Check implementations of a loss, of token scores or of a step over ranks: who passes what, and how to see it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqpar.testing.conformance import page, report
from seqpar.testing.conformance.adapter import loaded
from seqpar.testing.conformance.finding import Checked, Finding
from seqpar.testing.conformance.parts import LAYOUTS, LOSSES, PARTS, SCORES, Part, run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print versions, the table, notes and reproductions; exit with 1 if a named implementation could not run."""
    given = _parsed(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts products says when it starts and stops
    sys.path.insert(0, os.getcwd())  # where module:object is looked for
    try:
        if given.page:
            given.page.write_text(page.filled(given.page))
            return
        columns = {part: _columns(part, given.names, given.part == "both") for part in _chosen(given.part)}
        _check_used(given.names, columns)
    except (ValueError, OSError) as error:
        sys.exit(f"conformance: {error}")
    everyone = [adapter for adapters in columns.values() for adapter in adapters.values()]
    # All of them first: Triton's interpreter must be chosen before anything loads Triton, as some packages do
    for adapter in sorted(everyone, key=lambda adapter: "TRITON_INTERPRET" not in adapter.imports):
        adapter.why_not()
    said = [_report(part, adapters, given.json) for part, adapters in columns.items() if adapters]
    print("\n\n".join(said))
    if given.names:
        _exit_if_missing(columns)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the names and the part."""
    parser = argparse.ArgumentParser(prog="python -m seqpar.testing.conformance", description=__doc__)
    known = "; ".join(f"{part.name}: {', '.join(part.known)}" for part in PARTS.values())
    parser.add_argument("names", nargs="*", help=f"{known}; module:object for your own (default: all)")
    parser.add_argument(
        "--part", choices=[*PARTS, "both"], default="losses", help="what to check (losses); both is losses and scores"
    )
    where = "write verdicts and reproductions to this file, beside those of other implementations in it"
    parser.add_argument("--json", type=Path, metavar="FILE", help=where)
    made = "run nothing, and make the tables of this page from the JSON files beside it: PAGE-losses.json, ..."
    parser.add_argument("--page", type=Path, metavar="FILE", help=made)
    parsed = parser.parse_args(arguments)
    if parsed.json and parsed.part == "both":
        parser.error("--json is for one part, and the part is both")
    return parsed


def _chosen(name: str) -> list[Part[Any]]:
    """Return the parts that are asked for."""
    if name == "both":
        return [LOSSES, SCORES]
    return [PARTS[name]]


def _columns(part: Part[Any], names: Sequence[str], is_one_of_two: bool) -> dict[str, Checked]:
    """Return a part's adapters by name; with both parts, those of the names that it has."""
    columns: dict[str, Checked] = {}
    for name in names or part.known:
        if is_one_of_two and not _belongs(name, part):
            continue
        columns[name] = part.adapter_of(name)
    return columns


def _belongs(name: str, part: Part[Any]) -> bool:
    """Return whether a name is one of a part's own."""
    if ":" in name:
        return isinstance(loaded(name), part.kind)
    return name in part.known


def _check_used(names: Sequence[str], columns: dict[Part[Any], dict[str, Checked]]) -> None:
    """Raise ValueError for a name that is in no part."""
    for name in names:
        if not any(name in adapters for adapters in columns.values()):
            known = "; ".join(f"{part.name}: {', '.join(part.known)}" for part in columns)
            raise ValueError(f"{name!r} is not known; there are {known}, and module:object for your own")


def _report(part: Part[Any], adapters: dict[str, Checked], path: Path | None) -> str:
    """Return the report of one part; with a path, the verdicts of all that the file has."""
    findings: dict[str, dict[str, Finding]] = {}
    for name, adapter in adapters.items():
        print(f"[{part.name}: {name}]", file=sys.stderr)
        findings[name] = run(adapter)  # type: ignore[type-var]
    columns = [*adapters.values()]
    if path:
        return page.table(part, page.kept(path, findings, columns))
    said = [
        report.heading(columns, part.name),
        report.by_layout(findings) if part is LAYOUTS else report.table(findings, part.checks),
        report.notes(columns),
        report.reproductions(findings),
    ]
    return "\n\n".join(filter(None, said))


def _exit_if_missing(columns: dict[Part[Any], dict[str, Checked]]) -> None:
    """Exit with a message if an implementation could not run."""
    reasons = {name: adapter.why_not() for adapters in columns.values() for name, adapter in adapters.items()}
    missing = [f"{name} ({why})" for name, why in reasons.items() if why]
    if missing:
        sys.exit(f"conformance: not run: {', '.join(missing)}")


if __name__ == "__main__":
    main()
