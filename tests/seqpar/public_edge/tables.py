"""Make the cases of one argument from what is odd about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.seqpar.core.odd_tensors import NO_TENSOR, SPECIAL
from tests.seqpar.public_edge.case import Case, Raises

Odd = Mapping[str, tuple[Callable[[], object], str]]
"""What is odd about it -> (how to make it, what the error says of it)."""

NOT_TENSORS = SPECIAL | NO_TENSOR


def refused(where: str, call: Callable[[Any], object], argument: str, odd: Odd, error: type[Exception]) -> list[Case]:
    """One case for each odd value of the argument: this error, with the argument's name and these words."""

    def case(label: str, make: Callable[[], object], words: str) -> Case:
        value = make()
        return Case(f"{where}: {argument} is {label}", lambda: call(value), Raises(error, (argument, words)))

    return [case(label, make, words) for label, (make, words) in odd.items()]


def values(error_words: str, **odd: object) -> dict[str, tuple[Callable[[], object], str]]:
    """Plain values, all of which are told the same words, in which "{value}" stands for its repr."""
    return {
        label.replace("_", " "): (lambda value=value: value, error_words.replace("{value}", repr(value)))
        for label, value in odd.items()
    }


def raises(about: str, call: Callable[[], object], error: type[Exception], *words: str) -> Case:
    """A call that must raise this error, with all these words."""
    return Case(about, call, Raises(error, words))
