"""What training prints before its first step, and the summary at its end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path

from models import EncoderDecoder
from recipes.translation.data.corpus import Corpus
from recipes.translation.files.atomic_folder import whole_folder
from recipes.translation.processes.launch import launcher_words, unambiguous
from recipes.translation.processes.ranks import Ranks
from recipes.translation.processes.status_line import duration
from recipes.translation.run_folder.checkpoint import TrainingState, load_facts, load_saved
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.training.layout import Layout
from recipes.translation.training.loaded_models import loaded_models
from recipes.translation.training.optimizer import steps_of_epochs
from recipes.translation.training.parts import OpenedModel
from recipes.translation.training.progress import guessing, is_worse_than_guessing
from recipes.translation.training.validation import Validation
from recipes.translation.translating.translate import translate

SAMPLES = 3
RECIPE = ["-m", "recipes.translation"]


def announce(
    run: Path,
    settings: TrainingConfig,
    size: str,
    corpus: Corpus,
    layout: Layout,
    state: TrainingState,
    teacher: OpenedModel | None,
    start: str,
) -> None:
    """Print the data, the sizes of model, data and teacher, the layout, when training ends and what it starts from.

    `start` names the model that it starts from, if there is one.
    """
    for line in corpus.read:
        print(f"[data] {line}", flush=True)
    dropped = ""
    if corpus.train.dropped:
        dropped = f" ({corpus.train.dropped:,} pairs left out as too long)"
    lines = [
        f"{size}, {len(corpus.target):,} target subwords, "
        f"{corpus.train.count(state.epoch):,} batches per epoch{dropped}, {layout}"
    ]
    lines += what_cannot_be_meant(settings, corpus)
    if layout.data_ranks > 1 or state.step:
        lines.append(update_of(settings, layout.data_ranks, resumed=state.step > 0))
    if settings.epochs:
        lines.append(end_of(settings, corpus))
    if teacher is not None:
        lines.append(
            f"learning from {teacher.saved.folder}, {size_of(teacher.model)}: weight "
            f"{settings.teacher_weight:g}, temperature {settings.teacher_temperature:g}"
        )
    if settings.label_smoothing:
        lines.append(f"losses include label smoothing {settings.label_smoothing:g}, perplexities do not")
    if state.step:
        lines.append(f"resuming from step {state.step:,} of {run}")
    else:
        lines.append(f"starting from {start or f'random weights, training.seed {settings.seed}'}")
    for line in lines:
        print(f"[train] {line}", flush=True)


def what_cannot_be_meant(settings: TrainingConfig, corpus: Corpus) -> Iterable[str]:
    """Yield a line for each setting that does not fit the data or another setting."""
    if alone := corpus.train.over_budget:
        yield (
            f"training.batch_tokens {settings.batch_tokens:,} is less than the length of {alone:,} pairs: each of them "
            "is a batch of its own"
        )
    if 0 < settings.steps <= settings.warmup:
        yield (
            f"training.warmup {settings.warmup:,} is not over when training ends, at step {settings.steps:,}: the "
            "learning rate will only rise"
        )


def update_of(settings: TrainingConfig, data_ranks: int, resumed: bool) -> str:
    """Return how many tokens an update has, which is the same on any number of processes, and what each process gets.

    For a new run, also name settings with which about as many tokens make whole batches for every process.
    """
    batches, size = settings.accumulate, settings.batch_tokens
    line = (
        f"each update has training.accumulate {batches:,} x training.batch_tokens {size:,} on any number of processes"
    )
    if resumed:
        line += ", as before"
    if data_ranks == 1:
        return line
    if not batches % data_ranks:
        return f"{line}: each of the {data_ranks} data ranks gets whole batches"
    line += f": the {data_ranks} data ranks share the last {batches % data_ranks:,} of its batches"
    if not resumed:
        each = -(-batches // data_ranks)
        line += (
            f"; training.accumulate {each * data_ranks:,} and training.batch_tokens "
            f"{round(batches * size / (each * data_ranks)):,} would give each of them whole batches"
        )
    return line


def end_of(settings: TrainingConfig, corpus: Corpus) -> str:
    """Return how many steps the epochs are, and which of the two limits ends the training."""
    steps = steps_of_epochs(settings, corpus.train)
    line = f"training.epochs {settings.epochs:,} means {steps:,} steps"
    if settings.steps < steps:
        line += f", but training.steps {settings.steps:,} comes first"
    return line


def size_of(model: EncoderDecoder) -> str:
    """Return the number of parameters, and how many of them are trained, as text."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = f"{parameters / 1e6:.1f} M parameters"
    if 0 < trained < parameters:
        size += f" ({trained / 1e6:.2f} M trained)"
    return size


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
    """Number of steps asked for."""
    best: Validation | None
    stopped_by: signal.Signals | None
    """The signal that stopped training early."""
    files: tuple[str, ...]
    """Names in the run's folder, as rank 0 sees it: the file system need not be shared."""
    samples: tuple[Sample, ...] = ()
    advice: str = ""
    """What to do about a model that has hardly learned anything; empty otherwise."""
    cost: str = ""
    """After a dry run, what the training would need."""

    def __str__(self) -> str:
        if self.cost:
            return self.cost
        state = self.state
        speed = state.tokens / max(state.train_seconds, 1e-9)
        lines = [
            f"[train] {state.step:,} of {self.steps:,} steps in {duration(state.seconds)}, "
            f"{speed:,.0f} target tokens/s without validation"
        ]
        if state.skipped:
            lines.append(
                f"[train] {state.skipped:,} of these steps made no update: their gradient overflowed in float16"
            )
        if self.best:
            lines.append(f"[train] best validation, step {self.best.step:,}: {self.best}")
        if self.advice:
            lines.append(
                f"[train] the model has hardly learned anything, so its translations are not shown: {self.advice}"
            )
        if self.samples:
            lines += ["[train] validation sentences, translated by the best model:", *map(str, self.samples)]
        lines.append(f"[train] {self.run}: {', '.join(self.files)}")
        if self.stopped_by:
            lines.append(f"[train] stopped by {self.stopped_by.name}; resume with: {going_on(self.run)}")
        return "\n".join(lines)


