"""Every public function answers odd arguments as documented: the right number, or one line that names the argument."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import seqpar
from tests.seqpar import public_edge
from tests.seqpar.public_edge.case import Case, hold


def _tables() -> list[Case]:
    names = [m.name for m in pkgutil.iter_modules(public_edge.__path__) if m.name.endswith("_table")]
    return [case for name in names for case in importlib.import_module(f"{public_edge.__name__}.{name}").CASES]


CASES = _tables()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_answer_is_the_documented_one(case: Case) -> None:
    hold(case)


def test_no_two_cases_share_a_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_there_are_at_least_six_hundred():
    assert len(CASES) >= 600


def test_every_public_name_is_in_a_table():
    tables = "".join(path.read_text() for path in Path(__file__).parent.glob("*_table.py"))
    missing = [name for name in seqpar.__all__ if not re.search(rf"\bseqpar\.{name}\b", tables)]
    assert missing == []
