"""Every public function answers odd arguments as documented: the right number, or one line that names the argument."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

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
