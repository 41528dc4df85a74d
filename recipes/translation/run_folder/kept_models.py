"""The models of a run's last validations: `<run>/checkpoints/step-00000200`, one folder for each step.

They are model folders like `<run>/best` (see `checkpoint`), kept to be averaged. Whatever else is in `checkpoints`
belongs to someone else and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import check_replaceable, remove_folder, whole_folder
from recipes.translation.files.writing import check_no_link
from recipes.translation.run_folder.checkpoint import Translator, save_model

NAME = re.compile(r"\.?step-(\d{8,})(\.new|\.previous)?")
"""The folder of a step, and those that `atomic_folder` puts beside it while it is replaced or removed."""


def kept_in(run: Path) -> Path:
    """Return the folder of a run's kept models; raise OSError for a link, which could lead out of the run."""
    folder = run / "checkpoints"
    check_no_link(folder)
    return folder


def keep_model(run: Path, translator: Translator, facts: Mapping[str, object], step: int, most: int) -> None:
    """Add the model of `step` to those of `run`, then remove all of earlier steps but the last `most`.

    Models of later steps are removed, too: a process saved them and was killed before it could save the state to resume
    from. A folder to which others have added files is left as it is.
    """
    save_model(_folder(run, step), translator, facts)
    up_to_now = [_folder(run, number) for number in _steps_in(run) if number <= step]
    last = [folder for folder in up_to_now if whole_folder(folder)][-most:]
    for folder in kept_folders(run):
        if folder not in last:
            with suppress(CheckpointError):  # it is not ours, or not ours alone
                remove_folder(folder)


def kept_models(run: Path) -> list[Path]:
    """Return the folders of the complete models that `keep_model` has kept, in the order of their steps."""
    return [folder for folder in kept_folders(run) if whole_folder(folder)]


def kept_folders(run: Path) -> list[Path]:
    """Return the folders of all kept models, also of those whose saving or removal was interrupted, by step."""
    return [_folder(run, step) for step in _steps_in(run)]


def check_keepable(run: Path) -> None:
    """Raise CheckpointError if `keep_model` would replace a folder that it did not make."""
    if kept_in(run).exists() and not kept_in(run).is_dir():
        raise CheckpointError(f"{kept_in(run)} is not a folder, and was not made here: move it away")
    for folder in kept_folders(run):
        check_replaceable(folder)


def _folder(run: Path, step: int) -> Path:
    return kept_in(run) / f"step-{step:08d}"


def _steps_in(run: Path) -> list[int]:
    """Return the steps in the names of the folders, each of them once."""
    if not kept_in(run).is_dir():
        return []
    names = (NAME.fullmatch(path.name) for path in kept_in(run).iterdir())
    return sorted({int(name[1]) for name in names if name})
