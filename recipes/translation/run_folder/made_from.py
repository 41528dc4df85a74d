"""The model and sentences that results and exports were made from, by SHA-256, since copying files changes times."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from recipes.translation.files.atomic_folder import MANIFEST, MODELS, whole_folder
from recipes.translation.files.json_fields import field_in, write_json
from recipes.translation.run_folder.checkpoint import WEIGHTS_FILE

NOTE = "made_from.json"
"""The file in an export that has the SHA-256 of the weights."""


def model_with(run: Path, digest: str) -> str:
    """Return the name of the run's model with these weights; empty if a later model has replaced it."""
    if not digest:
        return ""
    return next((name for name in MODELS if weights_digest(run / name) == digest), "")


def lines_digest(lines: Iterable[str]) -> str:
    """Return the SHA-256 of sentences: that of a text file with one per line."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def noted_digest(path: Path, *names: str | int) -> str:
    """Return the SHA-256 that a JSON file has at a path of nested keys; empty if it has none."""
    return str(field_in(path, *names) or "")


def origin_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights that an export was made from; empty if it does not note it."""
    return noted_digest(folder / NOTE, "weights")


def note_origin(folder: Path, digest: str) -> None:
    """Write the SHA-256 of the weights that a new export is made from into the export."""
    write_json(folder / NOTE, {"weights": digest})


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights of the model in a folder; empty if there is no readable model."""
    whole = whole_folder(folder)
    if whole is None:
        return ""
    return noted_digest(whole / MANIFEST, "files", WEIGHTS_FILE, "sha256")
