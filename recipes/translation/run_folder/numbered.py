"""The numbered folders of a run, and the pointers to them (see `atomic_folder`): `best`, `last` and `kept`.

    <run>/checkpoints/step-00000200     the model after step 200 (see `checkpoint`)
    <run>/checkpoints/state-00000200    the state that belongs to it; only for the newest model
    <run>/best, <run>/last              name the model of the best validation, and the newest one
    <run>/kept                          names the models of the last validations, to be averaged

A model is written once, whichever of these it is, and never changes afterwards. Its folders are whole before a pointer
names them, and are removed after the last pointer to them has moved: a process that is killed in between leaves extra
folders, which the next save removes. Whatever else is in `checkpoints` belongs to someone else and is left alone.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import (
    NUMBERED,
    check_itself,
    check_replaceable,
    named_folder,
    named_folders,
    pointer_to,
    remove_folder,
    whole_folder,
)
from recipes.translation.files.writing import check_regular, replace_files

POINTERS = ("last", "best", "kept")
"""Read and removed in this order, but written in reverse: a model is best, or kept, before a run can resume from it."""
NAME = re.compile(r"\.?(step|state)-(\d{8,20})(\.new|\.previous)?")
"""A numbered folder, and those that `atomic_folder` puts beside it while it is being replaced or removed."""


def numbered_root(run: Path) -> Path:
    """Return the folder of a run's numbered folders; raise OSError for a link, which could lead out of the run."""
    folder = run / NUMBERED
    check_regular(folder)
    return folder


def model_at(run: Path, step: int) -> Path:
    """Return the folder of the model after a step."""
    return numbered_root(run) / f"step-{step:08d}"


def state_of(model: Path) -> Path:
    """Return the folder of the state that belongs to a model's."""
    return model.with_name(model.name.replace("step-", "state-"))


def step_of(folder: Path) -> int:
    """Return the step in the name of a numbered folder."""
    return int(folder.name.partition("-")[2])


def numbered_folders(run: Path) -> list[Path]:
    """Return all numbered folders by kind and step, including those whose saving or removal was interrupted."""
    if not numbered_root(run).is_dir():
        return []
    names = (NAME.fullmatch(path.name) for path in numbered_root(run).iterdir())
    found = {(name[1], int(name[2])) for name in names if name}
    return [numbered_root(run) / f"{kind}-{step:08d}" for kind, step in sorted(found)]


def kept_models(run: Path) -> list[Path]:
    """Return the folders of the kept models that are complete, by step."""
    return [folder for folder in named_folders(run / "kept") if whole_folder(folder)]


def point_at(run: Path, step: int, *, better: bool, keep: int) -> None:
    """Make the pointers name the whole folders of a step, then remove folders that no pointer names any longer.

    `last` always names the model; `best` names it if it is `better` than the previous one; and `kept` includes it if
    `keep` models are to be kept. Models of later steps are no longer kept: a process saved them and was killed before
    it could save the state to resume from.
    """
    model = model_at(run, step)
    contents = {run / "last": [model]}
    if better:
        contents[run / "best"] = [model]
    kept = [folder for folder in kept_models(run) if step_of(folder) < step]
    if keep:
        kept = [*kept, model][-keep:]
    if kept or (run / "kept").exists():
        contents[run / "kept"] = kept
    # They are replaced in reverse order, `last` at the end
    replace_files({pointer: pointer_to(folders) for pointer, folders in contents.items()})
    remove_unnamed(run)


def remove_unnamed(run: Path) -> None:
    """Remove the numbered folders that no pointer names, except those that others have added files to."""
    models = [folder for name in POINTERS for folder in named_folders(run / name)]
    needed = {*models, *map(state_of, named_folders(run / "last"))}
    for folder in numbered_folders(run):
        if folder not in needed:
            with suppress(CheckpointError):  # it is not ours, or not only ours
                remove_folder(folder)


def check_ours(run: Path) -> None:
    """Raise CheckpointError if saving would replace a file or folder that was not made here."""
    for name in POINTERS:
        pointer = run / name
        check_itself(pointer)
        if pointer.exists() and not pointer.is_file():
            raise CheckpointError(
                f"{pointer} is not a file that names a model, as training writes it: it was imported, or saved "
                f"by a version before 0.1; choose another --run (--training.start_from {run} trains an imported model "
                "further), or move it away"
            )
    for name in ("last", "best"):
        named_folder(run / name)
    named_folders(run / "kept")
    if numbered_root(run).exists() and not numbered_root(run).is_dir():
        raise CheckpointError(f"{numbered_root(run)} is not a folder, and was not written by the recipe: move it away")
    for folder in numbered_folders(run):
        check_replaceable(folder)
