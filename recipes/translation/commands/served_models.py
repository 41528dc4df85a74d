"""The models of a service: a run in torch, or its export, once for each of its language pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recipes.translation.data.corpora import Corpora, language_pairs
from recipes.translation.run_folder.translator import Translator
from recipes.translation.serve.batching import Line, Model
from recipes.translation.translating.alignments import Link, align
from recipes.translation.translating.sentences import refusals
from recipes.translation.translating.translate import SearchOptions, alternatives

if TYPE_CHECKING:
    from recipes.translation.translating.ctranslate2_engine import ExportedTranslator


def served_models(name: str, given: Translator | ExportedTranslator, aligner: Translator | None) -> list[Model]:
    """Return a model, once for each of its language pairs; `aligner` is its run in torch, if there is one."""
    found = []
    for pair in language_pairs(Corpora(given.config)):
        config = given.config.with_languages(*pair)
        model = Model(
            name,
            "torch" if isinstance(given, Translator) else "ctranslate2",
            config.data.source,
            config.data.target,
            config.decoding.beam,
            config.decoding.batch_sentences,
            aligns=aligner is not None,
            translate=partial(translate, replace(given, config=config), aligner and replace(aligner, config=config)),
        )
        found.append(model)
    return found


def translate(
    given: Translator | ExportedTranslator,
    aligner: Translator | None,
    lines: Sequence[str],
    n_best: int,
    links: bool,
) -> list[Line]:
    """Translate lines in torch or with CTranslate2, except those that are refused; link words if possible."""
    refused = refusals(given.source, given.text, lines)
    fine = [line for number, line in enumerate(lines) if number not in refused]
    if isinstance(given, Translator):
        found = alternatives(given, fine, SearchOptions(n_best=n_best))
    else:
        from recipes.translation.translating import ctranslate2_engine

        found = ctranslate2_engine.alternatives(given, fine, n_best)
    linked: list[list[Link]] = [[] for _ in fine]
    if links and aligner:
        linked = align(aligner, fine, [row[0].text for row in found])
    translated = map(Line, found, linked)
    return [Line([], [], refused[number]) if number in refused else next(translated) for number in range(len(lines))]
