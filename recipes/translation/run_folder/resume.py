"""The start of a run: resume from the checkpoint in its folder, or check that nothing in the folder would be lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from recipes.translation.data.corpus import Corpus
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.atomic_folder import (
    check_removable,
    check_replaceable,
    model_folder,
    named_folder,
    pointer_to,
    remove_folder,
    verified_folder,
    whole_folder,
)
from recipes.translation.files.writing import replace_file
from recipes.translation.run_folder.checkpoint import (
    SavedTraining,
    TrainingState,
    load_facts,
    load_training,
    saved_config,
)
from recipes.translation.run_folder.numbered import (
    POINTERS,
    check_ours,
    kept_models,
    model_at,
    numbered_folders,
    numbered_root,
    step_of,
)
from recipes.translation.settings.config import DecodingConfig, RunConfig, TrainingConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.settings.schedules import SCHEDULES

MAY_CHANGE = frozenset(
    {
        "run",
        "data.cache",
        "data.path",  # the data itself is compared by its fingerprint
        "data.test",
        "data.tokenize",
        "training.teacher",  # its weights are compared by their fingerprint
        "training.compile",  # rounding, and the values that dropout drops
        *(f"training.{name}" for name in ("devices", "chunk_tokens", "precision", "threads")),  # rounding at most
        *(f"layout.{name}" for name in ("data", "shard", "vocab", "timeout")),
        *(f"training.{name}" for name in ("steps", "epochs", "validate_every", "validate_bleu")),
        *(f"training.{name}" for name in ("save_every", "keep_checkpoints", "patience")),
        *(f"training.{name}" for name in ("report", "trackers")),
        *(f"decoding.{each.name}" for each in fields(DecodingConfig)),
    }
)
"""Settings that may change when a run is resumed; changing any other would make it a different run."""
OF_BEAM = frozenset(f"decoding.{name}" for name in ("beam", "length_penalty", "length_norm", "batch_sentences"))
"""Decoding settings that have no effect on a greedy search."""
SCORING = frozenset(
    {
        *("training.validate_bleu", "data.tokenize"),
        *(f"decoding.{each.name}" for each in fields(DecodingConfig)),
    }
    - OF_BEAM
)
"""The settings in MAY_CHANGE that change BLEU and chrF, so that these could not be compared between validations."""
SAVED_WITH_MODELS = {name for name in MAY_CHANGE if name.startswith("decoding.")} | {"data.test", "data.tokenize"}
"""The settings in MAY_CHANGE that a model is saved with and that have no effect on its training."""


def begin(config: RunConfig, fresh: bool) -> SavedTraining | None:
    """Return the checkpoint to resume from; None for a new run, which with `fresh` replaces an earlier one.

    The earlier run stays until `remove_run`. Raises ConfigError if `config` would make it a different run, and
    CheckpointError if resuming or starting would overwrite files that cannot be made again.
    """
    run = Path(config.run)
    # Now rather than hours later, when the first checkpoint is to be written
    check_ours(run)
    check_replaceable(run / "subwords")
    values = flat(config)
    if fresh:
        check_others_stay(run, config.training)
        check_run_removable(run)
        return None
    if whole_folder(run / "last") is None:
        check_nothing_to_lose(run, values)
        return None
    check_same_settings(values, run / "last")
    saved = load_training(run / "last")
    if config.training.steps:
        check_steps(run, config.training.steps, saved)
    check_best(saved, run, values)
    check_saved_with_models(run, values, saved)
    for folder in kept_models(run):
        check_same_settings(values, folder)
    return saved


def check_others_stay(run: Path, training: TrainingConfig) -> None:
    """Raise ConfigError if the model to start from or to learn from is in the run's own folder."""
    for name in ("start_from", "teacher"):
        other: str = getattr(training, name)
        if other and model_folder(other).resolve().is_relative_to(run.resolve()):
            raise ConfigError(
                f"training.{name} is {other}, a model of {run} itself, which the new run would replace: choose "
                "another --run"
            )


