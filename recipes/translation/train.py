"""Training: the loop on one page, and the few functions it calls.

`Layout` distributes the model over the devices of this process or over several processes: data-parallel, sharded, or
with the vocabulary split. In every layout the loss engine computes the loss and its gradients with respect to the
hidden states in chunks, on the device that holds them, and returns one sum. `accumulate_gradients` divides it by the
number of tokens in the whole step, so that the gradient equals that of all the step's sentences on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy
import torch

from recipes.translation.data.batches import Steps
from recipes.translation.data.corpus import load_corpus
from recipes.translation.processes.ranks import Ranks, join_ranks
from recipes.translation.processes.stop import StopSignals
from recipes.translation.run_folder.lock import sole_writer
from recipes.translation.run_folder.other_model import run_subwords, start_of
from recipes.translation.run_folder.resume import begin, flat, remove_run
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.model_text import ModelText
from recipes.translation.training.beginning import (
    check_end,
    first_model,
    first_moments,
    first_state,
    fit_to_corpus,
    opened_teacher,
    share_checkpoint,
)
from recipes.translation.training.costs import cost, share_of_peak
from recipes.translation.training.half_precision import check_autocast, loss_scale
from recipes.translation.training.journal import Journal
from recipes.translation.training.layout import Layout, axes_of
from recipes.translation.training.log_file import LOG, log_to, note_in
from recipes.translation.training.machine import devices_of
from recipes.translation.training.optimizer import learning_rate
from recipes.translation.training.progress import Progress, read_step
from recipes.translation.training.summary import Summary, announce, size_of, summarize
from recipes.translation.training.trackers import check_installed, open_trackers
from recipes.translation.training.training import Training
from recipes.translation.training.validation import check_tags, out_of_patience


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
    same layout equals an uninterrupted one bit for bit; in a different layout, up to rounding. `fresh` starts over, and
    removes an earlier run from the folder as soon as the new one can take its first step. With `insist`, data and a
    changed number of steps that look like mistakes are accepted. A `dry_run` does everything that comes before the
    first step, and its summary says what the training will cost. Pass `ranks` if the caller has already joined them.

    Raises ConfigError, DataError or CheckpointError for the user's mistakes, TrainingError if the loss, the gradient
    or the weights are no longer finite, and OtherRankError with the message of another process that failed.
    """
    with ExitStack() as held:
        if ranks is None:
            ranks = held.enter_context(join_ranks(config.layout.timeout))
        ranks.agree(must_agree(flat(config)))
        axes_of(config.layout, ranks.world)  # for its errors, before anything is locked or read
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
    """Train in the process that `ranks` describes, in a folder that no other run writes to."""
    run = Path(config.run)
    values = flat(config)
    sizes = model_sizes(config.model)  # for its errors, before anything is read
    ranks.run_on_main(lambda: check_installed(config.training.trackers))
    if config.training.threads:
        torch.set_num_threads(config.training.threads)

    saved = share_checkpoint(lambda: begin(config, fresh), ranks)
    corpus = load_corpus(config, ranks, partial(run_subwords, fresh=fresh), insist or saved is not None)
    settings = fit_to_corpus(config.training, config.decoding.max_length, sizes, corpus, ranks)
    check_tags(corpus, ModelText.of(config), settings.validate_bleu)
    teacher = opened_teacher(settings, config.data.language_tags, corpus, ranks)
    state = first_state(run, corpus, saved, teacher)
    ranks.run_on_main(lambda: check_end(config, settings, corpus, saved, insist))
    model, weights = first_model(config, corpus, saved, ranks)
    size = size_of(model)
    share = share_of_peak(model, corpus, settings.precision, devices, ranks.world)
    layout = Layout(model, weights, settings, config.layout, devices, ranks, teacher)
    optimizer, average = first_moments(layout, settings, saved)
    start = ranks.run_on_main(lambda: "" if saved else start_of(settings.start_from))
    announce(run, settings, size, corpus, layout, state, teacher, start)

    steps = Steps(corpus.train, settings.accumulate, layout.data_rank, layout.data_ranks, layout.device)
    batches = steps.after(state.epoch, state.batch)
    if dry_run:
        needed = cost(layout, settings, corpus, next(batches)[1], settings.steps - state.step, ranks)
        return Summary(run, state, settings.steps, None, None, (), cost=needed)
    resumed_at = state.step if saved else None
    trackers = ranks.share(lambda: open_trackers(run, settings.trackers, values, resumed_at), lambda opened: [])
    if fresh:
        # Last, so that no error before the first step costs the earlier run
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


def must_agree(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that must be equal on all processes."""
    differ = {"run", "data.path", "data.cache", "training.devices", "training.threads"}
    return {name: value for name, value in values.items() if name not in differ}


def dropout_seed(seed: int, step: int, data_rank: int) -> int:
    """Return the random seed of a step, a function of these three numbers only, so that no state needs to be saved.

    `data_rank` numbers the ranks that have different sentences: ranks that split the vocabulary compute the same tokens
    and must drop the same values.
    """
    return int(numpy.random.SeedSequence([seed, step, data_rank]).generate_state(1, numpy.uint64)[0])
