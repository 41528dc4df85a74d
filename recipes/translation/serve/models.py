"""The models that are served, each for one pair of languages: lines in, translations and alignments out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from models import evaluating
from recipes.translation.data.corpora import corpora_of
from recipes.translation.data.model_text import source_text
from recipes.translation.errors import DataError
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import Subwords
from recipes.translation.translating.alignments import Link, align
from recipes.translation.translating.search_options import SearchOptions
from recipes.translation.translating.sentences import longest_source, not_unicode
from recipes.translation.translating.translate import Translation, alternatives

if TYPE_CHECKING:
    from recipes.translation.export.ctranslate2_engine import ExportedTranslator

Search = Callable[[Sequence[str], int], list[list[Translation]]]
"""Sentences and the number of translations wanted of each -> the translations, best first."""


class Line(NamedTuple):
    """The translations of one line, best first, and the links between the words of the line and of the best one."""

    translations: list[Translation]
    links: list[Link]
    refused: str = ""
    """Why the line was not translated."""


class LineError(DataError):
    """A line that cannot be translated: its number in its request, from 1, and the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number:,} {reason}")


@dataclass(frozen=True)
class Model:
    """A model that translates between two languages."""

    name: str
    """The folder that was given for it."""
    engine: str
    config: RunConfig
    """Its settings; `data.target` is the language that it translates to."""
    subwords: Subwords
    """Those of the source."""
    search: Search
    translator: Translator | None
    """The model in torch, which links words; None if there is an exported one alone."""

    @property
    def source(self) -> str:
        """Return the language that the model translates from."""
        return self.config.data.source

    @property
    def target(self) -> str:
        """Return the language that the model translates to."""
        return self.config.data.target

    @property
    def aligns(self) -> bool:
        """Return whether the model can link words: its run is there, and not an export alone."""
        return self.translator is not None

    def refusals(self, lines: Sequence[str]) -> dict[int, str]:
        """Return why lines cannot be translated, by their places: not Unicode, or longer than the model reads."""
        found = {place: reason for place, line in enumerate(lines) if (reason := not_unicode(line))}
        readable = [place for place in range(len(lines)) if place not in found]
        longest = longest_source(self.config, self.config.decoding)
        ids = self.subwords.encode([source_text(self.config, lines[place]) for place in readable])
        for place, row in zip(readable, ids, strict=True):
            if len(row) > longest:
                found[place] = (
                    f"has {len(row):,} subwords, and the model reads at most {longest:,}: split it into sentences, one "
                    "a line"
                )
        return found

    def translate(self, lines: Sequence[str], n_best: int = 1, links: bool = False) -> list[Line]:
        """Translate lines; link the words of each with its best translation if wanted and possible."""
        found = self.search(lines, n_best)
        linked: list[list[Link]] = [[] for _ in lines]
        if links and self.translator:
            best = [row[0].text for row in found]
            linked = align(self.translator, lines, best, self.config.decoding)
        return [Line(*each) for each in zip(found, linked, strict=True)]


def torch_models(name: str, translator: Translator) -> list[Model]:
    """Return a model in torch, once for each of its pairs of languages."""
    models = []
    for source, target in language_pairs(translator.config):
        config = with_languages(translator.config, source, target)
        one = replace(translator, config=config)
        models.append(Model(name, "torch", config, translator.source, _torch_search(one), one))
    return models


def ctranslate2_models(name: str, exported: ExportedTranslator, translator: Translator | None) -> list[Model]:
    """Return a model in CTranslate2, once for each of its pairs of languages; `translator` aligns for it."""
    models = []
    for source, target in language_pairs(exported.config):
        config = with_languages(exported.config, source, target)
        aligner = None
        if translator:
            aligner = replace(translator, config=config)
        search = _ctranslate2_search(exported._replace(config=config))
        models.append(Model(name, "ctranslate2", config, exported.source, search, aligner))
    return models


def language_pairs(config: RunConfig) -> list[tuple[str, str]]:
    """Return the pairs of languages that a run was trained on, that of its section data first.

    Without tags of the target language a model cannot be told to translate to another one than `data.target`.
    """
    trained = list(dict.fromkeys((corpus.data.source, corpus.data.target) for corpus in corpora_of(config)))
    pairs = [pair for pair in trained if config.data.language_tags or pair[1] == config.data.target]
    # Where no corpus has data.target, which then is a default that nobody set, the model can do what its corpora do
    return sorted(pairs or trained, key=lambda pair: pair != (config.data.source, config.data.target))


def with_languages(config: RunConfig, source: str, target: str) -> RunConfig:
    """Return the settings with these languages, which decide the tag in front of a source sentence."""
    return replace(config, data=replace(config.data, source=source, target=target))


@contextmanager
def ready(models: Sequence[Model]) -> Iterator[None]:
    """Within the block, which is to be one thread's, keep the weights of all models packed for translation."""
    weights = [one for model in models if model.translator for one in model.translator.models]
    with ExitStack() as stack:
        for one in dict.fromkeys(weights):  # a model of several targets is in the list several times
            stack.enter_context(evaluating(one))
        yield


def _torch_search(translator: Translator) -> Search:
    def search(lines: Sequence[str], n_best: int) -> list[list[Translation]]:
        return alternatives(translator, lines, translator.config.decoding, SearchOptions(n_best=n_best))

    return search


def _ctranslate2_search(exported: ExportedTranslator) -> Search:
    from recipes.translation.export import ctranslate2_engine

    def search(lines: Sequence[str], n_best: int) -> list[list[Translation]]:
        return ctranslate2_engine.alternatives(exported, lines, exported.config.decoding, n_best)

    return search
