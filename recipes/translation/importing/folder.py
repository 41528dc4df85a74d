"""Folders written by transformers' `save_pretrained`: read with transformers, without running code from them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from recipes.translation.errors import CheckpointError

WEIGHTS = "model.safetensors"
OWN: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Nothing but the folder is read, and none of its code is run."""
ROOM = 2**26
"""The number of weights may exceed the files' bytes by this much without doing harm."""


@contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Within the block, raise CheckpointError for any error, and silence the remarks of transformers."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except CheckpointError:
        raise
    except BaseException as error:  # of many types, depending on what is damaged or missing
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, in tokenizers
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{what} in {folder} cannot be read ({reason[:300]}): all files of the model and its tokenizer are needed "
            "as they were published; see docs/import.md"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_config(folder: Path) -> Any:
    """Return what config.json says about the architecture."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give one with a model as transformers saves it")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: give a folder as transformers' save_pretrained writes it")
    with reading("config.json", folder):
        return AutoConfig.from_pretrained(folder, **OWN)


def check_room(folder: Path, config: Any) -> None:
    """Raise CheckpointError for pickled weights, or for sizes that need far more memory than there are weights."""
    there = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not there and (pickled := sorted(folder.glob("pytorch_model*.bin"))):
        raise CheckpointError(
            f"{pickled[0]} is pickled, and reading it could run any code: convert it to {WEIGHTS} first, where you "
            "trust it, by transformers' from_pretrained and save_pretrained"
        )
    layer = 4 * config.d_model + 2 * config.encoder_ffn_dim
    rows = config.vocab_size + config.max_position_embeddings + layer * (config.encoder_layers + config.decoder_layers)
    if config.d_model * rows > there + ROOM:
        raise CheckpointError(
            f"{folder}: according to config.json the model has {config.d_model * rows:,} weights or more, but the "
            f"safetensors files together have {there:,} bytes: a file is missing, or belongs to another model"
        )


def read_generation(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the generation settings that are set, and the name of their file: in older models, config.json."""
    name = "generation_config.json"
    if not (folder / name).is_file():
        name = "config.json"
    with reading(name, folder):
        if name == "config.json":
            settings, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
            found = GenerationConfig.from_model_config(settings)
        else:
            found = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return {name: value for name, value in found.to_dict().items() if value is not None}, name


def read_weights(folder: Path, config: Any) -> Any:
    """Return the model with its weights, in the weights' own dtype.

    Raises CheckpointError for weights that are missing, left over, of the wrong shape, nan or inf.
    """
    config.dtype = None  # it may be less precise than the weights
    # A different attention in config.json may be code from the Hub
    options = {"dtype": "auto", "attn_implementation": "eager", "use_safetensors": True, "output_loading_info": True}
    with reading("the weights", folder):
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            folder, config=config, ignore_mismatched_sizes=True, **options, **OWN
        )
    _check(model, report, folder)
    classes = config.architectures
    if isinstance(classes, list) and type(model).__name__ not in classes:
        raise CheckpointError(
            f"{folder}: the model is a {', '.join(map(str, classes))}, which does not translate: "
            f"{type(model).__name__} does"
        )
    return model


def _check(model: Any, report: dict[str, Any], folder: Path) -> None:
    for name in sorted(report["missing_keys"]):
        raise CheckpointError(f"{folder} has no weight {name}, which its config.json calls for")
    for name, there, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{folder}: {name} is {tuple(there)}, but according to config.json it should be {tuple(expected)}: one of "
            "the two files belongs to another model"
        )
    # Earlier versions of transformers saved M2M-100's tables of sines and cosines
    left = sorted(name for name in report["unexpected_keys"] if not name.endswith("embed_positions.weights"))
    if left:
        raise CheckpointError(
            f"{folder} has {left[0]}, which the model has no place for ({len(left)} such weights in all): it is not "
            "the architecture that its config.json names, or it has extra parts"
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # A bias may be -inf for a token that must never come
        if not bool((tensor < math.inf).all()):
            raise CheckpointError(
                f"{folder}: {name} has values that are nan or inf: download or convert the model again"
            )
    for side in ("encoder", "decoder"):
        positions = model.get_submodule(f"model.{side}.embed_positions")
        made = getattr(positions, "create_weight", None)  # for Marian's, which earlier versions saved
        if made and not torch.allclose(positions.weight, made().to(positions.weight), atol=1e-3):
            raise CheckpointError(
                f"{folder}: model.{side}.embed_positions.weight is not the table of sines and cosines of "
                f"{type(model).__name__}: download or convert the model again"
            )
