"""Validation and test data of one pair of languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.data.split_files import named
from recipes.translation.data.tags import with_language_tag
from recipes.translation.settings.config import DataConfig, RunConfig
from recipes.translation.text.pair import Pair

HeldOutSplit = Literal["valid", "test"]


@dataclass(frozen=True)
class HeldOut:
    """Validation or test data of one pair of languages."""

    config: RunConfig
    name: str
    """Its key in the section corpora; empty for the section data."""
    split: HeldOutSplit
    data: DataConfig
    """Where its pairs come from."""
    tags: tuple[str, ...] = ()
    """What stands in front of each source sentence of a corpus."""

    @property
    def setting(self) -> str:
        """Return the setting that names its files."""
        if not self.name:
            return f"data.{self.split}"
        return f"corpora.{self.name}.{self.split}"

    def pairs(self) -> list[Pair]:
        """Return the pairs, without tags, which are read once; raise DataError as `load_pairs` does."""
        return self._pairs

    @cached_property
    def _pairs(self) -> list[Pair]:
        with named(self.name):
            return load_pairs(self.data, self.split, self.config.subwords.lowercase)

    def spoken(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs with their sources as `translate` takes them: under a corpus's tags, except empty ones."""
        if not self.tags:
            return list(pairs)
        return [Pair(self._tagged(pair.source), pair.target) for pair in pairs]

    def read_as(self, sentence: str) -> str:
        """Return a source sentence as the model reads it."""
        if self.name:
            return self._tagged(sentence)
        return with_language_tag(self.config, sentence)

    def _tagged(self, sentence: str) -> str:
        if not sentence.split():
            return sentence
        return " ".join((*self.tags, sentence))
