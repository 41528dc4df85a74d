"""The model that a run learns from, by `training.teacher`: a run's best model, or a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from recipes.translation.data.prepare import SHAPING
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.atomic_folder import model_folder, verified_folder
from recipes.translation.run_folder.checkpoint import (
    BELONGINGS,
    SavedModel,
    TrainingState,
    load_belongings,
    load_saved,
    saved_config,
)
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import Subwords


def other_model(setting: str, name: str) -> tuple[Path, RunConfig]:
    """Return the folder and the settings of the model that a setting names; raise CheckpointError if there is none.

    It is named by its own folder, or by a run, whose `best` it is.
    """
    folder = model_folder(name)
    config = saved_config(folder)
    if config is None:
        raise CheckpointError(
            f"{setting} is {name}, but there is no trained model in {folder}: name the folder of a run, or of one of "
            "its checkpoints"
        )
    return folder, config


def teacher_folder(name: str) -> Path:
    """Return the folder of the model that `training.teacher` names; raises as `other_model` does."""
    return other_model("training.teacher", name)[0]


def teacher_subwords(config: RunConfig) -> tuple[Subwords, Subwords]:
    """Return the subwords of the teacher; raise ConfigError if the settings ask for others."""
    folder, theirs = other_model("training.teacher", config.training.teacher)
    for name in SHAPING:
        own = getattr(config.subwords, name)
        other = getattr(theirs.subwords, name)
        if own != other:
            raise ConfigError(
                f"subwords.{name} is {own!r}, but the teacher {folder} has {other!r}, and a student has its teacher's "
                "subwords: set it to the same"
            )
    _, source, target = load_belongings(verified_folder(folder, BELONGINGS))
    return source, target


def load_teacher(config: RunConfig, source: Subwords, target: Subwords) -> SavedModel:
    """Open the model to learn from.

    Raises CheckpointError if it is missing or damaged, and ConfigError unless its subwords are `source` and `target`.
    """
    saved = load_saved(teacher_folder(config.training.teacher))
    if saved.config.data.language_tags != config.data.language_tags:
        raise ConfigError(
            f"data.language_tags is {config.data.language_tags}, and {saved.config.data.language_tags} of the teacher "
            f"{saved.folder}, which would read sentences that it was not trained on: set it to the same, or learn only "
            "from its translations, with training.teacher_weight 0"
        )
    for side, own, other in (("source", source, saved.source), ("target", target, saved.target)):
        if own.digest != other.digest:
            raise ConfigError(
                f"training.teacher {saved.folder} has other {side} subwords than this run ({len(other):,} and "
                f"{len(own):,}), and predictions of other subwords cannot be compared: choose a teacher with the same "
                "ones, or begin a new run without training.start_from, which takes the teacher's"
            )
    return saved


def check_same_teacher(teacher: SavedModel | None, state: TrainingState, run: Path) -> None:
    """Raise ConfigError if a run that has begun learnt from another model."""
    digest = ""
    if teacher is not None:
        digest = teacher.digest
    if digest == state.teacher:
        return
    what = "another model"
    if not state.teacher:
        what = "none"
    elif teacher is None:
        what = "one"
    here = "none"
    if teacher is not None:
        here = str(teacher.folder)
    raise ConfigError(
        f"training.teacher is {here}, but {run} has learnt from {what}, by the SHA-256 of its weights: restore the "
        "teacher, choose another --run, or start over with --fresh"
    )
