"""The corpora of a run: what it is trained, validated and tested on, according to its settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from recipes.translation.data.mixing import Mixture
from recipes.translation.data.sentence_pairs import each_training_pair, fingerprint, load_pairs, say_to_stderr
from recipes.translation.data.split_files import check_named, naming_corpus
from recipes.translation.data.token_store import Store
from recipes.translation.data.training_text import LAYOUT, TrainingText, write_text
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.files.lines import Hashes
from recipes.translation.settings.checks import check_unset
from recipes.translation.settings.config import CorpusConfig, DataConfig, RunConfig, format_of_files
from recipes.translation.settings.paths import expand_path
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.model_text import corpus_tags, language_tags
from recipes.translation.text.pair import Pair, Split

HeldOutSplit = Literal["valid", "test"]


@dataclass(frozen=True)
class CorpusSplit:
    """The training, validation or test data of one language pair."""

    config: RunConfig
    name: str
    """Its key in the section corpora; empty for the section data."""
    split: Split
    data: DataConfig
    """Where its pairs come from."""
    tags: tuple[str, ...] = ()
    """What is put in front of each source sentence; for the section data, only in training."""
    weight: float = 1.0
    """The weight of the corpus in training."""

    @property
    def setting(self) -> str:
        """Return the setting that names its files."""
        if not self.name:
            return f"data.{self.split}"
        return f"corpora.{self.name}.{self.split}"

    def __str__(self) -> str:
        """Return its files and languages, for the log."""
        names = " ".join(str(Path(self.data.path, name)) for name in getattr(self.data, self.split))
        return f"{names or 'the built-in corpus, since no file is named,'} ({self.data.source} to {self.data.target})"

    @cached_property
    def pairs(self) -> list[Pair]:
        """Read validation or test pairs, without tags, only once; raise DataError as `load_pairs` does."""
        with naming_corpus(self.name):
            return load_pairs(self.data, self.split, self.config.subwords.lowercase)

    def tagged_pairs(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs with sources as `translate` takes them: with a corpus's tags in front, except empty ones."""
        return [Pair(self.source(pair), pair.target) if pair.source.split() else pair for pair in pairs]

    def source(self, pair: Pair) -> str:
        """Return the source sentence with the tags in front."""
        return " ".join((*self.tags, pair.source))

    @property
    def tokenizer(self) -> str:
        """Return the name of sacreBLEU's tokeniser for the references; raise ConfigError if it is not available."""
        return tokenizer_for(self.data.tokenize, self.data.target)


def _without_blanks(pair: Pair) -> Pair:
    """Return a pair without the blanks that a copy may have lost."""
    return Pair(" ".join(pair.source.split()), " ".join(pair.target.split()))


