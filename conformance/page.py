"""Keep findings in JSON files, one for each part, and make the tables of a page from the files beside it."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from conformance.adapter import DEVICE, Implementation
from conformance.finding import Check, Finding
from conformance.layout_adapter import LayoutAdapter
from conformance.parts import PARTS, Part
from conformance.report import Findings, installed_version
from seqpar.markdown_table import markdown_table

TABLE = re.compile(rf"(<!-- ({'|'.join(PARTS)}): made by page -->\n).*?(\n<!-- end -->)", re.DOTALL)
"""Where a page has the table of a part; what lies between the marks is made."""
MARKS = {"pass": "✓", "not measured": "?", "not offered": "-"}
FAILS = "✗"
SILENT = "**✗ silent**"


def fill(page: Path) -> str:
    """Return a page with its tables made from the files beside it, PAGE-losses.json for that of the losses.

    Raises ValueError where the page has no place for a table, and OSError where a file is missing.
    """

    def made(place: re.Match[str]) -> str:
        before, part, after = place.groups()
        path = page.with_name(f"{page.stem}-{part}.json")
        return f"{before}{table(PARTS[part], read(path))}\n\n{', '.join(_versions(path))}.{after}"

    text, tables = TABLE.subn(made, page.read_text())
    if not tables:
        raise ValueError(f"{page} has no table to make: none is between <!-- losses: made by page --> and <!-- end -->")
    return text


def _versions(path: Path) -> Sequence[str]:
    """Return when the findings of a file were made, and with which versions, each once."""
    return [*dict.fromkeys(said for one in _data(path).values() for said in one["ran"].split(", "))]


def table(part: Part, findings: Findings) -> str:
    """Return the verdicts of a part as a Markdown table: a row for each check or layout, a column for each adapter."""
    rows: dict[str, list[Check]] = {}
    for check in part.checks:
        # All cases of a layout are one row
        rows.setdefault(check.name.partition(": ")[0], []).append(check)
    cells = [[name, *(_mark(checks, of) for of in findings.values())] for name, checks in rows.items()]
    return markdown_table(["", *findings], cells)


def _mark(checks: Sequence[Check], of: Mapping[str, Finding]) -> str:
    """Return the mark of one check, or of a layout's cases together."""
    found = {check: of.get(check.name, Finding("not measured")) for check in checks}
    failed = [check for check, finding in found.items() if finding.verdict == "fail"]
    if not failed:
        # A layout passes though some of its cases are not offered
        return MARKS[min((finding.verdict for finding in found.values()), key=[*MARKS].index)]
    is_silent = any(not check.is_cost and not found[check].is_raised for check in failed)
    mark = SILENT if is_silent else FAILS
    if len(checks) == 1:
        return mark
    offered = [finding for finding in found.values() if finding.verdict in ("pass", "fail")]
    return f"{mark} {len(failed)} of {len(offered)}"


def keep(path: Path, findings: Findings, adapters: Sequence[Implementation]) -> dict[str, dict[str, Finding]]:
    """Write the findings to a JSON file, beside those of other adapters in it, and return all of them."""
    data = json.loads(path.read_text()) if path.exists() else {}
    for adapter in adapters:
        checks = {name: _as_json(finding) for name, finding in findings[adapter.name].items()}
        data[adapter.name] = {"ran": ran(adapter), "note": adapter.note, "checks": checks}
    path.write_text(json.dumps(data, indent=1) + "\n")
    return read(path)


def _as_json(finding: Finding) -> dict[str, Any]:
    """Return what a finding has to say, with its reproduction line by line."""
    said = asdict(finding) | {"reproduction": finding.reproduction.splitlines()}
    return {name: value for name, value in said.items() if value}


def read(path: Path) -> dict[str, dict[str, Finding]]:
    """Return the findings of a JSON file, by adapter and by check."""
    return {name: {c: _finding(**f) for c, f in one["checks"].items()} for name, one in _data(path).items()}


def _finding(reproduction: Sequence[str] = (), **said: Any) -> Finding:
    """Return the finding of its JSON."""
    return Finding(reproduction="\n".join(reproduction), **said)


def _data(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def ran(adapter: Implementation) -> str:
    """Return when an adapter ran, where, and with which versions."""
    device = DEVICE
    # Ranks are on the CPU
    if isinstance(adapter, LayoutAdapter):
        device = "cpu"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if adapter.package:
        versions.append(f"{adapter.package} {installed_version(adapter.package)}")
    return f"{date.today()}, {device.upper()}, {', '.join(versions)}"
