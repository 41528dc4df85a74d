"""The findings as Markdown tables, the lines that reproduce each failure, and the JSON files for making a page."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import torch

from conformance.adapter import DEVICE, Implementation
from conformance.finding import Check, Finding
from conformance.parts import PARTS, Part
from seqpar.markdown_table import markdown_table

Findings = Mapping[str, Mapping[str, Finding]]
"""By adapter, then by check."""
Row = Mapping[Check, Finding]
"""An adapter's findings in a row of a table: for one check, or for a layout's cases, whose names start with it."""
TABLE = re.compile(rf"(<!-- ({'|'.join(PARTS)}): made by page -->\n).*?(\n<!-- end -->)", re.DOTALL)
"""The place for a part's table in a page; what is between the marks is generated."""
MARKS = {"pass": "✓", "not measured": "?", "not offered": "-"}


def figures(row: Row) -> str:
    """Return verdicts with their figures; for a layout, the failing cases by cause, and how many cases pass."""
    verdicts = [finding.verdict for finding in row.values()]
    if _is_one_check(row) or not {"pass", "fail"} & {*verdicts}:
        # "|" would end the table's cell
        said = "; ".join(dict.fromkeys(map(str, row.values()))).replace("|", "/")
        return f"**{said}**" if "fail" in verdicts else said
    causes: dict[str, list[str]] = {}
    for check, finding in row.items():
        if finding.verdict == "fail":
            # Without the number of ranks before the cause, and the explanation after it
            cause = re.split("[:;]", finding.figure)[1].strip()
            causes.setdefault(cause, []).append(check.name.partition(": ")[2])
    failed = [f"**{cause}** ({', '.join(names)})" for cause, names in causes.items()]
    return "; ".join([*failed, f"{verdicts.count('pass')} of {len(row) - verdicts.count('not offered')} pass"])


def marks(row: Row) -> str:
    """Return the mark for one check, or for a layout's cases together."""
    failed = {check: finding for check, finding in row.items() if finding.verdict == "fail"}
    if not failed:
        # A layout passes even if some of its cases are not offered
        return MARKS[min((finding.verdict for finding in row.values()), key=[*MARKS].index)]
    is_silent = any(not check.is_cost and not finding.is_raised for check, finding in failed.items())
    mark = "**✗ silent**" if is_silent else "✗"
    if _is_one_check(row):
        return mark
    offered = [finding for finding in row.values() if finding.verdict in ("pass", "fail")]
    return f"{mark} {len(failed)} of {len(offered)}"


def _is_one_check(row: Row) -> bool:
    """Return whether a row has no cases."""
    return not any(": " in check.name for check in row)


def table(part: Part, findings: Findings, cell: Callable[[Row], str] = marks) -> str:
    """Return a part as a Markdown table: a row for each check or layout that was run, a column for each adapter."""
    rows: dict[str, list[Check]] = {}
    for check in part.checks:
        if any(check.name in of for of in findings.values()):
            # All cases of a layout are one row
            rows.setdefault(check.name.partition(": ")[0], []).append(check)
    missing = Finding("not measured")
    cells = [
        [name, *(cell({check: of.get(check.name, missing) for check in checks}) for of in findings.values())]
        for name, checks in rows.items()
    ]
    return markdown_table(["", *findings], cells)


def notes(adapters: Sequence[Implementation]) -> str:
    """Return a line for each adapter that has a note."""
    return "\n".join(f"- **{adapter.name}**: {adapter.about}" for adapter in adapters if adapter.about)


def reproductions(findings: Findings) -> str:
    """Return a heading, the figure and the lines that reproduce it, for each failure."""
    failed = [(n, c, f) for n, of in findings.items() for c, f in of.items() if f.verdict == "fail"]
    blocks = [f"### {name}: {check}\n\n{f.figure}\n\n```python\n{f.reproduction}\n```" for name, check, f in failed]
    return "\n\n".join(blocks) or "No check failed."


def heading(adapters: Sequence[Implementation], part: str) -> str:
    """Return the command, the date and the versions."""
    # A user's own adapter is found by module:object, whatever its column is called
    names = " ".join(adapter.spec for adapter in adapters)
    return f"```\npython -m conformance {part} {names}\n```\n\n{ran(part, adapters)}."


def ran(part: str, adapters: Sequence[Implementation]) -> str:
    """Return when and where adapters ran, and with which versions."""
    # Ranks run on the CPU
    device = "cpu" if part == "layouts" else DEVICE
    packages = dict.fromkeys(adapter.package for adapter in adapters if adapter.package)
    versions = [f"{package} {installed_version(package)}" for package in packages]
    python = f"Python {platform.python_version()}"
    return ", ".join([str(date.today()), device.upper(), python, f"torch {torch.__version__}", *versions])


def installed_version(package: str) -> str:
    """Return a package's version, the `__version__` of a clone on PYTHONPATH, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package.replace("-", "_")), "__version__", "not installed"))


def fill(page: Path) -> str:
    """Return a page with its tables made from the files beside it, such as PAGE-losses.json for the losses.

    Raises ValueError if the page has no place for a table, and OSError if a file is missing.
    """

    def made(place: re.Match[str]) -> str:
        before, part, after = place.groups()
        path = page.with_name(f"{page.stem}-{part}.json")
        # When the findings were made, and with which versions, without repetitions
        said = dict.fromkeys(word for one in json.loads(path.read_text()).values() for word in one["ran"].split(", "))
        return f"{before}{table(PARTS[part], read(path))}\n\n{', '.join(said)}.{after}"

    text, tables = TABLE.subn(made, page.read_text())
    if not tables:
        raise ValueError(f"{page} has no table to make: none is between <!-- losses: made by page --> and <!-- end -->")
    return text


def keep(path: Path, findings: Findings, adapters: Sequence[Implementation]) -> Findings:
    """Write the findings to a JSON file, keeping those of other adapters in it, and return all of them."""
    data = json.loads(path.read_text()) if path.exists() else {}
    for adapter in adapters:
        checks = {name: _as_json(finding) for name, finding in findings[adapter.name].items()}
        data[adapter.name] = {"ran": ran(adapter.part, [adapter]), "note": adapter.about, "checks": checks}
    path.write_text(json.dumps(data, indent=1) + "\n")
    return read(path)


def _as_json(finding: Finding) -> dict[str, Any]:
    """Return a finding's fields that are set, as JSON."""
    return {f.name: value for f in fields(finding) if f.compare and (value := getattr(finding, f.name))}


def read(path: Path) -> dict[str, dict[str, Finding]]:
    """Return the findings in a JSON file, by adapter and by check."""
    data = json.loads(path.read_text())
    return {name: {check: Finding(**said) for check, said in one["checks"].items()} for name, one in data.items()}
