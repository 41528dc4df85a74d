"""Training: the loop on one page, and the few functions it calls.

`Layout` distributes the model over the devices of this process or over several processes: data-parallel, sharded, with
the vocabulary split. In every layout the loss engine computes loss and gradients of the hidden states
in chunks, on the device they are on, and returns one sum; `accumulate_gradients` divides it by the tokens of the whole
step, so that the gradient equals that of all sentences of the step on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy
import torch
from torch import Tensor

from models import EncoderDecoder
from models.transformer import first_weights
from recipes.translation.data.batches import Steps
from recipes.translation.data.corpus import Corpus, load_corpus
from recipes.translation.data.positions import check_positions
from recipes.translation.errors import TrainingError
from recipes.translation.processes.ranks import Ranks, join_ranks
from recipes.translation.processes.stop import StopSignals
from recipes.translation.run_folder.checkpoint import SavedModel, SavedTraining, TrainingState, saved_config
from recipes.translation.run_folder.lock import sole_writer
from recipes.translation.run_folder.other_model import (
    check_same_teacher,
    load_teacher,
    run_subwords,
    start_of,
    starting_weights,
)
from recipes.translation.run_folder.resume import (
    begin,
    changed_scoring,
    check_jumps,
    check_same_data,
    check_steps,
    flat,
    remove_run,
)
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import (
    WEIGHTS,
    Translator,
    build_model,
    check_fits,
    check_layers,
    model_sizes,
    tensors_of,
)
from recipes.translation.settings.config import RunConfig, TrainingConfig
from recipes.translation.training.dry_run import cost
from recipes.translation.training.ema import WeightAverage
from recipes.translation.training.half_precision import check_autocast, loss_scale, skips
from recipes.translation.training.journal import Journal
from recipes.translation.training.layout import Layout, axes_of, devices_of
from recipes.translation.training.log_file import LOG, log_to, note_in
from recipes.translation.training.machine import return_free_memory
from recipes.translation.training.optimizer import check_rate, learning_rate, make_optimizer, update, with_steps
from recipes.translation.training.parts import OpenedModel, local_of, open_model
from recipes.translation.training.progress import Progress, StepNumbers, read_step
from recipes.translation.training.summary import Summary, announce, size_of, summarize
from recipes.translation.training.trackers import check_installed, open_trackers
from recipes.translation.training.trained_weights import adapt, freeze, merge_lora
from recipes.translation.training.utilization import share_of_peak
from recipes.translation.training.validation import Validation, note_validation, out_of_patience, reduce_rate, validate
from seqpar.distributed.collectives import gather_numbers


def train(
    config: RunConfig,
    *,
    fresh: bool = False,
    insist: bool = False,
    dry_run: bool = False,
    ranks: Ranks | None = None,
) -> Summary:
    """Train until `steps`, `patience`, Ctrl-C or SIGTERM; resume from the checkpoint `last` if there is one.

    Every process of a run must call it with the same arguments. On the CPU, a run that was stopped and resumed in the
    same layout equals an uninterrupted one bit for bit; in another layout, up to rounding. `fresh` begins anew, and
    removes an earlier run from the folder as soon as the new one can make its first step. With `insist`, data and a
    change of steps that look like mistakes are taken as they are. A `dry_run` does all that comes before the first
    step, and its summary says what the training will cost. `ranks` are those of a caller that has joined them already.

    Raises ConfigError, DataError or CheckpointError for mistakes of the user, TrainingError if the loss, the gradient
    or the weights are no longer finite, and OtherRankError with the message of another process that failed.
    """
    with ExitStack() as held:
        if ranks is None:
            ranks = held.enter_context(join_ranks(config.layout.timeout))
        ranks.agree(must_agree(flat(config)))
        axes_of(config.layout, ranks.world)  # its errors, before anything is locked or read
        devices = devices_of(config.training, ranks)
        check_autocast(config.training.precision, devices)
        held.enter_context(ranks.enter_on_main(lambda: sole_writer(Path(config.run))))
        held.enter_context(ranks.enter_on_main(lambda: log_to(Path(config.run) / LOG)))
        summary = train_on(ranks, config, devices, fresh, insist, dry_run)
        ranks.run_on_main(lambda: note_in(Path(config.run) / LOG, str(summary)))
        return summary


def train_on(
    ranks: Ranks, config: RunConfig, devices: list[torch.device], fresh: bool, insist: bool, dry_run: bool
) -> Summary:
    """Train in the process that `ranks` describes, in a folder to which no other run writes."""
    run = Path(config.run)
    settings = config.training
    sizes = model_sizes(config.model)
    ranks.run_on_main(lambda: check_installed(settings.trackers))
    saved = share_checkpoint(lambda: begin(config, fresh), ranks)
    if settings.threads:
        torch.set_num_threads(settings.threads)

    corpus = load_corpus(config, ranks, partial(run_subwords, fresh=fresh), insist or saved is not None)
    lengths = {"training.max_length": settings.max_length, "decoding.max_length": config.decoding.max_length}
    check_positions(lengths, sizes, corpus)
    ranks.agree({"the training and validation data": corpus.fingerprint})
    settings = with_steps(settings, corpus.train)
    teacher = opened_teacher(settings, config.data.language_tags, corpus, ranks)
    new = TrainingState(data=corpus.fingerprint, teacher=teacher.saved.digest if teacher else "")
    state = saved.state if saved else new
    check_same_data(corpus, saved, run)
    check_same_teacher(teacher and teacher.saved, state, run)
    ranks.run_on_main(lambda: check_end(config, settings, corpus, saved, insist))
    model, weights = first_model(config, corpus, saved, ranks)
    size = size_of(model)
    share = share_of_peak(model, corpus, settings.precision, devices, ranks.world)
    layout = Layout(model, weights, settings, config.layout, devices, ranks, teacher)
    # After the layout, which replaces the parameters that it splits or shards
    optimizer = make_optimizer(model, settings)
    average = WeightAverage(layout, settings.ema)
    if saved:
        if saved.state.step > saved.state.skipped:  # before the first update there are no moments
            layout.fill_moments(optimizer, saved.moments)
        layout.parts.receive(average.averages, saved.averages)
    start = ranks.run_on_main(lambda: "" if saved else start_of(settings.start_from))
    announce(run, settings, size, corpus, layout, state, teacher, start)

    steps = Steps(corpus.train, settings.accumulate, layout.data_rank, layout.data_ranks, layout.device)
    batches = steps.after(state.epoch, state.batch)
    if dry_run:
        needed = cost(layout, settings, corpus, next(batches)[1], settings.steps - state.step, ranks)
        return Summary(run, state, settings.steps, None, None, (), cost=needed)
    resumed_at = state.step if saved else None
    values = flat(config)
    trackers = ranks.run_on_all(
        lambda: open_trackers(run, settings.trackers, values, resumed_at) if ranks.is_main else []
    )
    if fresh:
        # Last of all, so that no error before the first step costs the earlier run
        ranks.run_on_main(lambda: remove_run(run, settings))
    progress = Progress(
        state, settings.steps, share, validate_every=settings.validate_every, classes=len(corpus.target)
    )
    began = {"model": size, "settings": values}
    stopped_by = None
    with (
        StopSignals(ranks.world > 1) as stop,
        Journal(run, settings, began, layout, ranks, resumed_at, trackers, progress) as journal,
        Saver(
            run, settings, resumed_at, writes=ranks.is_main, main_says=ranks.main_says, copied=layout.parts.copy_parts
        ) as saver,
        progress,
    ):
        training = Training(config, corpus, optimizer, average, state, ranks, journal, saver)
        training.validate_start(start)
        while state.step < settings.steps and not out_of_patience(state, settings):
            if stopped_by := ranks.stop_signal(stop.signal):
                break
            (state.epoch, state.batch), micro_batches = next(batches)
            torch.manual_seed(dropout_seed(settings.seed, state.step, layout.data_rank))
            model.train()
            place = {"the step": state.step, "the position in the data": (state.epoch, state.batch)}
            scale = loss_scale(settings, state)
            loss = layout.accumulate(micro_batches, place, scale)
            done = read_step(loss, layout.clip(settings.clip, scale))
            state.step += 1
            training.update(done, learning_rate(settings, state.step, sizes.d_model, state.reductions))
            if state.step % settings.validate_every == 0 or state.step == settings.steps:
                training.validate_and_save()
            training.save_if_due()
        if stopped_by and state.step != saver.saved_step:
            training.save_between()
    return summarize(run, settings, state, stopped_by, corpus, ranks)


def check_end(
    config: RunConfig, settings: TrainingConfig, corpus: Corpus, saved: SavedTraining | None, insist: bool
) -> None:
    """Raise ConfigError where a resumed run has no step left, or would jump to another learning rate."""
    if saved is None:
        return
    run = Path(config.run)
    if settings.epochs:
        check_steps(run, settings.steps, saved.state.step)
    if not insist:
        before = saved_config(run / "last")
        changed = changed_scoring(flat(before), flat(config))
        check_jumps(run, before.training, config.training, changed, saved.state)
        was = with_steps(before.training, corpus.train)
        check_rate(was, settings, saved.state.step, model_sizes(config.model).d_model)


def share_checkpoint(read: Callable[[], SavedTraining | None], ranks: Ranks) -> SavedTraining | None:
    """Return the checkpoint to resume from, whose tensors only rank 0 has; None for a new run."""
    saved = ranks.run_on_all(lambda: read() if ranks.is_main else None)
    state = ranks.run_on_main(lambda: saved.state if saved else None)
    if state is None:
        return None
    return saved or SavedTraining({}, {}, state)


def opened_teacher(settings: TrainingConfig, language_tags: bool, corpus: Corpus, ranks: Ranks) -> OpenedModel | None:
    """Return the model whose predictions are learned from, in the weights' dtype of the training; None without one."""
    if not settings.teacher or not settings.teacher_weight:
        return None

    def read() -> SavedModel:
        return load_teacher(settings.teacher, language_tags, corpus.source, corpus.target)

    return open_model(read, ranks, WEIGHTS[settings.precision])


