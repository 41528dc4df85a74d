"""Training: the loop on one page, and the few functions it calls.

The encoder-decoder runs data-parallel over the devices and leaves its hidden states there; the loss engine walks
them in chunks on the same devices, with gradients, and hands back one sum. Dividing it by the tokens of the whole
step and calling `backward()` once per batch gives the gradient of the single-device model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

import seqpar
from recipes.translation.batches import Batch, TokenBatches
from recipes.translation.checkpoint import (
    TrainingState,
    Translator,
    build_model,
    load_training,
    model_sizes,
    save_model,
    save_training,
    saved_config,
)
from recipes.translation.config import ConfigError, RunConfig, TrainingConfig
from recipes.translation.corpus import Corpus, load_corpus
from recipes.translation.durable import remove_folder, whole_folder
from recipes.translation.progress import Metrics, Progress
from recipes.translation.schedule import learning_rate
from recipes.translation.stop import StopSignals, TrainingError
from recipes.translation.subwords import PAD
from recipes.translation.summary import Summary, summarize
from recipes.translation.validation import Validation, validate
from seqpar.devices import check_devices

MAY_CHANGE = frozenset(
    {
        "run",
        "data.path",  # the data itself is compared by its fingerprint
        "data.test",
        *(f"training.{name}" for name in ("devices", "chunk_tokens", "precision", "threads")),  # rounding at most
        *(f"training.{name}" for name in ("steps", "validate_every", "validate_bleu", "patience")),
        *(f"decoding.{name}" for name in ("beam", "length_penalty", "batch_sentences", "max_length")),
    }
)
"""Settings that a run may be resumed with at another value; any other one would make it a different run."""


def train(config: RunConfig, *, fresh: bool = False) -> Summary:
    """Train until `steps`, `patience`, Ctrl-C or SIGTERM; a run that has a `last` checkpoint goes on from there.

    On the CPU a run that was stopped and resumed equals an uninterrupted one bit for bit. `fresh` first removes
    what an earlier run left in the folder.

    Raises ConfigError, DataError or CheckpointError for what a user can mend, TrainingError where the loss or
    the gradient is no longer finite.
    """
    run, settings = Path(config.run), config.training
    if fresh:
        remove_run(run)
    resuming = check_resumable(config)
    torch.manual_seed(settings.seed)
    if settings.threads:
        torch.set_num_threads(settings.threads)

    devices, sizes = training_devices(settings), model_sizes(config.model)
    corpus = load_corpus(config)
    model = build_model(sizes, corpus.source, corpus.target).to(devices[0])
    translator = Translator(config, model, corpus.source, corpus.target)
    encoder_decoder = seqpar.DataParallel(model, devices, gather_outputs=False)
    smoothing = seqpar.LabelSmoothing(settings.label_smoothing, settings.smoothing, ignore_index=PAD)  # type: ignore[arg-type]
    engine = seqpar.LossCompute(model.generator, smoothing, devices, settings.chunk_tokens)
    optimizer = torch.optim.Adam(model.parameters(), betas=settings.betas, eps=1e-9, fused=True)
    state = load_training(run / "last", model, optimizer) if resuming else TrainingState(data=corpus.fingerprint)
    check_same_data(corpus, state, run)
    announce(translator, corpus, devices, state)

    batches = batches_from(corpus.train, state.epoch, state.batch)
    metrics = Metrics(run / "metrics.jsonl", after_step=state.step)
    with StopSignals() as stop, metrics, Progress(state, settings.steps) as progress:
        while state.step < settings.steps and not stop.signal and not out_of_patience(state, settings):
            micro_batches = [next(batches) for _ in range(settings.accumulate)]
            tokens = sum(batch.tokens for _, batch in micro_batches)  # of the whole step, before any division
            total = torch.zeros((), device=devices[0])
            model.train()
            for (state.epoch, state.batch), batch in micro_batches:
                with torch.autocast(devices[0].type, torch.bfloat16, enabled=settings.precision == "bf16"):
                    hidden = encoder_decoder(batch.src, batch.tgt_in)  # a list: each device keeps its own
                    loss = engine(hidden, batch.tgt_out)
                (loss.total / tokens).backward()
                total += loss.total.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf).item()
            loss_mean = total.item() / tokens
            check_finite(state.step + 1, loss_mean, norm, run)
            rate = learning_rate(settings, state.step + 1, sizes.d_model)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

            state.step, state.tokens = state.step + 1, state.tokens + tokens
            progress.step_done(state, loss=loss_mean, tokens=tokens)
            metrics.write(step=state.step, loss=loss_mean, learning_rate=rate, gradient_norm=norm, tokens=tokens)
            if state.step % settings.validate_every == 0 or state.step == settings.steps:
                found = validate(translator, corpus, encoder_decoder, engine, state.step)
                if note_validation(state, found):
                    save_model(run / "best", translator, found.as_dict())
                metrics.write(**found.as_dict())
                save_training(run / "last", translator, found.as_dict(), optimizer, state)
                progress.validated(state, found)
        stopped_by = stop.signal if state.step < settings.steps else None
        if stopped_by:
            save_training(run / "last", translator, {"step": state.step}, optimizer, state)
    return summarize(run, state, settings.steps, stopped_by, corpus)


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


def training_devices(settings: TrainingConfig) -> list[torch.device]:
    """The devices of the run: those given, or every GPU, or two replicas on the CPU where there is none."""
    if settings.devices == "auto":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [torch.device(name) for name in gpus or ("cpu", "cpu")]
    given = [settings.devices] if isinstance(settings.devices, str) else settings.devices
    try:
        return list(check_devices(given))
    except ValueError as error:
        raise ConfigError(f"training.devices: {error}") from error


def batches_from(batches: TokenBatches, epoch: int, done: int) -> Iterator[tuple[tuple[int, int], Batch]]:
    """Batches without end, from batch `done` of `epoch` on, each with the position that follows it."""
    while True:
        for number, indices in enumerate(batches.epoch(epoch)[done:], start=done + 1):
            yield (epoch, number), batches.batch(indices)
        epoch, done = epoch + 1, 0


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


def announce(translator: Translator, corpus: Corpus, devices: list[torch.device], state: TrainingState) -> None:
    """Say what is about to be trained, on what, and from where."""
    sizes = translator.model.generator
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    dropped = f" ({corpus.train.dropped:,} too long pairs left out)" if corpus.train.dropped else ""
    print(
        f"[train] {parameters / 1e6:.1f} M parameters, {sizes.out_features:,} target subwords, "
        f"{len(corpus.train):,} batches an epoch{dropped}, devices {', '.join(map(str, devices))}",
        flush=True,
    )
    if state.step:
        print(f"[train] going on from step {state.step:,} of {translator.config.run}", flush=True)
