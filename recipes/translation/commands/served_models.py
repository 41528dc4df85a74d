"""The models of a service: a run in torch, or what it was exported to, once for each of its pairs of languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recipes.translation.data.corpora import Corpora, language_pairs, with_languages
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.serve.models import Model
from recipes.translation.settings.config import RunConfig
from recipes.translation.translating.alignments import align
from recipes.translation.translating.search_options import SearchOptions
from recipes.translation.translating.sentences import refusals
from recipes.translation.translating.translate import Translation, alternatives

if TYPE_CHECKING:
    from recipes.translation.export.ctranslate2_engine import ExportedTranslator


def torch_models(name: str, translator: Translator) -> list[Model]:
    """Return a model in torch, once for each of its pairs of languages."""
    return [
        torch_model(name, replace(translator, config=with_languages(translator.config, *pair)))
        for pair in language_pairs(Corpora(translator.config))
    ]


def torch_model(name: str, translator: Translator) -> Model:
    """Return a model in torch that translates between the languages of its settings."""
    config = translator.config
    decoding = config.decoding

    def search(lines: Sequence[str], n_best: int) -> list[list[Translation]]:
        return alternatives(translator, lines, decoding, SearchOptions(n_best=n_best))

    return Model(
        name,
        "torch",
        config.data.source,
        config.data.target,
        decoding.beam,
        decoding.batch_sentences,
        refusals=lambda lines: refusals(translator.source, config, lines),
        search=search,
        align=lambda lines, translations: align(translator, lines, translations, decoding),
        weights=translator.models,
    )


def ctranslate2_models(name: str, exported: ExportedTranslator, translator: Translator | None) -> list[Model]:
    """Return a model in CTranslate2, once for each of its pairs of languages; `translator` aligns for it."""
    return [
        ctranslate2_model(name, exported, translator, with_languages(exported.config, *pair))
        for pair in language_pairs(Corpora(exported.config))
    ]


def ctranslate2_model(
    name: str, exported: ExportedTranslator, translator: Translator | None, config: RunConfig
) -> Model:
    """Return a model in CTranslate2 that translates between the languages of these settings."""
    from recipes.translation.export import ctranslate2_engine

    of_pair = exported._replace(config=config)
    decoding = config.decoding

    def search(lines: Sequence[str], n_best: int) -> list[list[Translation]]:
        return ctranslate2_engine.alternatives(of_pair, lines, decoding, n_best)

    in_torch = [torch_model(name, replace(translator, config=config))] if translator else []
    return Model(
        name,
        "ctranslate2",
        config.data.source,
        config.data.target,
        decoding.beam,
        decoding.batch_sentences,
        refusals=lambda lines: refusals(exported.source, config, lines),
        search=search,
        align=next((model.align for model in in_torch), None),
        weights=[weights for model in in_torch for weights in model.weights],
    )
