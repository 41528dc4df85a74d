"""The training corpora of a run, and the tags in front of their source sentences.

A tag is a word that is one subword. The target language's, such as <2de>, lets one model translate between several
languages (Johnson et al. 2017, "Google's multilingual neural machine translation system"); that of a corpus, such as
<bt>, marks back-translated data (Caswell et al. 2019, "Tagged back-translation").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recipes.translation.data.mixing import Mixture
from recipes.translation.data.sentence_pairs import each_training_pair, fingerprint
from recipes.translation.data.split_files import check_named
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import CorpusConfig, DataConfig, RunConfig, format_of_files
from recipes.translation.text.pair import Pair
from recipes.translation.text.placeholders import masked_pair
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.subwords import Subwords, symbols_of


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


def corpora_of(config: RunConfig) -> list[TrainingCorpus]:
    """Return the training corpora: those of the section corpora, or else the one of data.train."""
    if config.data.streaming and "hub" not in _formats(config):
        raise ConfigError(
            "data.streaming is for data of format hub, and there is none: leave it out, or set data.format hub"
        )
    if not config.corpora:
        return [TrainingCorpus("", config.data, language_tags(config, config.data.target), 1.0)]
    if config.data.train:
        raise ConfigError(
            f"data.train ({' '.join(config.data.train)}) and corpora ({', '.join(config.corpora)}) are both given: "
            "make data.train one of the corpora"
        )
    names = [name for name, corpus in config.corpora.items() if not only_held_out(corpus)]
    if not any(config.corpora[name].weight for name in names):
        if not names:
            raise ConfigError(f"no corpus of corpora ({', '.join(config.corpora)}) has train: name its training files")
        raise ConfigError(f"every weight of corpora ({', '.join(names)}) is 0: give one of them more")
    return [_training_corpus(name, config) for name in names]


def only_held_out(corpus: CorpusConfig) -> bool:
    """Return whether a corpus has validation or test data and nothing to train on."""
    return not corpus.train and bool(corpus.valid or corpus.test)


def _formats(config: RunConfig) -> set[str | None]:
    return {config.data.format, *(corpus.format for corpus in config.corpora.values())}


def _training_corpus(name: str, config: RunConfig) -> TrainingCorpus:
    data = data_of(name, config)
    return TrainingCorpus(name, data, corpus_tags(name, config), config.corpora[name].weight)


def data_of(name: str, config: RunConfig) -> DataConfig:
    """Return the files and languages of the corpus of this name."""
    corpus = config.corpora[name]
    own: dict[str, Any] = {
        key: getattr(corpus, key) for key in ("path", "source", "target") if getattr(corpus, key) is not None
    }
    splits = {split: getattr(corpus, split) for split in ("train", "valid", "test")}
    formats = (format_of_files(f"corpora.{name}.{split}", names) for split, names in splits.items() if names)
    own["format"] = corpus.format or next(formats, None) or "builtin"
    if own["format"] == "builtin":  # which has no files: data.path is that of the others
        own.setdefault("path", "")
    return dataclasses.replace(config.data, **splits, **own)


def corpus_tags(name: str, config: RunConfig) -> tuple[str, ...]:
    """Return what stands in front of each source sentence of the corpus of this name."""
    corpus = config.corpora[name]
    tags = language_tags(config, corpus.target or config.data.target)
    if corpus.tag:
        tags = (*tags, corpus.tag)
    return tags


def each_corpus(config: RunConfig) -> Iterator[tuple[TrainingCorpus, Iterator[Pair]]]:
    """Yield every training corpus with its pairs one by one: cleaned, with placeholders, without tags."""
    for corpus in corpora_of(config):
        yield corpus, _each_pair(corpus, config)


def _each_pair(corpus: TrainingCorpus, config: RunConfig) -> Iterator[Pair]:
    with named(corpus.name):
        name = corpus.name or "train"
        for pair in each_training_pair(corpus.data, config.subwords.lowercase, config.cleaning, name):
            yield masked_pair(pair, config.subwords.placeholders)


def check_training_data(config: RunConfig) -> None:
    """Raise an error where the training data is not named as its format needs; the files are not read."""
    targets = list(dict.fromkeys(corpus.data.target for corpus in corpora_of(config)))
    if config.data.language_tags and config.data.target not in targets:
        raise ConfigError(
            f"data.target is {config.data.target}, into which translate would translate, but no corpus does: set it to "
            f"{' or '.join(targets)}"
        )
    for corpus in corpora_of(config):
        with named(corpus.name):
            check_named(corpus.data, "train")


def identity(config: RunConfig) -> object:
    """Return what determines the training text before it is cleaned, as JSON: settings, SHA-256 of the contents."""
    found = []
    for corpus in corpora_of(config):
        names = ("format", "source", "target", "builtin_pairs")
        known = {name: getattr(corpus.data, name) for name in names}
        with named(corpus.name):
            known["text"] = fingerprint(corpus.data, "train")
        found.append(known)
    if not config.corpora:
        return found[0]
    return dict(zip([corpus.name for corpus in corpora_of(config)], found, strict=True))


def mixture_of(config: RunConfig, sizes: Sequence[int]) -> Mixture | None:
    """Return how the corpora, which have these many pairs, are mixed; None to train on every pair once an epoch."""
    weights = [corpus.weight for corpus in corpora_of(config)]
    if len(set(weights)) == 1 and (config.data.temperature == 1 or len(weights) == 1):
        return None
    return Mixture(sizes, weights, config.data.temperature, config.training.seed)


def tags_of(config: RunConfig) -> tuple[str, ...]:
    """Return every tag of the run, each once."""
    tags = [tag for name in config.corpora for tag in corpus_tags(name, config)]
    return tuple(dict.fromkeys([*language_tags(config, config.data.target), *tags]))


def with_language_tag(config: RunConfig, sentence: str) -> str:
    """Put the tag of data.target in front of a sentence, if the run has such tags and the sentence has none of them."""
    first = sentence.split(maxsplit=1)[:1]
    if not config.data.language_tags or not first or first[0] in tags_of(config):
        return sentence
    return f"{_tag(config.data.target)} {sentence}"


def check_symbols(symbols: Sequence[str]) -> None:
    """Raise ConfigError for a word that cannot be one subword of its own."""
    for index, symbol in enumerate(symbols):
        reason = ""
        if not symbol or symbol.split() != [symbol] or BLANK in symbol:
            reason = f"is not one word without blanks and without {BLANK}"
        elif re.fullmatch("<(unk|pad|s|/s|0x[0-9A-F]{2})>", symbol):
            reason = "is one of the subwords that every model has"
        elif symbol in symbols[:index]:
            reason = "is given twice"
        if reason:
            raise ConfigError(f"{symbol!r} {reason}: choose other words for subwords.symbols and the tags of corpora")


def check_known(config: RunConfig, source: Subwords, target: Subwords) -> None:
    """Raise ConfigError if a tag or symbol is not one subword, as in those of a model to start from."""
    symbols = symbols_of(config.subwords)
    needed = ((source, [*(BLANK + tag for tag in tags_of(config)), *symbols]), (target, symbols))
    for side, words in needed:
        if missing := set(words) - set(side.pieces()):
            names = ", ".join(sorted(word.removeprefix(BLANK) for word in missing))
            raise ConfigError(
                f"the subwords do not have {names}, a tag or symbol of these settings: leave it out, or make new "
                "subwords without training.start_from"
            )


def _tag(language: str) -> str:
    return f"<2{language}>"


def language_tags(config: RunConfig, language: str) -> tuple[str, ...]:
    """Return the tag of a target language, if the run has such tags."""
    if config.data.language_tags:
        return (_tag(language),)
    return ()


@contextmanager
def named(corpus: str) -> Iterator[None]:
    """Add a corpus's name, if it has one, to an error."""
    try:
        yield
    except (DataError, ConfigError) as error:
        if not corpus:
            raise
        raise type(error)(f"corpora.{corpus}: {error}") from error
