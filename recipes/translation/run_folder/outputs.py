"""Files and folders that a user names for results: they must not be what a run keeps in its folder, or an input.

A run's own files and folders are recognised by their names in a folder that is a run; the files of a model, an export
or subwords by the manifest of their folder, wherever that is.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from recipes.translation.errors import ConfigError
from recipes.translation.files.atomic_folder import MANIFEST, MODELS, NUMBERED, whole_folder
from recipes.translation.files.json_fields import field_in
from recipes.translation.files.writing import by_name, replace_file, writing_to

RECORDS = ("metrics.jsonl", "resources.jsonl")
"""Files that mark a folder as a run, besides its models and subwords."""
WHOLE = (*MODELS, "subwords")
"""Folders that are replaced as a whole; what others put into them does not belong to the run."""
OWN = (
    *(*RECORDS, "samples.jsonl", "validation.json", "report.html", "train.log", "trackers.json", ".lock", *WHOLE),
    *("*.scores.json", "*.translations.txt", "*.odd.txt"),
    *("kept", NUMBERED, f"{NUMBERED}/step-*", f"{NUMBERED}/state-*"),
    *("translations", "translations/*.source.txt", "translations/*.target.txt", "translations/*.json"),
)
"""The files and folders of a run."""
TRACKED = ("tensorboard", "wandb")
"""Folders whose entire contents, at any depth, belong to the run."""


def check_output(output: Path, option: str, *, own: Path | None = None, reads: Collection[str | None] = ()) -> None:
    """Raise ConfigError for an output that would replace a run's file or folder, or an input.

    Args:
        output: the file or folder that the user has named.
        option: the option that names it.
        own: what the command itself writes in a run's folder, and may overwrite.
        reads: the files and folders that the command reads.
    """
    inside = output.resolve()
    if any(name and Path(name).resolve() == inside for name in reads):
        raise ConfigError(f"{option}: {output} is an input, and would be replaced: choose another name")
    if own is not None and inside == own.resolve():
        return
    if owner := owner_of(inside):
        raise ConfigError(f"{option}: {output} belongs to {owner}, and would be replaced: choose another name")


def check_output_file(
    output: Path, option: str, *, own: Path | None = None, reads: Collection[str | None] = ()
) -> None:
    """Do the same as `check_output` for a file, before the work of making it; its folder must exist."""
    check_output(output, option, own=own, reads=reads)
    if output.is_dir():
        raise ConfigError(f"{option}: {output} is a folder: name a file")
    if not output.parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {output.parent} for {output.name}: make it first")


def check_run(run: Path) -> None:
    """Raise ConfigError for a run that is not a folder, or that would be written into a model or part of a run."""
    there = next(path for path in (run, *run.parents) if path.is_symlink() or path.exists())
    if not there.is_dir():
        what = "a link to a folder that is missing" if there.is_symlink() else "not a folder"
        raise ConfigError(f"--run: {there} is {what}: name another folder for the run, or move it away")
    if whole_folder(run):
        raise ConfigError(f"--run: {run} is the folder of a model: name the folder of a run, such as the one around it")
    if owner := owner_of(run.resolve()):
        raise ConfigError(f"--run: {run} belongs to {owner}: name the folder of a run")


def write_output(output: Path, content: bytes) -> None:
    """Write a file in place of an earlier one, which stays if writing fails; a device or a pipe is written to.

    A link is followed if it is the user's own, and replaced by the file if it is in a run.
    """
    if not any(map(is_run, by_name(output.absolute()).parents)):
        if output.exists() and not output.is_file():
            with writing_to(output):
                output.write_bytes(content)
            return
        if output.is_symlink():
            output = output.resolve()
    replace_file(output, content)


def owner_of(inside: Path) -> Path | None:
    """Return the run, or the folder with a manifest, that a resolved path is part of; None if there is none."""
    if inside.name in (MANIFEST, *(field_in(inside.parent / MANIFEST, "files") or ())):
        return whole_folder(inside.parent)
    for folder in inside.parents:
        path = inside.relative_to(folder)
        own = any(path.match(pattern) and len(path.parts) == len(Path(pattern).parts) for pattern in OWN)
        if (own or path.parts[0] in TRACKED) and is_run(folder):
            return folder
    return None


def results_folder(named: Path) -> Path:
    """Return the folder for results of what is named: the run's folder, even if one of the run's models is named.

    A file in a model's folder would keep training from removing the model.
    """
    if whole_folder(named) is None:
        return named
    return owner_of(named.resolve()) or named


def is_run(folder: Path) -> bool:
    """Return whether a folder has the records, a model or the subwords of a run."""
    whole = (*(folder / name for name in WHOLE), *(folder / NUMBERED).glob("step-*"))
    return any((folder / name).is_file() for name in RECORDS) or any(map(whole_folder, whole))
