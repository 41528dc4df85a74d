"""The summary that training prints at its end."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from recipes.translation.atomic_folder import whole_folder
from recipes.translation.data.corpus import Corpus
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts, load_translator
from recipes.translation.status_line import duration
from recipes.translation.training.validation import Validation
from recipes.translation.translate import translate

SAMPLES = 3


@dataclass(frozen=True)
class Sample:
    """A sentence with a model's translation and the reference."""

    source: str
    translation: str
    reference: str

    def __str__(self) -> str:
        verdict = f"should be: {self.reference}"
        if self.translation == self.reference:
            verdict = "right"
        return f"  {self.source}\n    -> {self.translation}   ({verdict})"


@dataclass(frozen=True)
class Summary:
    """The outcome of a training run."""

    run: Path
    state: TrainingState
    steps: int
    """Steps asked for."""
    best: Validation | None
    stopped_by: signal.Signals | None
    """The signal that stopped training early."""
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        state = self.state
        speed = state.tokens / max(state.train_seconds, 1e-9)
        lines = [
            f"[train] {state.step:,} of {self.steps:,} steps in {duration(state.seconds)}, "
            f"{speed:,.0f} target tokens/s without validation"
        ]
        if self.best:
            lines.append(f"[train] best validation, step {self.best.step:,}: {self.best}")
        if self.samples:
            lines += ["[train] validation sentences, translated by the best model:", *map(str, self.samples)]
        lines.append(f"[train] {self.run}: {', '.join(sorted(path.name for path in visible(self.run)))}")
        if self.stopped_by:
            lines.append(
                f"[train] stopped by {self.stopped_by.name}; resume with: {command('train', '--run', self.run)}"
            )
        return "\n".join(lines)


def summarize(
    run: Path, state: TrainingState, steps: int, stopped_by: signal.Signals | None, corpus: Corpus
) -> Summary:
    """Summarize a run, with the best model's translations of a few validation sentences."""
    if whole_folder(run / "best") is None:
        return Summary(run, state, steps, None, stopped_by, ())
    best = Validation.from_dict(load_facts(run / "best"))
    samples: tuple[Sample, ...] = ()
    if not stopped_by:  # nobody who presses Ctrl-C wants to wait for translations
        samples = translated(run / "best", corpus)
    return Summary(run, state, steps, best, stopped_by, samples)


def translated(folder: Path, corpus: Corpus) -> tuple[Sample, ...]:
    """Translate the first validation sentences by the model in `folder`."""
    translator = load_translator(folder)
    pairs = corpus.valid_pairs[:SAMPLES]
    found = translate(translator, [pair.source for pair in pairs], translator.config.decoding)
    return tuple(Sample(pair.source, text, pair.target) for pair, text in zip(pairs, found, strict=True))


def visible(run: Path) -> list[Path]:
    """Return the files and folders of a run that are not hidden."""
    return [path for path in run.iterdir() if not path.name.startswith(".")]


def command(*words: object) -> str:
    """Return a shell command of this recipe, with the path to Python relative to the current folder if it is inside."""
    python = Path(sys.executable)
    here = Path.cwd()
    if python.is_relative_to(here):
        python = python.relative_to(here)
    return f"{python} -m recipes.translation {shlex.join(map(str, words))}"
