"""A sentence and its translation, and the three splits of a corpus."""

from typing import Literal, NamedTuple

Split = Literal["train", "valid", "test"]


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str