class Corpora:
    """The corpora of a run, resolved once from its settings.

    Raises ConfigError for training corpora that contradict each other.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.training = self._training()
        """The corpora of the section corpora, or else the one of data.train."""
        self._hashes: Hashes = {}

    @cached_property
    def text(self) -> TrainingText:
        """Open the training text, cleaned and without tags; unless it exists already, read it from the data first."""
        folder = self.text_folder
        if not folder.exists():
            start = time.monotonic()
            write_text(folder, lambda say: (pairs for _, pairs in self.each_corpus(say)))
            print(f"[data] training text written to {folder} in {time.monotonic() - start:.1f} s", flush=True)
        store = Store(folder).check({"source": 256, "target": 256})
        for line in store.notices:
            say_to_stderr(line)
        return TrainingText(store)

    @property
    def text_folder(self) -> Path:
        """Return where the training text is."""
        return self.cache / f"text-{self.text_key}"

    @property
    def cache(self) -> Path:
        """Return the folder for what is made from the training data once and then reused."""
        if self.config.data.cache:
            return Path(expand_path(self.config.data.cache, "data.cache"))
        return Path(self.config.run, "data")

    @cached_property
    def text_key(self) -> str:
        """Return the name of the training text: a hash of everything it is made from."""
        made_from = {
            "data": self.identity,
            "cleaning": dataclasses.asdict(self.config.cleaning),
            "symbols": self.config.subwords.symbols,
            "lowercase": self.config.subwords.lowercase,
        }
        return hashlib.sha256(json.dumps([LAYOUT, made_from]).encode()).hexdigest()[:32]

    def each_corpus(self, say: Callable[[str], None] = say_to_stderr) -> Iterator[tuple[CorpusSplit, Iterable[Pair]]]:
        """Read every training corpus; yield it with its pairs, and report what is noticed to `say`."""
        for corpus in self.training:
            yield corpus, self._each_pair(corpus, say)

    @cached_property
    def identity(self) -> object:
        """Return what determines the training text before cleaning, as JSON: settings, and SHA-256 of the contents."""
        names = ("format", "source", "target", "builtin_pairs")
        found = {}
        for corpus in self.training:
            with naming_corpus(corpus.name):
                text = fingerprint(corpus.data, "train", self._hashes)
            found[corpus.name] = {name: getattr(corpus.data, name) for name in names} | {"text": text}
        return found if self.config.corpora else found[""]

    def _each_pair(self, corpus: CorpusSplit, say: Callable[[str], None]) -> Iterator[Pair]:
        config = self.config
        with naming_corpus(corpus.name):
            name = corpus.name or "train"
            yield from each_training_pair(corpus.data, config.subwords, config.cleaning, name, self._hashes, say)

    def note_held_out(self) -> None:
        """Report how many validation and test pairs are also in the training data."""
        sets = {each.setting: set(map(_without_blanks, each.pairs)) for each in self.all_held_out}
        for corpus, found in zip(self.training, self.text.pairs_among(list(sets.values())), strict=True):
            for (setting, pairs), there in zip(sets.items(), found, strict=True):
                if there:
                    say_to_stderr(
                        f"[data] {corpus.name or 'train'}: {there:,} of the {len(pairs):,} different pairs of "
                        f"{setting} are also in the training data, so that its scores reward memorisation: leave them "
                        "out of one of the two"
                    )

    @property
    def all_held_out(self) -> list[CorpusSplit]:
        """Return the validation data, and the test data if there is any."""
        return [*self.valid, *self._test]

    @cached_property
    def valid(self) -> list[CorpusSplit]:
        """Return the validation data, as `held_out` does, but such that its pairs are read only once."""
        return self.held_out("valid")

    @cached_property
    def _test(self) -> list[CorpusSplit]:
        return self.held_out("test") if self.has("test") else []

    def held_out(self, split: HeldOutSplit) -> list[CorpusSplit]:
        """Return the validation or test data of every corpus that has some, or else that of the section data.

        Raises ConfigError if both are given; DataError if neither is, except for the built-in corpus.
        """
        config = self.config
        names = [name for name, corpus in config.corpora.items() if getattr(corpus, split)]
        own: tuple[str, ...] = getattr(config.data, split)
        if not names:
            if config.data.format == "builtin" and not self.has(split):
                way = ""
                if split == "test":
                    way = "; without it, evaluate --split valid scores the validation data"
                raise DataError(
                    f"there is no {split} data: name its files as data.{split}, or as {split} of one of the "
                    f"corpora{way}"
                )
            return [CorpusSplit(config, "", split, config.data)]
        if own:
            raise ConfigError(
                f"data.{split} ({' '.join(own)}) and corpora.{names[0]}.{split} are both given: give the former to a "
                "corpus"
            )
        return [self._of_section(name, split) for name in names]

    def has(self, split: HeldOutSplit) -> bool:
        """Return whether the settings name validation or test data, or the run uses that of the built-in corpus.

        Corpora from files are not tested on the built-in one, but a teacher's translations of it are.
        """
        config = self.config
        if any(getattr(corpus, split) for corpus in config.corpora.values()) or getattr(config.data, split):
            return True
        if config.data.format != "builtin":
            return False
        run = Path(config.run)
        return not config.corpora or any(
            corpus.data.format == "builtin" or run in Path(corpus.data.path).parents for corpus in self.training
        )

    def the_one(self, split: HeldOutSplit) -> CorpusSplit:
        """Return the only validation or test data of a run; raise DataError if several corpora have some."""
        (first, *others) = self.held_out(split)
        if others:
            names = ", ".join(f"{split}.{each.name}" for each in (first, *others))
            run = self.config.run
            raise DataError(
                f"{run} has the {split} data of several corpora ({names}), each of which is a test set of its own: "
                "name the files of one of them, such as "
                f"{run}/{split}.{first.name}.translations.txt with its references"
            )
        return first

    def mixture(self, sizes: Sequence[int]) -> Mixture | None:
        """Return how corpora of these sizes in pairs are mixed; None to train on every pair once per epoch."""
        weights = [corpus.weight for corpus in self.training]
        if len(set(weights)) == 1 and (self.config.data.temperature == 1 or len(weights) == 1):
            return None
        return Mixture(sizes, weights, self.config.data.temperature, self.config.training.seed)

    def check(self) -> None:
        """Check the training data, and read validation and test data, so that mistakes are found before training.

        Validation data is required, test data is optional. Raises DataError and ConfigError as `check_training`,
        `held_out` and `load_pairs` do, and for a temperature if there is nothing to mix.
        """
        self.check_training()
        if sum(corpus.weight > 0 for corpus in self.training) < 2:
            why = "there is one corpus, with nothing to mix it with: add corpora"
            check_unset("data", self.config.data, ("temperature",), why)
        for name, corpus in self.config.corpora.items():
            if not name or "/" in name or "\0" in name:
                raise ConfigError(
                    f"corpora has the name {name!r}, which would become part of file names: use one without /"
                )
            if only_held_out(corpus) and corpus.weight != 1:
                raise ConfigError(
                    f"corpora.{name}.weight is {corpus.weight:g}, but corpora.{name} has no train for it to weight: "
                    "leave it out"
                )
        for each in self.all_held_out:
            each.pairs  # noqa: B018  (reads them)

    def check_training(self) -> None:
        """Raise an error if the training data is not named as its format requires; the files are not read."""
        config = self.config
        targets = list(dict.fromkeys(corpus.data.target for corpus in self.training))
        if config.data.language_tags and config.data.target not in targets:
            raise ConfigError(
                f"data.target is {config.data.target}, the language that translate translates into, but no corpus has "
                "it as its target: set "
                f"it to {' or '.join(targets)}"
            )
        for corpus in self.training:
            with naming_corpus(corpus.name):
                check_named(corpus.data, "train")

    def _training(self) -> list[CorpusSplit]:
        """Return the training corpora: those of the section corpora, or else the one of data.train."""
        config = self.config
        if not config.corpora:
            tags = language_tags(config.data, config.data.target)
            return [CorpusSplit(config, "", "train", config.data, tags)]
        if config.data.train:
            raise ConfigError(
                f"data.train ({' '.join(config.data.train)}) and corpora ({', '.join(config.corpora)}) are both given: "
                "make data.train one of the corpora"
            )
        names = [name for name, corpus in config.corpora.items() if not only_held_out(corpus)]
        if not any(config.corpora[name].weight for name in names):
            if not names:
                raise ConfigError(
                    f"no corpus of corpora ({', '.join(config.corpora)}) has train: name its training files"
                )
            raise ConfigError(f"every weight of corpora ({', '.join(names)}) is 0: raise one of them")
        return [
            dataclasses.replace(self._of_section(name, "train"), weight=config.corpora[name].weight) for name in names
        ]

    def _of_section(self, name: str, split: Split) -> CorpusSplit:
        """Return a split of a corpus in the section corpora."""
        corpus, data = self.config.corpora[name], self.config.data
        return CorpusSplit(self.config, name, split, data_of(name, corpus, data), corpus_tags(corpus, data))


def only_held_out(corpus: CorpusConfig) -> bool:
    """Return whether a corpus has validation or test data and nothing to train on."""
    return not corpus.train and bool(corpus.valid or corpus.test)


def language_pairs(corpora: Corpora) -> list[tuple[str, str]]:
    """Return the language pairs that a run was trained on, that of its section data first.

    Without target-language tags a model cannot be told to translate into any language but `data.target`.
    """
    config = corpora.config
    trained = list(dict.fromkeys((corpus.data.source, corpus.data.target) for corpus in corpora.training))
    pairs = [pair for pair in trained if config.data.language_tags or pair[1] == config.data.target]
    # If no corpus has data.target, it is a default that nobody set, and the model can do what its corpora do
    return sorted(pairs or trained, key=lambda pair: pair != (config.data.source, config.data.target))


def data_of(name: str, corpus: CorpusConfig, data: DataConfig) -> DataConfig:
    """Return the files and languages of the corpus of this name; what it omits is taken from the section data."""
    own: dict[str, Any] = {
        key: getattr(corpus, key) for key in ("path", "source", "target") if getattr(corpus, key) is not None
    }
    splits = {split: getattr(corpus, split) for split in ("train", "valid", "test")}
    formats = (format_of_files(f"corpora.{name}.{split}", names) for split, names in splits.items() if names)
    own["format"] = corpus.format or next(formats, None) or "builtin"
    if own["format"] == "builtin":  # it has no files: data.path is for the other corpora
        own.setdefault("path", "")
    return dataclasses.replace(data, **splits, **own)
