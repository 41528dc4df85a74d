"""COMET and its kin: scores of a neural network that is on this disk (Rei et al. 2020, 2022).

The package `comet` (pip install unbabel-comet) is optional. Nothing is ever downloaded, and no code that a checkpoint
contains is run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from recipes.translation.errors import ConfigError

BATCH = 16
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def check_comet(path: Path) -> None:
    """Raise ConfigError unless the package is installed and `path` is a checkpoint or a folder that contains one."""
    if find_spec("comet") is None:
        raise ConfigError("--comet needs a package that is not installed: pip install unbabel-comet")
    _checkpoint(path)


def comet_scores(
    path: Path, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> list[float]:
    """Compute a COMET model's score of each sentence, times 100.

    The model is a file `model.ckpt`, or the folder of a model as the hub has it, with `checkpoints/model.ckpt`. Raises
    ConfigError where the model cannot be loaded without a download.
    """
    check_comet(path)
    model = _loaded(_checkpoint(path))
    data = [
        {"src": source, "mt": hypothesis, "ref": reference}
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True)
    ]
    found = model.predict(data, batch_size=BATCH, gpus=int(torch.cuda.is_available()), progress_bar=False)
    return [100 * float(score) for score in found.scores]


def _loaded(checkpoint: Path) -> Any:
    """Load the model without the network: the tokeniser of its encoder must be in the hub's cache on this machine."""
    # Both are read when the packages are imported
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    comet = importlib.import_module("comet")
    try:
        with _weights_only():
            return comet.load_from_checkpoint(str(checkpoint), local_files_only=True)
    except UnpicklingError as error:
        raise ConfigError(
            f"--comet: {checkpoint} is not loaded: it is not a checkpoint, or contains more than weights and plain "
            "settings, which could run any code: copy it again, or save it again in a program you trust, with its "
            "state_dict and hyper_parameters and nothing else"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"--comet: {checkpoint} cannot be loaded without the network: {reason}") from error


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let torch.load read only weights and plain settings, whatever the caller asks: a checkpoint is a pickle."""
    before = {name: os.environ.pop(name, None) for name in (FORCE, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")}
    os.environ[FORCE] = "1"
    try:
        yield
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, or the one in the folder `path`."""
    checkpoint = path
    if path.is_dir():
        checkpoint = path / "checkpoints" / "model.ckpt"
    if not checkpoint.is_file():
        raise ConfigError(
            f"--comet: there is no {checkpoint}: name the folder of a model on this disk, or its checkpoints/model.ckpt"
        )
    return checkpoint
