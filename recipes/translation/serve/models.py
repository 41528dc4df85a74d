"""The models that are served, each for one pair of languages: lines in, translations and alignments out.

What makes them of a run, or of what it was exported to, is `commands.served_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from recipes.translation.translating.alignments import Link
from recipes.translation.translating.translate import Translation


class Line(NamedTuple):
    """The translations of one line, best first, and the links between the words of the line and of the best one."""

    translations: list[Translation]
    links: list[Link]
    refused: str = ""
    """Why the line was not translated."""


class Model(NamedTuple):
    """A model that translates between two languages."""

    name: str
    """The folder that was given for it."""
    engine: str
    source: str
    """The language that it translates from."""
    target: str
    """The language that it translates to."""
    beam: int
    """The most translations of a line."""
    batch_sentences: int
    """The lines that are translated at a time."""
    aligns: bool
    """Whether it can link words: its run is there, and not only an export."""
    translate: Callable[[Sequence[str], int, bool], list[Line]]
    """Lines, the number of translations wanted of each, and whether its words are to be linked with the best one's."""
