"""The findings as a Markdown table, and five lines for each failure."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date

import torch

from conformance.adapter import DEVICE, Implementation
from conformance.finding import Check, Finding
from conformance.layout_adapter import LAYOUTS
from conformance.loss_checks import CHECKS
from seqpar.markdown_table import markdown_table

Findings = Mapping[str, Mapping[str, Finding]]
"""By adapter, then by check."""


def table(findings: Findings, checks: Sequence[Check] = CHECKS) -> str:
    """Return a Markdown table: a row for each check, a column for each adapter."""
    rows = []
    for check in checks:
        cells = [_cell(of[check.name]) for of in findings.values() if check.name in of]
        if cells:
            rows.append([check.name, *cells])
    return markdown_table(["", *findings], rows)


def by_layout(findings: Findings) -> str:
    """Return a Markdown table of the checks of layouts: a row for each layout, a column for each adapter."""
    rows = [[layout, *(_layout_cell(layout, of) for of in findings.values())] for layout in LAYOUTS]
    return markdown_table(["", *findings], [row for row in rows if any(row[1:])])


def _layout_cell(layout: str, of: Mapping[str, Finding]) -> str:
    """Return a layout's cases that fail, each with the name of its cause, and how many pass."""
    cases = {name.partition(": ")[2]: f for name, f in of.items() if name.partition(": ")[0] == layout}
    verdicts = [finding.verdict for finding in cases.values()]
    if not {"pass", "fail"} & {*verdicts}:
        return "; ".join(dict.fromkeys(map(str, cases.values())))
    causes: dict[str, list[str]] = {}
    for name, finding in cases.items():
        if finding.verdict == "fail":
            # Without the number of ranks before it, and the explanation after it
            causes.setdefault(re.split("[:;]", finding.figure)[1].strip(), []).append(name)
    failed = [f"**{cause}** ({', '.join(names)})" for cause, names in causes.items()]
    return "; ".join([*failed, f"{verdicts.count('pass')} of {len(cases) - verdicts.count('not offered')} pass"])


def _cell(finding: Finding) -> str:
    """Return a finding as a cell; failures stand out in bold."""
    # "|" would end the table's cell
    text = str(finding).replace("|", "/")
    if finding.verdict == "fail":
        return f"**{text}**"
    return text


def notes(adapters: Sequence[Implementation]) -> str:
    """Return a line for each adapter that has a note."""
    return "\n".join(f"- **{adapter.name}**: {adapter.note}" for adapter in adapters if adapter.note)


def reproductions(findings: Findings) -> str:
    """Return a heading, the code and its output, for each failure."""
    failed = [(n, c, f) for n, of in findings.items() for c, f in of.items() if f.verdict == "fail"]
    blocks = [
        f"### {name}: {check}\n\n{f.figure}\n\n```python\n{f.reproduction}\n```\n\n```\n{printed(f.reproduction)}\n```"
        for name, check, f in failed
    ]
    return "\n\n".join(blocks) or "No check failed."


def printed(code: str) -> str:
    """Return what the code prints in a process of its own, or the last line of its traceback."""
    # A process of its own, because the code may fork, exhaust memory or end the process
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last_error = "".join(done.stderr.strip().splitlines()[-1:])
    return done.stdout.strip() or last_error or f"the process ended with {done.returncode}"


def heading(adapters: Sequence[Implementation], part: str = "losses") -> str:
    """Return the command, the date and the versions."""
    packages = dict.fromkeys(adapter.package for adapter in adapters if adapter.package)
    versions = [f"{package} {installed_version(package)}" for package in packages]
    # One's own is found by module:object, whatever its column is called
    names = " ".join(adapter.spec for adapter in adapters)
    what = ", ".join([f"Python {platform.python_version()}", f"torch {torch.__version__}", *versions])
    device = DEVICE
    if part == "layouts":
        device = "cpu"
    return f"```\npython -m conformance {part} {names}\n```\n\n{date.today()}, {device.upper()}. {what}."


def installed_version(package: str) -> str:
    """Return a package's version, that of a clone on PYTHONPATH by its `__version__`, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package.replace("-", "_")), "__version__", "not installed"))
