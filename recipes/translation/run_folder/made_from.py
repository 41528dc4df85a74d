"""From which model and sentences results and exports were made, by their SHA-256: copying files changes their times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from recipes.translation.files.atomic_folder import MANIFEST, MODELS, whole_folder
from recipes.translation.files.json_fields import field_in
from recipes.translation.run_folder.checkpoint import WEIGHTS_FILE

NOTE = "made_from.json"
"""The file of an export with the SHA-256 of the weights."""


def model_with(run: Path, digest: str) -> str:
    """Return the name of the run's model with these weights; empty if a later model has replaced it."""
    if not digest:
        return ""
    return next((name for name in MODELS if weights_digest(run / name) == digest), "")


def lines_digest(lines: Iterable[str]) -> str:
    """Return the SHA-256 of sentences: that of a text file with one a line."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def noted_digest(path: Path, *names: str | int) -> str:
    """Return a SHA-256 that a JSON file notes, by its name and those around it; empty if it does not."""
    return str(field_in(path, *names) or "")


def origin_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights from which an export was made; empty if it does not say so."""
    return noted_digest(folder / NOTE, "weights")


def note_origin(folder: Path, digest: str) -> None:
    """Write into a new export the SHA-256 of the weights from which it is made."""
    (folder / NOTE).write_text(json.dumps({"weights": digest}, indent=2) + "\n", encoding="utf-8")


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights of the model in a folder; empty without a readable one."""
    whole = whole_folder(folder)
    if whole is None:
        return ""
    return noted_digest(whole / MANIFEST, "files", WEIGHTS_FILE, "sha256")