def first_model(
    config: RunConfig, corpus: Corpus, saved: SavedTraining | None, ranks: Ranks
) -> tuple[EncoderDecoder, Iterator[tuple[str, Tensor]]]:
    """Return the model with which training begins, without memory, and its whole weights, each when it is asked for.

    They are those of the checkpoint, of another run's model, or random.
    """
    settings = config.training
    sizes = model_sizes(config.model)
    last = Path(config.run) / "last"

    def build() -> EncoderDecoder:
        model = build_model(sizes, corpus.source, corpus.target)
        # M2M-100 and NLLB-200 have no bias of the projection: an imported one stays 0, and can be exported again
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
        return model, drawn  # by every rank, so that none need be sent
    plain = {name: each for name, each in own.items() if not name.endswith(LORA)}
    ranks.run_on_main(lambda: check_fits(plain, start, settings.start_from))
    of_lora = ((name, weight) for name, weight in drawn if name.endswith(LORA))
    return model, chain(ranks.tensors_of_main(start, plain), of_lora)


LORA = (".lora_A", ".lora_B")
"""What the names of LoRA's matrices end with."""


def must_agree(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that must be equal on all processes."""
    differ = {"run", "data.path", "data.cache", "training.devices", "training.threads"}
    return {name: value for name, value in values.items() if name not in differ}


def dropout_seed(seed: int, step: int, data_rank: int) -> int:
    """Return the random seed of a step, a function of these three numbers alone, so that none needs to be saved.

    `data_rank` counts the ranks that have different sentences: ranks that split the vocabulary compute the same tokens
    and must drop the same values.
    """
    return int(numpy.random.SeedSequence([seed, step, data_rank]).generate_state(1, numpy.uint64)[0])


@dataclass
class Training:
    """A training that has begun, as far as its validations and checkpoints are made of it: all that writes models."""

    config: RunConfig
    corpus: Corpus
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    state: TrainingState
    ranks: Ranks
    journal: Journal
    saver: Saver

    def update(self, done: StepNumbers, rate: float) -> None:
        """Update the weights by the gradient of a step, unless it is to be skipped, and note the step."""
        if skips(self.config.training, self.state, done.norm):
            self.optimizer.zero_grad()
            self.journal.note_skipped_step(self.state)
            return
        check_finite(self.state.step, done, self.saver)
        update(self.optimizer, rate)
        self.average.update(self.state.step)
        self.state.tokens += done.tokens
        self.journal.note_step(self.state, done, rate)

    def validate_and_save(self) -> None:
        """Validate, and begin to save the model and the state. Every rank calls this."""
        moments = self.good_moments()
        found = self.validate()
        settings = self.config.training
        better = note_validation(self.state, found, settings.best_by)
        reduced = reduce_rate(self.state, settings)
        # Before the state: of a process that is killed in between, the one that resumes keeps nothing of these
        self.journal.keep(found)
        self.saver.save(
            self.translator(),
            found.as_dict(),
            self.average.weights(),
            moments,
            self.state,
            validated=True,
            better=better,
        )
        self.journal.announce_validation(self.state, found)
        if reduced:
            left = settings.plateau_factor**self.state.reductions
            self.journal.progress.say(
                f"[train] {settings.plateau_patience} validations without a better one: the learning rate is "
                f"multiplied by {settings.plateau_factor:g}, {left:.3g} in all"
            )
        return_free_memory()

    def validate(self) -> Validation:
        """Return a validation of the model; raise TrainingError where its loss is not finite. Every rank calls this."""
        layout = self.average.layout
        with self.average.in_place(), layout.independent() as ranks:
            translator = self.translator()
            if layout.has_whole_model:
                translator = merge_lora(translator)
            found = validate(translator, self.corpus.valid, layout.plain_loss(translator.model), self.state.step, ranks)
        loss = found["loss"]
        if loss is None or not math.isfinite(loss):
            raise spoiled_numbers_error(self.state.step, f"the validation loss is {loss}", self.saver)
        return found

    def validate_start(self, start: str) -> None:
        """Validate the model that a new run starts from, if there is one. Every rank calls this."""
        if start:
            self.journal.note_start(self.state, self.validate(), start)

    def save_if_due(self) -> None:
        """Begin to save the state by `training.save_every`; raise the error of a save before. Every rank calls this."""
        self.saver.check()
        if self.saver.is_due(self.state.step):
            self.save_between()

    def save_between(self) -> None:
        """Begin to save the state without a validation. Every rank calls this."""
        moments = self.good_moments()
        self.journal.flush()
        self.saver.save(self.translator(), {"step": self.state.step}, self.average.weights(), moments, self.state)

    def translator(self) -> Translator:
        """Return the model in training, as this rank has it, with what belongs to it."""
        return Translator(self.config, self.average.layout.model, self.corpus.source, self.corpus.target)

    def good_moments(self) -> dict[str, Tensor]:
        """Return the moments, as this rank has them; with `training.ema` also the weights, in whose place averages are.

        Raise TrainingError, on every rank, where any of these numbers or of the weights is not finite.
        """
        moments = self.average.layout.moments(self.optimizer) | self.average.others()
        parts = {"the weights": self.average.weights(), "the optimizer's moments": moments}
        good = [all(bool(local_of(each).isfinite().all()) for each in part.values()) for part in parts.values()]
        everywhere = gather_numbers([int(each) for each in good], self.ranks.for_steps().group)
        for name, each in zip(parts, zip(*everywhere, strict=True), strict=True):
            if not all(each):
                raise spoiled_numbers_error(self.state.step, f"{name} are no longer finite", self.saver)
        return moments


def check_finite(step: int, done: StepNumbers, saver: Saver) -> None:
    """Raise TrainingError for a loss or gradient norm that is not finite, before the optimizer's step."""
    if not math.isfinite(done.loss):
        raise spoiled_numbers_error(step, f"the loss is {done.loss}", saver)
    if not math.isfinite(done.norm):
        raise spoiled_numbers_error(step, f"the loss is {done.loss:.3f} but its gradient is {done.norm}", saver)


def spoiled_numbers_error(step: int, what: str, saver: Saver) -> TrainingError:
    """Return the error for numbers that are nan or infinite, with advice."""
    message = (
        f"step {step}: {what}: try a smaller training.learning_rate, a longer training.warmup, training.clip 1, "
        "or training.precision float32"
    )
    if last := saver.last():
        message += f"; {last} has the last good state"
    return TrainingError(message)
