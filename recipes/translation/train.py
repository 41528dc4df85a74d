"""Training: the loop on one page, and the few functions it calls.

`Layout` spreads the model over the devices of this process or over several processes: data-parallel, sharded, with
vocabulary or time steps split. Either way the loss engine walks the hidden states in chunks where they are, with
gradients, and hands back one sum; `accumulate_gradients` divides it by the tokens of the whole step, so that the
gradient is that of all its sentences on one device.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path

import numpy
import torch
from torch import Tensor

import seqpar
from recipes.translation.batches import Steps
from recipes.translation.checkpoint import (
    SavedTraining,
    TrainingState,
    Translator,
    build_model,
    fill_model,
    load_training,
    model_sizes,
    save_model,
    save_training,
    saved_config,
)
from recipes.translation.config import ConfigError, RunConfig, TrainingConfig
from recipes.translation.corpus import Corpus, load_corpus
from recipes.translation.durable import remove_folder, whole_folder
from recipes.translation.layout import Layout, axes_of, devices_of
from recipes.translation.progress import Metrics, Progress
from recipes.translation.ranks import Ranks, joined
from recipes.translation.schedule import learning_rate
from recipes.translation.stop import StopSignals, TrainingError
from recipes.translation.summary import Summary, summarize
from recipes.translation.validation import Validation, validate

MAY_CHANGE = frozenset(
    {
        "run",
        "data.path",  # the data itself is compared by its fingerprint
        "data.test",
        "data.tokenize",
        *(f"training.{name}" for name in ("devices", "chunk_tokens", "precision", "threads")),  # rounding at most
        *(f"layout.{name}" for name in ("data", "shard", "vocab", "sequence", "timeout")),
        *(f"training.{name}" for name in ("steps", "validate_every", "validate_bleu", "patience")),
        *(f"decoding.{name}" for name in ("beam", "length_penalty", "batch_sentences", "max_length")),
    }
)
"""Settings that a run may be resumed with at another value; any other one would make it a different run."""


def train(config: RunConfig, *, fresh: bool = False) -> Summary:
    """Train until `steps`, `patience`, Ctrl-C or SIGTERM; a run that has a `last` checkpoint goes on from there.

    Every process of a run calls it alike. On the CPU a run that was stopped and resumed in the same layout equals an
    uninterrupted one bit for bit; in another one, within rounding. `fresh` first removes what an earlier run left in
    the folder.

    Raises ConfigError, DataError or CheckpointError for what a user can mend, TrainingError where the loss or
    the gradient is no longer finite; where another process failed, OtherRankError with its message.
    """
    with joined(config.layout.timeout) as ranks:
        return train_on(ranks, config, fresh)


def train_on(ranks: Ranks, config: RunConfig, fresh: bool) -> Summary:
    """`train`, in the process that `ranks` describes."""
    run, settings, sizes = Path(config.run), config.training, model_sizes(config.model)
    ranks.agree(must_agree(config))
    axes, devices = axes_of(config.layout, ranks.world), devices_of(settings, ranks)
    saved = ranks.from_first(lambda: begin(config, fresh))
    if settings.threads:
        torch.set_num_threads(settings.threads)

    corpus = load_corpus(config, ranks)
    ranks.agree({"the training and validation data": corpus.fingerprint})
    state = saved.state if saved else TrainingState(data=corpus.fingerprint)
    check_same_data(corpus, state, run)
    torch.manual_seed(settings.seed)
    model = build_model(sizes, corpus.source, corpus.target).to(WEIGHTS[settings.precision])
    if saved:
        fill_model(model, saved.weights, run / "last")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layout = Layout(model, config, axes, devices, ranks)
    optimizer = torch.optim.Adam(model.parameters(), betas=settings.betas, eps=1e-9, fused=True)
    if saved:
        layout.fill_moments(optimizer, saved.moments)
    announce(config, parameters, corpus, layout, state)

    steps = Steps(corpus.train, settings.accumulate, layout.share, layout.shares, layout.device)
    batches = steps.after(state.epoch, state.batch)
    metrics = Metrics(run / "metrics.jsonl" if ranks.speaks else Path(os.devnull), after_step=state.step)
    stopped_by = None
    with StopSignals(ranks.world > 1) as stop, metrics, Progress(state, settings.steps) as progress:
        while state.step < settings.steps and not out_of_patience(state, settings):
            if stopped_by := ranks.stopped_by(stop.signal):
                break
            (state.epoch, state.batch), micro_batches = next(batches)
            torch.manual_seed(dropout_seed(settings.seed, state.step, layout.token_rank))
            model.train()
            loss = seqpar.accumulate_gradients(  # of the whole step, divided once by the tokens of all ranks
                micro_batches,
                layout.loss_of,
                layout.tokens_of,
                model=layout.reducer,
                group=layout.groups.tokens,
                agree={"the step": state.step, "the position in the data": (state.epoch, state.batch)},
            )
            norm = layout.clip(settings.clip)
            check_finite(state.step + 1, loss_mean := float(loss.mean), norm, run)
            rate = learning_rate(settings, state.step + 1, sizes.d_model)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

            state.step, state.tokens = state.step + 1, state.tokens + (tokens := int(loss.tokens))
            progress.step_done(state, loss=loss_mean, tokens=tokens)
            metrics.write(step=state.step, loss=loss_mean, learning_rate=rate, gradient_norm=norm, tokens=tokens)
            if state.step % settings.validate_every == 0 or state.step == settings.steps:
                translator = whole_translator(config, corpus, layout)
                loss_of = layout.whole_forward(translator.model)
                found = validate(translator, corpus, loss_of, state.step, ranks.in_step())
                if note_validation(state, found) and ranks.speaks:
                    save_model(run / "best", translator, found.as_dict())
                metrics.write(**found.as_dict())
                save(translator, found.as_dict(), layout.moments(optimizer), state, ranks)
                progress.validated(state, found)
        if stopped_by:
            translator = whole_translator(config, corpus, layout)
            save(translator, {"step": state.step}, layout.moments(optimizer), state, ranks)
    return ranks.from_first(lambda: summarize(run, state, settings.steps, stopped_by, corpus))


WEIGHTS = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
"""The dtype of weights and moments, by `training.precision`."""


def begin(config: RunConfig, fresh: bool) -> SavedTraining | None:
    """What there is to go on from, in a folder that fits the settings."""
    run = Path(config.run)
    if fresh:
        remove_run(run)
    return load_training(run / "last") if check_resumable(config) else None


def must_agree(config: RunConfig) -> dict[str, object]:
    """What every process must have been started with alike."""
    differ = {"run", "data.path", "training.devices", "training.threads"}
    return {name: value for name, value in flat(config).items() if name not in differ}


def dropout_seed(seed: int, step: int, token_rank: int) -> int:
    """The random numbers of a step are a function of these three: nothing to save, and none drawn twice.

    Ranks that split a vocabulary compute the same tokens and must drop the same values.
    """
    return int(numpy.random.SeedSequence([seed, step, token_rank]).generate_state(1, numpy.uint64)[0])


def save(
    translator: Translator, facts: dict[str, object], moments: dict[str, Tensor], state: TrainingState, ranks: Ranks
) -> None:
    """Write the checkpoint that the run goes on from; rank 0 does."""
    if ranks.speaks:
        save_training(Path(translator.config.run) / "last", translator, facts, moments, state)


@torch.no_grad()
def whole_translator(config: RunConfig, corpus: Corpus, layout: Layout) -> Translator:
    """The model in training with all its weights in plain torch, on every rank."""
    if layout.has_whole_model:
        return Translator(config, layout.model, corpus.source, corpus.target)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target)
    model = model.to(layout.device, layout.model.generator.weight.dtype)
    weights = {name: layout.whole(name, parameter) for name, parameter in layout.model.named_parameters()}
    fill_model(model, weights, "the layout")
    return Translator(config, model, corpus.source, corpus.target)


def check_resumable(config: RunConfig) -> bool:
    """Whether the run has something to go on from; ConfigError where `config` would make it another run."""
    run = Path(config.run)
    saved = saved_config(run / "last")
    if saved is None:
        return False
    before, now = flat(saved), flat(config)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in MAY_CHANGE:
            raise ConfigError(
                f"{key} is {now.get(key)!r} but {run} was trained with {before.get(key)!r}: keep it, choose another "
                "--run, or start over with --fresh"
            )
    return True


def flat(config: RunConfig) -> dict[str, object]:
    """Every setting by its dotted name."""
    values: dict[str, object] = {}
    for name, value in asdict(config).items():
        values |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return values


def check_same_data(corpus: Corpus, state: TrainingState, run: Path) -> None:
    """A position in the data means nothing in other data."""
    if state.data != corpus.fingerprint:
        raise ConfigError(
            f"the training or validation data is not what {run} was trained on; restore it, choose another --run, "
            "or start over with --fresh"
        )


def remove_run(run: Path) -> None:
    """Remove what a run left in its folder, and nothing else that may lie there."""
    for name in ("last", "best", "subwords"):
        remove_folder(run / name)
    (run / "metrics.jsonl").unlink(missing_ok=True)


def check_finite(step: int, loss: float, norm: float, run: Path) -> None:
    """Stop before a loss or gradient that is nan or infinite spoils the weights."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss:.3f} but its gradient is {norm}"
    kept = f"; {run / 'last'} holds the last good state" if whole_folder(run / "last") else ""
    raise TrainingError(
        f"step {step}: {what}: try a smaller training.learning_rate, a longer training.warmup, training.clip 1, "
        f"or training.precision float32{kept}"
    )


def note_validation(state: TrainingState, found: Validation) -> bool:
    """Put a validation's loss into the state; whether it is the best so far."""
    better = state.best_loss is None or found.loss < state.best_loss
    state.stale = 0 if better else state.stale + 1
    if better:
        state.best_loss, state.best_step = found.loss, found.step
    return better


def out_of_patience(state: TrainingState, settings: TrainingConfig) -> bool:
    """Whether validation has not improved for as long as `patience` allows."""
    return 0 < settings.patience <= state.stale


def announce(config: RunConfig, parameters: int, corpus: Corpus, layout: Layout, state: TrainingState) -> None:
    """Say what is about to be trained, on what, and from where."""
    dropped = f" ({corpus.train.dropped:,} too long pairs left out)" if corpus.train.dropped else ""
    print(
        f"[train] {parameters / 1e6:.1f} M parameters, {len(corpus.target):,} target subwords, "
        f"{len(corpus.train):,} batches an epoch{dropped}, {layout}",
        flush=True,
    )
    if state.step:
        print(f"[train] going on from step {state.step:,} of {config.run}", flush=True)
