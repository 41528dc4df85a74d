"""Text as a model reads and writes it: with tags in front, in lower case, and back again; words that are one subword.

A tag for the target language, such as <2de>, lets one model translate between several languages (Johnson et al. 2017,
"Google's multilingual neural machine translation system"); a tag for a corpus, such as <bt>, marks back-translated data
(Caswell et al. 2019, "Tagged back-translation").
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import CorpusConfig, DataConfig, DecodingConfig, RunConfig, TrainingConfig
from recipes.translation.settings.schema import shorten
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.subwords import Subwords


@dataclass(frozen=True)
class ModelText:
    """How a run's model reads and writes text."""

    tags: tuple[str, ...]
    """Every tag in the run, each once."""
    own: tuple[str, ...]
    """The tag for data.target, which a sentence without a tag gets; empty in a run without such tags."""
    lowercase: bool
    longest: int
    """The most subwords of a sentence that are translated."""

    @classmethod
    def of(cls, config: RunConfig) -> ModelText:
        """Return what a run's settings say about this."""
        own = language_tags(config.data, config.data.target)
        tags = [*own, *(tag for corpus in config.corpora.values() for tag in corpus_tags(corpus, config.data))]
        longest = longest_of(config.training, config.decoding)
        return cls(tuple(dict.fromkeys(tags)), own, config.subwords.lowercase, longest)

    def source(self, sentence: str) -> str:
        """Return a sentence as the model reads it: with the tag for data.target, if any, unless it has a tag."""
        tags, rest = self._tags_and_rest(sentence)
        if self.lowercase:
            rest = rest.lower()
        if not tags and rest.split():
            tags = "".join(f"{tag} " for tag in self.own)
        return tags + rest

    def target(self, translation: str) -> str:
        """Return a translation, or part of one, as the model would have written it."""
        if self.lowercase:
            return translation.lower()
        return translation

    def _tags_and_rest(self, sentence: str) -> tuple[str, str]:
        """Split a sentence after the tags at its start, which may contain capitals."""
        tags = ""
        rest = sentence
        while tag := next((tag for tag in self.tags if _begins_with(rest, tag)), ""):
            # There need not be a blank between a language tag and the next word
            rest = rest.partition(tag)[2].lstrip()
            tags += f"{tag} "
        return tags, rest


def longest_of(training: TrainingConfig, decoding: DecodingConfig) -> int:
    """Return the most subwords of a sentence that a run's model reads or writes."""
    return max(training.max_length, decoding.max_length)


def one_line(text: str) -> str:
    """Replace line breaks with blanks: a model that spells its output in bytes can produce any of Unicode's."""
    return " ".join(text.splitlines())


def same_text(one: str, other: str) -> bool:
    """Return whether two texts differ only in blanks at their ends and in runs of blanks, which subwords collapse."""
    return one == other or list(filter(None, one.split(" "))) == list(filter(None, other.split(" ")))


TOGETHER = 16
"""Number of sentences that are checked as one text, which is faster if none of them is changed."""


class OtherForm:
    """Counts target sentences that a model cannot write as they are, because of its subwords' normalisation rules."""

    def __init__(self, target: Subwords) -> None:
        self._target = target
        self.sentences = 0
        self.changed = 0
        self._example = ""

    def add(self, sentences: Sequence[str]) -> None:
        """Count sentences."""
        self.sentences += len(sentences)
        for start in range(0, len(sentences), TOGETHER):
            some = sentences[start : start + TOGETHER]
            # If a text is printable, ASCII or in NFC, so is every part of it
            if not self._target.leaves(" ".join(some)):
                for sentence in some:
                    self._compare(sentence)

    def _compare(self, sentence: str) -> None:
        if self._target.leaves(sentence):
            return
        written = one_line(self._target.normalize(sentence))
        if not same_text(sentence, written):
            self.changed += 1
            self._example = self._example or f"{shorten(repr(sentence))} as {shorten(repr(written))}"

    def join(self, later: OtherForm) -> None:
        """Add the counts for the sentences that follow."""
        self.sentences += later.sentences
        self.changed += later.changed
        self._example = self._example or later._example

    def note(self, label: str, what: str) -> None:
        """Print `lines` on stderr."""
        for line in self.lines(label, what):
            print(line, file=sys.stderr, flush=True)

    def lines(self, label: str, what: str) -> list[str]:
        """Return a line that gives their number and the first of them; none if there are none."""
        if not self.changed:
            return []
        return [
            f"[{label}] {self.changed:,} of {self.sentences:,} {what} in another form, by subwords.normalization "
            f"{self._target.normalization}: {self._example} (docs/data.md)"
        ]


def _begins_with(text: str, tag: str) -> bool:
    if tag.startswith("<2"):
        return text.lstrip().startswith(tag)
    return text.split(maxsplit=1)[:1] == [tag]


def corpus_tags(corpus: CorpusConfig, data: DataConfig) -> tuple[str, ...]:
    """Return the tags in front of each source sentence of a corpus."""
    tags = language_tags(data, corpus.target or data.target)
    if corpus.tag:
        tags = (*tags, corpus.tag)
    return tags


def check_symbols(symbols: Sequence[str]) -> None:
    """Raise ConfigError for a word that cannot be a subword of its own."""
    for index, symbol in enumerate(symbols):
        reason = ""
        if not symbol or symbol.split() != [symbol] or BLANK in symbol:
            reason = f"is not a single word without blanks and {BLANK}"
        elif re.fullmatch("<(unk|pad|s|/s|0x[0-9A-F]{2})>", symbol):
            reason = "is one of the subwords that every model has"
        elif symbol in symbols[:index]:
            reason = "is given twice"
        if reason:
            raise ConfigError(f"{symbol!r} {reason}: choose other words for subwords.symbols and the tags of corpora")


def check_known(tags: Sequence[str], symbols: Sequence[str], source: Subwords, target: Subwords) -> None:
    """Raise ConfigError if a tag or symbol is not one subword, as may be so in a model to start from."""
    for side, some in ((source, tags), (target, ())):
        pieces = side.pieces()
        # A tag's piece includes the blank before it, and a symbol's may
        wanted = {tag: {BLANK + tag} for tag in some} | {symbol: {symbol, BLANK + symbol} for symbol in symbols}
        if missing := [word for word, names in wanted.items() if names.isdisjoint(pieces)]:
            raise ConfigError(
                f"the subwords do not have {', '.join(sorted(missing))}, a tag or symbol of these settings: leave it "
                "out, or make new subwords without training.start_from"
            )
        for (word, names), ids in zip(wanted.items(), side.encode(list(wanted)), strict=True):
            found = [pieces[each] for each in ids]
            if names.isdisjoint(found):
                raise ConfigError(
                    f"{word!a}, a tag or symbol of these settings, is never one subword, because the subwords read it "
                    f"as {side.normalize(word)!a} (subwords.normalization {side.normalization}): choose another word"
                )


def language_tags(data: DataConfig, language: str) -> tuple[str, ...]:
    """Return the tag for a target language, if the run has such tags."""
    if data.language_tags:
        return (tag_of(language),)
    return ()


def tag_of(language: str) -> str:
    return f"<2{language}>"
