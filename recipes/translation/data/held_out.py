"""Validation and test data: that of the section data, or that of several corpora, each with its own languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.translation.data.corpora import (
    corpora_of,
    corpus_tags,
    data_of,
    named,
    only_held_out,
    with_language_tag,
)
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.data.split_files import check_format, check_languages
from recipes.translation.errors import ConfigError, DataError
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
        """Read the pairs, without tags; raise DataError as `load_pairs` does."""
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


def held_out(config: RunConfig, split: HeldOutSplit) -> list[HeldOut]:
    """Return the validation or test data of every corpus that has some, or else that of the section data.

    Raises ConfigError where both are given, and for names of corpora that cannot be part of a file's name; DataError
    where neither is, but for the built-in corpus.
    """
    names = [name for name, corpus in config.corpora.items() if getattr(corpus, split)]
    own: tuple[str, ...] = getattr(config.data, split)
    if not names:
        _check_builtin(config, split)
        return [HeldOut(config, "", split, config.data)]
    if own:
        raise ConfigError(
            f"data.{split} ({' '.join(own)}) and corpora.{names[0]}.{split} are both given: give the former to a corpus"
        )
    return [HeldOut(config, name, split, data_of(name, config), corpus_tags(name, config)) for name in names]


def the_one_of(config: RunConfig, split: HeldOutSplit) -> HeldOut:
    """Return the only validation or test data of a run; raise DataError where several corpora have some."""
    (first, *others) = held_out(config, split)
    if others:
        names = ", ".join(f"{split}.{each.name}" for each in (first, *others))
        raise DataError(
            f"{config.run} has the {split} data of several corpora ({names}), each of which is a test set of its own: "
            "name the files of one of them, such as "
            f"{config.run}/{split}.{first.name}.translations.txt with its references"
        )
    return first


def has_held_out(config: RunConfig, split: HeldOutSplit) -> bool:
    """Return whether the settings name validation or test data, or the run has that of the built-in corpus."""
    if any(getattr(corpus, split) for corpus in config.corpora.values()) or getattr(config.data, split):
        return True
    return config.data.format == "builtin" and not _all_from_files(config)


def check_held_out(config: RunConfig) -> list[list[Pair]]:
    """Read validation and test data, so that mistakes are found before the training; return the validation pairs.

    The built-in corpus needs no check, and no pairs of it are returned. Validation data is required, test data is
    optional. Raises DataError and ConfigError as `held_out` and `load_pairs` do.
    """
    for name, corpus in config.corpora.items():
        _check_names(name)
        if only_held_out(corpus) and corpus.weight != 1:
            raise ConfigError(
                f"corpora.{name}.weight is {corpus.weight:g}, but corpora.{name} has no train, whose share of an epoch "
                "it would be: leave it out"
            )
    found = []
    for each in held_out(config, "valid"):
        pairs: list[Pair] = []
        check_format(each.data)
        check_languages(each.data)
        if each.data.format != "builtin":
            pairs = each.pairs()
        found.append(pairs)
    for each in held_out(config, "test") if has_held_out(config, "test") else []:
        if each.data.format != "builtin":
            each.pairs()
    return found


def _check_names(name: str) -> None:
    """Raise ConfigError for a name of a corpus that cannot be part of a file's name."""
    if not name or "/" in name or "\0" in name:
        raise ConfigError(f"corpora has the name {name!r}, which would be part of files' names: use one without /")


def _check_builtin(config: RunConfig, split: HeldOutSplit) -> None:
    """Raise DataError where corpora from files would be judged by the built-in corpus."""
    if config.data.format == "builtin" and _all_from_files(config):
        way = ""
        if split == "test":
            way = "; without it, evaluate --split valid scores the validation data"
        raise DataError(
            f"there is no {split} data: name its files as data.{split}, or as {split} of one of the corpora{way}"
        )


def _all_from_files(config: RunConfig) -> bool:
    """Return whether there are corpora, and none of them is the built-in one, or a teacher's translations of it."""
    run = Path(config.run)
    return bool(config.corpora) and all(
        corpus.data.format != "builtin" and run not in Path(corpus.data.path).parents for corpus in corpora_of(config)
    )
