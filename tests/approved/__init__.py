"""Hold what a refusal says against the line that was approved for it.

This folder has a file for each table of refusals, and in it a line for each case: its name, the exception and the
message. There the English is read. To approve what the code says now, before reading the difference:

    APPROVE=1 python -m pytest tests/seqpar/linear/test_refusals.py
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
APPROVE = os.environ.get("APPROVE") == "1"


def assert_refused(table: str, case: str, call: Callable[[], object]) -> None:
    """Assert that the call raises the exception, and says the one line, that is approved for this case."""
    said = "nothing was raised"
    try:
        call()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert "\n" not in said
    if APPROVE:
        _write(table, _lines(table) | {case: said})
    assert said == _lines(table).get(case)


def assert_no_other_line(table: str, cases: Iterable[str]) -> None:
    """Assert that every approved line of the table belongs to one of the cases."""
    if APPROVE:
        _write(table, {case: line for case, line in _lines(table).items() if case in cases})
    assert _lines(table).keys() <= {*cases}


def _lines(table: str) -> dict[str, str]:
    path = FOLDER / f"{table}.txt"
    if not path.exists():
        return {}
    return dict(line.split(": ", 1) for line in path.read_text("utf-8").splitlines())


def _write(table: str, lines: dict[str, str]) -> None:
    text = "".join(f"{case}: {line}\n" for case, line in sorted(lines.items()))
    (FOLDER / f"{table}.txt").write_text(text, "utf-8")
