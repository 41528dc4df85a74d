"""The text that a run is trained on: its pairs, and what identifies them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from recipes.translation.data.sentence_pairs import each_training_pair, fingerprint
from recipes.translation.data.split_files import named
from recipes.translation.files.contents import Contents
from recipes.translation.settings.config import DataConfig, RunConfig
from recipes.translation.text.pair import Pair


@dataclass(frozen=True)
class TrainingCorpus:
    """A corpus to train on."""

    name: str
    """Its key in the section corpora; empty for data.train."""
    data: DataConfig
    """Where its training pairs come from."""
    tags: tuple[str, ...]
    """What stands in front of each source sentence."""
    weight: float

    def source(self, pair: Pair) -> str:
        """Return the source sentence with its tags."""
        return " ".join((*self.tags, pair.source))


class TrainingText:
    """The pairs of the training corpora, one after another: cleaned, without tags.

    Between `read` and `forget` they are in memory, so that each file is opened once, and what identifies them is of the
    very bytes that were read. With `data.cache`, for text beyond memory, `read` does nothing: whoever wants the pairs
    reads the files.
    """

    def __init__(self, config: RunConfig, corpora: Sequence[TrainingCorpus]) -> None:
        self.config = config
        self.corpora = corpora
        self._pairs: dict[str, list[Pair]] = {}
        self._fingerprints: dict[str, str] = {}

    def read(self) -> None:
        """Read the pairs, unless they are in memory, or are not to be."""
        if not self.config.data.cache and not self._pairs:
            self._pairs = {corpus.name: list(pairs) for corpus, pairs in self.each_corpus()}

    def forget(self) -> None:
        """Give the memory of the pairs back."""
        self._pairs = {}

    def each_corpus(self) -> Iterator[tuple[TrainingCorpus, Iterable[Pair]]]:
        """Yield every training corpus with its pairs."""
        for corpus in self.corpora:
            yield corpus, self._pairs.get(corpus.name) or self._each_pair(corpus)

    def identity(self) -> object:
        """Return what determines the text before it is cleaned, as JSON: settings, SHA-256 of the contents."""
        names = ("format", "source", "target", "builtin_pairs")
        found = {
            corpus.name: {name: getattr(corpus.data, name) for name in names} | {"text": self._fingerprint(corpus)}
            for corpus in self.corpora
        }
        if not self.config.corpora:
            return found[""]
        return found

    def _each_pair(self, corpus: TrainingCorpus) -> Iterator[Pair]:
        contents = Contents()
        with named(corpus.name):
            name = corpus.name or "train"
            lowercase = self.config.subwords.lowercase
            yield from each_training_pair(corpus.data, lowercase, self.config.cleaning, name, contents.opened)
            if contents.whole:
                self._fingerprints[corpus.name] = fingerprint(corpus.data, "train", contents)

    def _fingerprint(self, corpus: TrainingCorpus) -> str:
        if corpus.name not in self._fingerprints:
            with named(corpus.name):
                self._fingerprints[corpus.name] = fingerprint(corpus.data, "train")
        return self._fingerprints[corpus.name]