def check_nothing_to_lose(run: Path, values: Values) -> None:
    """Raise CheckpointError if a new run would replace a model, unless it is that of the same run's first validation.

    A run that is killed before it writes its first `last` leaves only that model, which `best` may already name.
    """
    if named := named_folder(run / "last"):
        raise CheckpointError(
            f"{run / 'last'} names {named}, which is missing: restore it from a copy, or start over with --fresh"
        )
    for folder in (run / "best", *(each for each in numbered_folders(run) if each.name.startswith("step-"))):
        if whole_folder(folder) is None:
            continue
        facts = load_facts(folder)
        step: int = facts["step"]
        if "valid_loss" in facts and step > saved_config(folder).training.validate_every:
            raise CheckpointError(
                f"{folder} is the model of step {step}, but there is no {run / 'last'} to resume from: restore it "
                "from a copy, choose another --run, or start over with --fresh, which removes the model"
            )
        check_same_settings(values, folder)


def check_steps(run: Path, steps: int, saved: SavedTraining) -> None:
    """Raise ConfigError if no steps are left to make, unless the run has ended as asked, with a validation."""
    made = saved.state.step
    if made > steps or (made == steps and "valid_loss" not in saved.facts):
        raise ConfigError(
            f"training.steps is {steps:,}, but {run} has already done {made:,} steps: set training.steps to "
            f"{made + 1:,} or more to continue, choose another --run, or start over with --fresh"
        )


def check_saved_with_models(run: Path, values: Values, saved: SavedTraining) -> None:
    """Print which new settings `best` lacks; raise ConfigError if no steps are left, so that no model would get them.

    Decoding settings and the test set have no effect on training, but a model is saved and used with them.
    """
    made = saved.state.step
    before = _model_values(flat(saved.config))
    for key, value in _model_values(values).items():
        if value == before[key]:
            continue
        now, was = spell(value), spell(before[key])
        if made == values["training.steps"]:
            raise ConfigError(
                f"{key} is {now}, but {run} has finished its {made:,} steps, and its models keep {was}: set "
                f"training.steps to {made + 1:,} or more, or pass test files and search options to evaluate and "
                "translate instead"
            )
        print(f"[train] {key} is now {now}; {run / 'best'} keeps {was} until there is a better model")


def _model_values(values: Values) -> dict[str, object]:
    tests = {f"{name}.test": value["test"] for name, value in values.items() if isinstance(value, dict)}
    return {name: value for name, value in values.items() if name in SAVED_WITH_MODELS} | tests


def check_same_settings(values: Values, folder: Path) -> None:
    """Raise ConfigError if the checkpoint in `folder` has different settings, apart from those in MAY_CHANGE."""
    before = without_paths(flat(saved_config(folder)))
    now = without_paths(values)
    may_change = MAY_CHANGE
    if METRICS[str(values["training.best_by"])].of_translations:
        may_change -= SCORING
    differ = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    found = [(key, spell(now.get(key)), spell(before.get(key))) for key in differ if key not in may_change]
    if not found:
        return
    (key, own, other), *more = found
    others = "".join(f", {key} is {own} but was {other}" for key, own, other in more)
    raise ConfigError(
        f"{key} is {own} but {folder.parent} was trained with {other}{others}: change {'them' if more else 'it'} back, "
        "choose another --run, or start over with --fresh"
    )


def spell(value: object) -> str:
    """Return a setting's value as a user would type it."""
    if isinstance(value, (tuple, Mapping)):
        return " ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return repr(value)


def check_best(saved: SavedTraining, run: Path, values: Values) -> None:
    """Raise CheckpointError or ConfigError if `best` is damaged or belongs to a different run.

    If it is missing, its loss is forgotten, so that the next validation saves a new one.
    """
    state = saved.state
    best = run / "best"
    named = named_folder(best)
    saved_best = model_at(run, state.best_step)
    if named and step_of(named) > state.step and whole_folder(saved_best):
        # A process was killed before it could save the state that belongs to a better model
        replace_file(best, pointer_to([saved_best]))
    if (whole := whole_folder(best)) is not None:
        if whole != whole_folder(run / "last"):  # that one's files have been verified already
            verified_folder(best)
        check_same_settings(values, best)
    elif state.best_loss is not None:
        print(f"[train] {best}, found at step {state.best_step:,}, is gone: the next validation will replace it")
        state.best_loss = None
        state.best_score = None
        state.best_step = 0
        state.stale = 0


def check_same_data(corpus: Corpus, saved: SavedTraining | None, run: Path) -> None:
    """Raise ConfigError if the data has changed, since a position in different data has no meaning."""
    if saved and saved.state.data != corpus.fingerprint:
        raise ConfigError(
            f"the training or validation data is not what {run} was trained on; restore it, choose another --run, "
            "or start over with --fresh"
        )


