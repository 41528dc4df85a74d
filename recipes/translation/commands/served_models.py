"""The models of a service: a run in torch, or what it was exported to, once for each of its pairs of languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recipes.translation.data.corpora import Corpora, language_pairs, with_languages
from recipes.translation.run_folder.translator import Translator
from recipes.translation.serve.models import Line, Model
from recipes.translation.translating.alignments import Link, align
from recipes.translation.translating.search_options import SearchOptions
from recipes.translation.translating.sentences import refusals
from recipes.translation.translating.translate import alternatives

if TYPE_CHECKING:
    from recipes.translation.export.ctranslate2_engine import ExportedTranslator


def served_models(name: str, translator: Translator | None, exported: ExportedTranslator | None = None) -> list[Model]:
    """Return a model, once for each of its pairs of languages.

    If it is `exported`, CTranslate2 translates, and `translator` aligns where there is one.
    """
    given = exported or translator
    assert given is not None
    found = []
    for pair in language_pairs(Corpora(given.config)):
        config = with_languages(given.config, *pair)
        in_torch = translator and replace(translator, config=config)
        model = Model(
            name,
            "ctranslate2" if exported else "torch",
            config.data.source,
            config.data.target,
            config.decoding.beam,
            config.decoding.batch_sentences,
            aligns=in_torch is not None,
            translate=partial(translate, in_torch, exported and exported._replace(config=config)),
        )
        found.append(model)
    return found


def translate(
    translator: Translator | None,
    exported: ExportedTranslator | None,
    lines: Sequence[str],
    n_best: int,
    links: bool,
) -> list[Line]:
    """Translate lines by the exported model, or else in torch, but those that cannot be; link words if possible."""
    given = exported or translator
    assert given is not None
    refused = refusals(given.source, given.config, lines)
    fine = [line for number, line in enumerate(lines) if number not in refused]
    if exported:
        from recipes.translation.export import ctranslate2_engine

        found = ctranslate2_engine.alternatives(exported, fine, n_best)
    else:
        assert translator is not None
        found = alternatives(translator, fine, SearchOptions(n_best=n_best))
    linked: list[list[Link]] = [[] for _ in fine]
    if links and translator:
        linked = align(translator, fine, [row[0].text for row in found])
    translated = map(Line, found, linked)
    return [Line([], [], refused[number]) if number in refused else next(translated) for number in range(len(lines))]
