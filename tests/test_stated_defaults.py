"""Every default that a page states is the code's: tables of defaults, `x.y 3`, the default, and so on, are parsed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import yaml

from recipes.translation.settings.config import SCHEMA, RunConfig
from seqpar.testing import assert_same_gradients, assert_same_loss, assert_same_results
from seqpar.testing.ranks import COLLECTIVE_TIMEOUT, TIMEOUT
from tests.test_documents import PAGES
from tests.test_readme import README

SETTING = r"`((?:training|decoding|subwords|data|layout|cleaning|noise)\.\w+)"
PHRASES = (
    rf"{SETTING}` is \w+, ([\w.-]+) unless it is set",
    rf"{SETTING}`, ([\w.,-]+) unless it is set",
    rf"{SETTING}` \| [^|]*?([\d.]+) unless it is set",
    rf"{SETTING}` \(([\d.,]+)\)",
)
"""The ways in which the pages state the default of a setting: its name, then the value."""


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Each setting of a table whose second column is headed `default`; a cell may have several, of one section."""
    for row in lines(text):
        names, values = (cell.replace("`", "").strip() for cell in row.split("|")[1:3])
        section = names.partition(".")[0]
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            yield (name if "." in name else f"{section}.{name}"), value


def lines(text: str) -> list[str]:
    """The lines of such tables."""
    tables = re.findall(r"\| setting \| default \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    return [line for table in tables for line in table.splitlines()]


def in_yaml(text: str) -> Iterator[tuple[str, str]]:
    """Each setting of a line of YAML whose comment says that these are the defaults."""
    for line in re.findall(r"^(.*)# the defaults", text, flags=re.MULTILINE):
        for section, settings in yaml.safe_load(line).items():
            yield from ((f"{section}.{name}", str(value)) for name, value in settings.items())


def stated(text: str) -> list[tuple[str, str]]:
    flowing = re.sub(r"(?<![|\n])\n(?![|\n])", " ", text)
    phrases = [match for phrase in PHRASES for match in re.findall(phrase, flowing)]
    return [*rows(text), *in_yaml(text), *phrases]


def default_of(setting: str) -> object:
    return reduce(getattr, setting.split("."), RunConfig())


def as_printed(value: str) -> list[object]:
    """Numbers as such, wherever they have thousands' commas, and words as they are."""
    words = [re.sub(r"(?<=\d),(?=\d{3})", "", word) for word in value.split()]
    return [yaml.safe_load(word) if not re.fullmatch(r"[\d.]+e-?\d+", word) else float(word) for word in words]


STATED = [(page.name, *fact) for page in PAGES for fact in stated(page.read_text())]


@pytest.mark.parametrize(("page", "setting", "value"), STATED, ids=lambda part: part.replace("::", ""))
def test_the_default_that_a_page_states_is_the_codes(page: str, setting: str, value: str) -> None:
    default = default_of(setting)
    assert as_printed(value) == list(default if isinstance(default, tuple) else [default])


def test_the_row_of_a_setting_names_all_its_choices() -> None:
    found = {}
    for line in (line for page in PAGES for line in lines(page.read_text())):
        name = line.split("`")[1]
        if name in SCHEMA.settings:
            choices = SCHEMA.settings[name].choices
            found[name] = [choice for choice in choices if not re.search(rf"\b{choice}\b", line)]
    assert not any(found.values()), found
    assert "training.schedule" in found


def test_the_ways_of_stating_a_default_are_all_found() -> None:
    found = {(setting, value) for _, setting, value in STATED}
    for fact in (
        ("training.betas", "0.9 0.98"),
        ("training.warmup", "200"),
        ("layout.timeout", "300"),
        ("training.teacher_weight", "0.9"),
        ("training.lora_alpha", "16"),
    ):
        assert fact in found


@pytest.mark.parametrize("check", [assert_same_gradients, assert_same_loss, assert_same_results])
def test_the_proof_kit_is_as_strict_as_the_first_page_says(check: Callable[..., None]) -> None:
    (promised,) = re.findall(r"match the plain, un-chunked single-device loss to within (1e-\d+)", README.read_text())
    assert inspect.signature(check).parameters["rtol"].default == float(promised)


def test_a_collective_of_a_pool_gives_up_before_the_pool_does() -> None:
    assert 0 < 2 * COLLECTIVE_TIMEOUT < TIMEOUT < 180, "pytest's own timeout"