def check_run_removable(run: Path) -> None:
    """Raise CheckpointError if the folders of an earlier run contain files that are not its own."""
    for folder in (*_folders(run), run / "subwords"):
        check_removable(folder)


def remove_run(run: Path, training: TrainingConfig) -> None:
    """Remove the checkpoints of an earlier run in the folder, their average and its subwords, and no other files.

    Subwords stay if the new run has made its own, since these have already replaced the earlier ones.
    """
    check_run_removable(run)
    for name in POINTERS:
        (run / name).unlink(missing_ok=True)
    for folder in _folders(run):
        remove_folder(folder)
    if training.start_from or training.teacher:
        remove_folder(run / "subwords")
    with suppress(OSError):  # it does not exist, or contains other files
        numbered_root(run).rmdir()


def _folders(run: Path) -> list[Path]:
    """Return the folders of a run's models and states."""
    return [run / "averaged", *numbered_folders(run)]


def without_paths(values: Values) -> dict[str, object]:
    """Return the settings without the corpora's folders and test files, which may change like those of data."""
    changed = {"path": None, "test": ()}
    return {name: {**value, **changed} if isinstance(value, dict) else value for name, value in values.items()}


Values = Mapping[str, object]
"""The settings of a run by their dotted names; each corpus in `corpora` is a dict."""


def flat(config: RunConfig) -> dict[str, object]:
    """Return the value of every setting by its dotted name."""
    values: dict[str, object] = {}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


def check_jumps(
    run: Path, was: TrainingConfig, will_be: TrainingConfig, changed: Changed, state: TrainingState
) -> None:
    """Raise ConfigError for a setting that may be intended, but would silently make numbers jump or lose models.

    `changed` are the changed settings that validation scores depend on.
    """
    if found := list(jumps(run, was, will_be, changed, state)):
        keep = "the setting" if len(found) == 1 else "these settings"
        raise ConfigError(
            f"{'; '.join(found)}; keep {keep}, begin another --run with training.start_from, or add --insist"
        )


Changed = Mapping[str, tuple[object, object]]
"""Settings that have changed, each with its old and its new value."""


def changed_scoring(before: Values, now: Values) -> Changed:
    """Return the changed settings that validation scores depend on."""
    return {name: (before[name], now[name]) for name in sorted(SCORING) if before[name] != now[name]}


def jumps(
    run: Path, was: TrainingConfig, will_be: TrainingConfig, changed: Changed, state: TrainingState
) -> Iterator[str]:
    """Yield what would jump in a run that was saved with the settings `was`."""
    if was.precision != will_be.precision:
        yield (
            f"training.precision was {was.precision} and is {will_be.precision}: from step {state.step + 1:,} on, "
            "weights and losses would be rounded differently"
        )
    if was.validate_every != will_be.validate_every:
        changed_to = f"training.validate_every was {was.validate_every:,} and is {will_be.validate_every:,}"
        if was.patience and will_be.patience:
            yield (
                f"{changed_to}: training.patience {will_be.patience} counts validations, and would end the run after "
                "a different number of steps"
            )
        if SCHEDULES[will_be.schedule].by_validations:
            yield (
                f"{changed_to}: with training.schedule {will_be.schedule} validations reduce the learning rate, and "
                "would do so after a different number of steps"
            )
    asked = [(each.patience, each.steps, each.epochs) for each in (was, will_be)]
    if asked[0] != asked[1] and 0 < will_be.patience <= state.stale:
        yield (
            f"training.patience is {will_be.patience}, and the last {state.stale} validations were not better than "
            f"that of step {state.best_step:,}: the run would end without another step"
        )
    kept = len(kept_models(run))
    if 0 < will_be.keep_checkpoints < min(was.keep_checkpoints, kept):
        yield (
            f"training.keep_checkpoints was {was.keep_checkpoints} and is {will_be.keep_checkpoints}: the next "
            f"validation would remove {kept + 1 - will_be.keep_checkpoints} of the {kept} models in {run}/kept"
        )
    if not was.validate_bleu or not will_be.validate_bleu:
        return
    for name, (old, new) in changed.items():
        yield (
            f"{name} was {old} and is {new}: BLEU and chrF of later validations could not be compared with the earlier "
            "ones"
        )
