"""What a training starts from: the checkpoint that it resumes, the weights of another run, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from models import EncoderDecoder
from models.presets import Sizes
from models.transformer import first_weights
from recipes.translation.data.corpus import Corpus, check_length, check_positions, most_subwords
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import SavedModel, SavedTraining, TrainingState
from recipes.translation.run_folder.other_model import check_same_teacher, load_teacher, starting_weights
from recipes.translation.run_folder.resume import changed_scoring, check_jumps, check_same_data, check_steps, flat
from recipes.translation.run_folder.translator import (
    WEIGHTS,
    build_model,
    check_fits,
    check_layers,
    model_sizes,
    tensors_of,
)
from recipes.translation.settings.config import RunConfig, TrainingConfig
from recipes.translation.training.ema import WeightAverage
from recipes.translation.training.layout import Layout
from recipes.translation.training.optimizer import check_rate, make_optimizer, with_steps
from recipes.translation.training.parts import OpenedModel, open_model
from recipes.translation.training.trained_weights import adapt, freeze


def share_checkpoint(read: Callable[[], SavedTraining | None], ranks: Ranks) -> SavedTraining | None:
    """Return the checkpoint to resume from, whose tensors only rank 0 has; None for a new run."""
    return ranks.share(read, lambda saved: saved and replace(saved, weights={}, moments={}, averages={}))


def fit_to_corpus(settings: TrainingConfig, longest: int, sizes: Sizes, corpus: Corpus, ranks: Ranks) -> TrainingConfig:
    """Return the settings with `epochs` converted to steps on this text, which must be the same on all ranks.

    Raises ConfigError unless the model has positions for the training sentences and for translations of `longest`
    tokens.
    """
    lengths = {"training.max_length": settings.max_length, "decoding.max_length": longest}
    check_positions(lengths, sizes, corpus)
    ranks.agree({"the training and validation data": corpus.fingerprint})
    return with_steps(settings, corpus.train)


def first_state(run: Path, corpus: Corpus, saved: SavedTraining | None, teacher: OpenedModel | None) -> TrainingState:
    """Return the state of the checkpoint, which must be of this data and teacher; without one, a new state."""
    new = TrainingState(data=corpus.fingerprint, teacher=teacher.saved.digest if teacher else "")
    state = saved.state if saved else new
    check_same_data(corpus, saved, run)
    check_same_teacher(teacher and teacher.saved, state, run)
    return state


def check_end(
    config: RunConfig, settings: TrainingConfig, corpus: Corpus, saved: SavedTraining | None, insist: bool
) -> None:
    """Raise ConfigError if a resumed run has no steps left, or would jump to a different learning rate."""
    if saved is None:
        return
    run = Path(config.run)
    if settings.epochs:
        check_steps(run, settings.steps, saved)
    if not insist:
        before = saved.config.training
        check_jumps(run, before, config.training, changed_scoring(flat(saved.config), flat(config)), saved.state)
        check_rate(with_steps(before, corpus.train), settings, saved.state.step, model_sizes(config.model).d_model)


def opened_teacher(settings: TrainingConfig, language_tags: bool, corpus: Corpus, ranks: Ranks) -> OpenedModel | None:
    """Return the model whose predictions are learned from, in the dtype of the trained weights; None without one."""
    if not settings.teacher or not settings.teacher_weight:
        return None

    def read() -> SavedModel:
        teacher = load_teacher(settings.teacher, language_tags, corpus.source, corpus.target)
        most = most_subwords(model_sizes(teacher.config.model), corpus.source.symbols)
        check_length("training.max_length", settings.max_length, most)
        return teacher

    return open_model(read, ranks, WEIGHTS[settings.precision])


def first_model(
    config: RunConfig, corpus: Corpus, saved: SavedTraining | None, ranks: Ranks
) -> tuple[EncoderDecoder, Iterator[tuple[str, Tensor]]]:
    """Return the model that training starts with, on "meta", and its whole weights, each produced when asked for.

    The weights are those of the checkpoint or of another run's model, or random.
    """
    settings = config.training
    sizes = model_sizes(config.model)
    last = Path(config.run) / "last"

    def build() -> EncoderDecoder:
        model = build_model(sizes, corpus.source, corpus.target)
        # M2M-100 and NLLB-200 have no output bias: in an imported model it stays 0, so that it can be exported again
        freeze(model, settings.freeze, bool(settings.start_from) and config.model.preset == "m2m100")
        adapt(model, settings, sizes.d_model)
        return model

    def read_start() -> Mapping[str, Tensor]:
        return starting_weights(settings.start_from, config.model, config.subwords) if ranks.is_main else {}

    start = None
    if saved is None and settings.start_from:
        start = ranks.run_on_all(read_start)
    ranks.run_on_main(lambda: check_layers(sizes, saved.weights, last) if saved else None)
    torch.manual_seed(settings.seed)
    with torch.device("meta"):
        model = build()
    drawn = first_weights(model)
    model.to(WEIGHTS[settings.precision])
    own = tensors_of(model)
    if saved:
        ranks.run_on_main(lambda: check_fits(own, saved.weights, last))
        return model, ranks.tensors_of_main(saved.weights, own)
    if start is None:
        return model, drawn  # by every rank, so that none needs to be sent
    plain = {name: each for name, each in own.items() if not name.endswith(LORA)}
    ranks.run_on_main(lambda: check_fits(plain, start, settings.start_from))
    of_lora = ((name, weight) for name, weight in drawn if name.endswith(LORA))
    return model, chain(ranks.tensors_of_main(start, plain), of_lora)


def first_moments(
    layout: Layout, settings: TrainingConfig, saved: SavedTraining | None
) -> tuple[torch.optim.Optimizer, WeightAverage]:
    """Return the optimizer and the average of the weights, as they are in the checkpoint; without one, new ones.

    They are made from the layout's model, since the layout has replaced the parameters that it splits or shards.
    """
    optimizer = make_optimizer(layout.model, settings)
    average = WeightAverage(layout, settings.ema)
    if saved:
        if saved.state.step > saved.state.skipped:  # before the first update there are no moments
            layout.fill_moments(optimizer, saved.moments)
        layout.parts.receive(average.averages, saved.averages)
    return optimizer, average


LORA = (".lora_A", ".lora_B")
"""What the names of LoRA's matrices end with."""
