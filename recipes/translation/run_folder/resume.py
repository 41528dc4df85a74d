"""What a run finds in its folder: something to go on from, nothing, or what must not be overwritten."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from recipes.translation.atomic_folder import (
    CheckpointError,
    check_removable,
    check_replaceable,
    remove_folder,
    verified_folder,
    whole_folder,
)
from recipes.translation.data.corpus import Corpus
from recipes.translation.run_folder.checkpoint import SavedTraining, load_facts, load_training, saved_config
from recipes.translation.settings.config import ConfigError, RunConfig

FOLDERS = ("last", "best", "subwords")
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


def begin(config: RunConfig, fresh: bool) -> SavedTraining | None:
    """What there is to go on from, in a folder that fits the settings; None for a run that begins.

    Raises ConfigError where `config` would make it another run, CheckpointError where going on or beginning would
    overwrite what cannot be made again.
    """
    run = Path(config.run)
    if fresh:
        remove_run(run)
    for name in FOLDERS:
        check_replaceable(run / name)
    if whole_folder(run / "last") is None:
        check_nothing_to_lose(config)
        return None
    check_same_settings(config, run / "last")
    saved = load_training(run / "last")
    check_best(saved, config)
    return saved


def check_nothing_to_lose(config: RunConfig) -> None:
    """A run that begins may replace the `best` of its own first validation: it was killed before it saved `last`."""
    run = Path(config.run)
    if (run / "last").exists():
        raise CheckpointError(f"{run / 'last'} is empty: restore it from a copy, or start over with --fresh")
    made = saved_config(run / "best")
    if made is None:
        return
    step = load_facts(run / "best").get("step")
    if step != min(made.training.validate_every, made.training.steps):
        raise CheckpointError(
            f"{run / 'best'} is the model of step {step}, but there is no {run / 'last'} to go on from: restore it "
            "from a copy, choose another --run, or start over with --fresh, which removes the model"
        )
    check_same_settings(config, run / "best")


def check_same_settings(config: RunConfig, folder: Path) -> None:
    """ConfigError where what is in `folder` was trained with a setting that makes it another run."""
    saved = saved_config(folder)
    assert saved is not None  # the callers have looked
    before, now = flat(saved), flat(config)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in MAY_CHANGE:
            raise ConfigError(
                f"{key} is {now.get(key)!r} but {folder.parent} was trained with {before.get(key)!r}: keep it, choose "
                "another --run, or start over with --fresh"
            )


def check_best(saved: SavedTraining, config: RunConfig) -> None:
    """CheckpointError where `best` is damaged or another run's; where it is gone, the next validation replaces it."""
    state, best = saved.state, Path(config.run) / "best"
    if whole_folder(best) is not None:
        verified_folder(best)
        check_same_settings(config, best)
    elif state.best_loss is not None:
        print(f"[train] {best}, found at step {state.best_step:,}, is gone: the next validation replaces it")
        state.best_loss, state.best_step, state.stale = None, 0, 0


def check_same_data(corpus: Corpus, saved: SavedTraining | None, run: Path) -> None:
    """A position in the data means nothing in other data."""
    if saved and saved.state.data != corpus.fingerprint:
        raise ConfigError(
            f"the training or validation data is not what {run} was trained on; restore it, choose another --run, "
            "or start over with --fresh"
        )


def remove_run(run: Path) -> None:
    """Remove the checkpoints and subwords that a run left in its folder, and nothing else that may lie there."""
    for name in FOLDERS:
        check_removable(run / name)
    for name in FOLDERS:
        remove_folder(run / name)


def flat(config: RunConfig) -> dict[str, object]:
    """Every setting by its dotted name."""
    values: dict[str, object] = {}
    for name, value in asdict(config).items():
        values |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return values
