"""What a training says before its first step."""

from __future__ import annotations

from models import EncoderDecoder
from recipes.translation.data.corpus import Corpus
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.settings.config import RunConfig, TrainingConfig
from recipes.translation.training.layout import Layout
from recipes.translation.training.opened_models import OpenedModel
from recipes.translation.training.optimizer import steps_of_epochs


def announce(
    config: RunConfig,
    settings: TrainingConfig,
    size: str,
    corpus: Corpus,
    layout: Layout,
    state: TrainingState,
    teacher: OpenedModel | None,
) -> None:
    """Print the size of model, data and teacher, the layout, the end, and the step from which training resumes."""
    dropped = ""
    if corpus.train.dropped:
        dropped = f" ({corpus.train.dropped:,} pairs that are too long left out)"
    lines = [
        f"{size}, {len(corpus.target):,} target subwords, "
        f"{corpus.train.count(state.epoch):,} batches an epoch{dropped}, {layout}"
    ]
    if settings.epochs:
        lines.append(end_of(settings, corpus))
    if teacher is not None:
        lines.append(
            f"learning from {teacher.saved.folder}, {parameters_of(teacher.model)} parameters: weight "
            f"{settings.teacher_weight:g}, temperature {settings.teacher_temperature:g}"
        )
    if settings.label_smoothing:
        lines.append(f"losses are with label smoothing {settings.label_smoothing:g}, perplexities without it")
    if state.step:
        lines.append(f"resuming from step {state.step:,} of {config.run}")
    for line in lines:
        print(f"[train] {line}", flush=True)


def end_of(settings: TrainingConfig, corpus: Corpus) -> str:
    """Return what epochs come to in steps, and what ends a training that has both."""
    steps = steps_of_epochs(settings, corpus.train)
    line = f"training.epochs {settings.epochs:,} are {steps:,} steps"
    if settings.steps < steps:
        line += f", but training.steps {settings.steps:,} ends first"
    return line


def size_of(model: EncoderDecoder) -> str:
    """Return the number of parameters, and how many of them are trained, as text."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = f"{parameters_of(model)} parameters"
    if trained < sum(parameter.numel() for parameter in model.parameters()):
        size += f" ({trained / 1e6:.2f} M trained)"
    return size


def parameters_of(model: EncoderDecoder) -> str:
    """Return the number of parameters as text."""
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M"
