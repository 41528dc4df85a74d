"""Samples of runs that kept none: of earlier versions, or trained with `validate_bleu` 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.translation.data.corpora import Corpora
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.files.atomic_folder import whole_folder
from recipes.translation.report.records import RunRecords, Sentences
from recipes.translation.run_folder.checkpoint import load_facts, load_translator
from recipes.translation.training.samples import samples_of
from recipes.translation.translating.translate import translate

SENTENCES = 200
"""Validation sentences that are translated."""


def with_samples(run: RunRecords, folder: Path) -> RunRecords:
    """Return a run with translations by its best model, if it kept none itself; say so, or why it cannot be done."""
    if run.samples or run.newest or whole_folder(folder / "best") is None:
        return run
    try:
        translator = load_translator(folder / "best")
        step = load_facts(folder / "best").get("step", 0)
        config = translator.config
        sets = Corpora(config).valid
        pairs = [pair for each in sets for pair in each.spoken(each.pairs()[: SENTENCES // len(sets)])]
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        return replace(run, note=f"Training kept no translations, and now there can be none: {error}")
    greedy = replace(config.decoding, beam=1)
    translations = translate(translator, [pair.source for pair in pairs], greedy)
    sentences = Sentences(step, [pair.source for pair in pairs], [pair.target for pair in pairs], translations)
    return replace(
        run,
        samples=[{"step": step, "samples": samples_of(translator, pairs, translations)}],
        newest=sentences,
        note=f"Training kept no translations: its best model, of step {step:,}, made these for this page.",
    )
