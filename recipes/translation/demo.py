"""A demonstration: train, evaluate and try a translation model, in a few minutes on two CPU cores."""

from __future__ import annotations

import time
from pathlib import Path

from recipes.translation.files.atomic_folder import whole_folder
from recipes.translation.processes.ranks import Ranks
from recipes.translation.processes.status_line import duration, print_text
from recipes.translation.run_folder.checkpoint import load_saved
from recipes.translation.scores.evaluate import evaluate
from recipes.translation.scores.scores import scores_in_words
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from recipes.translation.training.journal import draw_report
from recipes.translation.training.loaded_models import loaded_models
from recipes.translation.training.summary import Sample, Summary, command

SAMPLES = 10
SENTENCE = "The train to Vienna leaves at half past seven."


def demo(config: RunConfig, ranks: Ranks) -> Summary:
    """Make subwords, train, evaluate and translate samples, reporting each in a line; then print a command to try."""
    run = Path(config.run)
    began = time.monotonic()
    data = config.data
    if any(whole_folder(run / name) for name in ("best", "last")):
        print(f"[demo] {run} contains an earlier run, which is now replaced: the demo always starts afresh")
    print(f"[demo] {data.source} -> {data.target}, {data.builtin_pairs:,} pairs of the built-in corpus, into {run}")
    summary = train(config, fresh=True, ranks=ranks)
    print_text(str(summary))
    if summary.stopped_by:
        return summary

    print(f"[demo] evaluating {run / 'best'} on the held-out test set")
    with loaded_models([lambda: load_saved(run / "best")], ranks) as ((translator,), searching):
        evaluation = evaluate(translator, "test", searching, "demo")
    print(scores_in_words(evaluation.scores))
    if not summary.advice:
        print(f"[demo] the first {SAMPLES} sentences of the test set:")
        for pair, translation in list(zip(evaluation.pairs, evaluation.translations, strict=True))[:SAMPLES]:
            print_text(str(Sample(pair.source, translation, pair.target)))
    written = ", ".join(map(str, evaluation.write(run) if ranks.is_main else ()))
    if config.training.report and ranks.is_main:
        draw_report(run)  # again, with the scores
    print(f"[demo] trained and evaluated in {duration(time.monotonic() - began)}")
    print(f"[demo] the model is {run / 'best'}; every step is in {run / 'metrics.jsonl'}; test results: {written}")
    print(f'[demo] translate a sentence of your own:\n\n  {command("translate", "--run", run)} "{SENTENCE}"\n')
    return summary