def summarize(
    run: Path,
    settings: TrainingConfig,
    state: TrainingState,
    stopped_by: signal.Signals | None,
    corpus: Corpus,
    ranks: Ranks,
) -> Summary:
    """Summarize a run, with the best model's translations of a few validation sentences if it has learned to translate.

    Every rank calls this, as the model may be too large for one of them.
    """
    folder = run / "best"
    best = ranks.run_on_main(lambda: Validation.from_dict(load_facts(folder)) if whole_folder(folder) else None)
    files = ranks.run_on_main(lambda: tuple(sorted(path.name for path in run.iterdir() if path.name[0] != ".")))
    summary = Summary(run, state, settings.steps, best, stopped_by, files)
    # Nobody who presses Ctrl-C wants to wait for translations
    if best is None or stopped_by:
        return summary
    if is_hopeless(best):
        # A model that has not started to learn may be a little worse than guessing
        diverged = is_worse_than_guessing(best, len(corpus.target) ** 1.5)
        found = divergence_advice(settings, len(corpus.target)) if diverged else advice(run, settings, state)
        return replace(summary, advice=found)
    return replace(summary, samples=translate_samples(folder, corpus, ranks))


def is_hopeless(best: Validation) -> bool:
    """Return whether a model's translations would be noise: hardly any BLEU, and most tokens predicted wrongly.

    BLEU alone would not suffice: it is 0 for perfect translations of fewer than four words.
    """
    bleu = best["bleu"]
    accuracy = best["accuracy"] or 0.0
    if bleu is None:
        return accuracy < 20
    return bleu < 1 and accuracy < 50


def divergence_advice(training: TrainingConfig, classes: int) -> str:
    """Return what to try for a run whose best validation is worse than guessing."""
    return (
        f"it is worse than guessing ({guessing(classes)}): begin again with a training.learning_rate below "
        f"{training.learning_rate:g}, a training.warmup above {training.warmup:,}, or training.clip 1"
    )


def advice(run: Path, training: TrainingConfig, state: TrainingState) -> str:
    """Return what to try for a run that has hardly learned anything."""
    warmup = training.warmup
    if state.step <= warmup:
        why = (
            f"the learning rate was still rising when training ended, at step {state.step:,} "
            f"(training.warmup {warmup:,})"
        )
        steps = 10 * warmup
    elif state.epoch < 5:
        why = f"training ended in epoch {state.epoch + 1:,}"
        steps = max(4 * state.step, 1_000)
    else:
        return (
            "check whether the n-th line of one file translates the n-th line of the other; if it does, try another "
            "training.learning_rate, and with little data a smaller subwords.vocab_size"
        )
    words: list[object] = ["--training.steps", steps]
    if training.epochs:
        words += ["--training.epochs", 0]
    if SCHEDULES[training.schedule].by_steps:
        words += ["--insist"]  # since the learning rate jumps to that of a longer training
    return f"{why}; continue with: {going_on(run, *words)}"


def translate_samples(folder: Path, corpus: Corpus, ranks: Ranks) -> tuple[Sample, ...]:
    """Translate the first validation sentences, taken from each set in turn, with the model in `folder`."""
    in_turn = chain.from_iterable(zip_longest(*(valid.pairs[:SAMPLES] for valid in corpus.valid)))
    pairs = [pair for pair in in_turn if pair is not None][:SAMPLES]
    with loaded_models([lambda: load_saved(folder)], ranks) as ((translator,), searching):
        found = translate(translator, [pair.source for pair in pairs], searching)
    return tuple(Sample(pair.source, text, pair.target) for pair, text in zip(pairs, found, strict=True))


def going_on(run: Path | str, *words: object) -> str:
    """Return a shell command that continues a training, with the launcher that started this process, if any."""
    words = ("train", "--run", run, *words)
    program = launcher_words()
    if not program:
        return command(*words)
    if program[1:] == RECIPE:
        return command(*words, "--processes", os.environ["WORLD_SIZE"])
    return shell(program, unambiguous([str(word) for word in words]))


def command(*words: object) -> str:
    """Return a shell command of this recipe.

    A run's folder whose name begins with a dash is written so that it is not taken for an option.
    """
    return shell([sys.executable, *RECIPE], words)


def shell(program: Sequence[str], words: Iterable[object]) -> str:
    """Return a shell command; programs inside the current folder are named relative to it."""
    here = Path.cwd()
    named = [str(Path(word).relative_to(here)) if Path(word).is_relative_to(here) else word for word in program]
    return shlex.join([*named, *(f"./{word}" if re.match("-[^-]", str(word)) else str(word) for word in words)])
