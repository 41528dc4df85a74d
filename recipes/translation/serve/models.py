"""The models that are served, each for one pair of languages: lines in, translations and alignments out.

What makes them of a run, or of what it was exported to, is `commands.served_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recipes.translation.translating.alignments import Link
from recipes.translation.translating.translate import Translation


class Line(NamedTuple):
    """The translations of one line, best first, and the links between the words of the line and of the best one."""

    translations: list[Translation]
    links: list[Link]
    refused: str = ""
    """Why the line was not translated."""


@dataclass(frozen=True)
class Model:
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
    refusals: Callable[[Sequence[str]], Mapping[int, str]]
    """Lines -> why some of them cannot be translated, by their places."""
    search: Callable[[Sequence[str], int], list[list[Translation]]]
    """Sentences and the number of translations wanted of each -> the translations, best first."""
    align: Callable[[Sequence[str], Sequence[str]], list[list[Link]]] | None
    """Sentences and translations -> the links between their words; None where there is only an exported model."""

    @property
    def aligns(self) -> bool:
        """Return whether the model can link words: its run is there, and not only an export."""
        return self.align is not None

    def translate(self, lines: Sequence[str], n_best: int, links: bool) -> list[Line]:
        """Translate lines; link the words of each with its best translation if wanted and possible."""
        found = self.search(lines, n_best)
        linked: list[list[Link]] = [[] for _ in lines]
        if links and self.align:
            linked = self.align(lines, [row[0].text for row in found])
        return [Line(*each) for each in zip(found, linked, strict=True)]
