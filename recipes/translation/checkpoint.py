"""What a run keeps: models that can be used on their own, and the state from which training goes on.

`<run>/best` and `<run>/last` are folders that are replaced as a whole (see `durable`):

    config.yaml              every setting, resolved
    joint.model              the subwords, or source.model and target.model
    model.safetensors        the weights; a tied one is stored once
    model.json               the step, and what validation said of it
    training.safetensors     last only: the optimizer's moments
    training.json            last only: how far the run is

Weights and moments are whole, whatever the layout that trained them. Tensors are safetensors, the rest is JSON, YAML
and sentencepiece's own format: reading a checkpoint never runs code from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models import PRESETS, EncoderDecoder, TransformerConfig, make_transformer
from recipes.translation.config import ConfigError, ModelConfig, RunConfig, load_config, save_config
from recipes.translation.durable import CheckpointError, replaced_folder, verified_folder, whole_folder
from recipes.translation.subwords import PAD, Subwords


@dataclass(frozen=True)
class Translator:
    """A model with the subwords and settings that belong to it."""

    config: RunConfig
    model: EncoderDecoder
    source: Subwords
    target: Subwords


@dataclass
class TrainingState:
    """How far a run is: the numbers that, with weights, moments and random states, say how it goes on."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches of that epoch done."""
    tokens: int = 0
    """Target tokens trained on, padding left out."""
    train_seconds: float = 0.0
    """Time spent in optimizer steps."""
    seconds: float = 0.0
    """The same with validations and saving."""
    best_loss: float | None = None
    """Best validation loss so far."""
    best_step: int = 0
    stale: int = 0
    """Validations since the best one."""
    data: str = ""
    """Fingerprint of the training and validation data."""


def model_sizes(config: ModelConfig) -> TransformerConfig:
    """The preset, with the settings that are given in its place."""
    if config.preset not in PRESETS:
        raise ConfigError(f"model.preset is {config.preset!r}; it must be one of {', '.join(PRESETS)}")
    changed = {name: value for name, value in asdict(config).items() if name != "preset" and value is not None}
    try:
        return replace(PRESETS[config.preset], **changed)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def build_model(sizes: TransformerConfig, source: Subwords, target: Subwords) -> EncoderDecoder:
    """A model with fresh weights for these subwords."""
    try:
        return make_transformer(sizes, len(source), len(target), pad=PAD)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def save_model(folder: Path, translator: Translator, facts: Mapping[str, object]) -> None:
    """Replace `folder` by one that holds all that is needed to translate."""
    with replaced_folder(folder) as new:
        _write_model(new, translator, facts)


def save_training(
    folder: Path,
    translator: Translator,
    facts: Mapping[str, object],
    moments: Mapping[str, Tensor],
    state: TrainingState,
) -> None:
    """Replace `folder` by one that holds, besides the model, all that training needs to go on."""
    with replaced_folder(folder) as new:
        _write_model(new, translator, facts)
        save_file(dict(moments), new / "training.safetensors")
        _write_json(new / "training.json", asdict(state))


@dataclass(frozen=True)
class SavedTraining:
    """What a run goes on from."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    state: TrainingState


def load_training(folder: Path) -> SavedTraining:
    """What `save_training` wrote, verified."""
    whole = verified_folder(folder)
    return SavedTraining(
        load_file(whole / "model.safetensors"),
        load_file(whole / "training.safetensors"),
        TrainingState(**json.loads((whole / "training.json").read_text(encoding="utf-8"))),
    )


def load_translator(
    folder: Path, device: str | torch.device = "cpu", overrides: Mapping[str, Any] | None = None
) -> Translator:
    """The model in `folder`, verified, in eval mode on `device`; `overrides` as for `load_config`."""
    whole = verified_folder(folder)
    config = load_config(whole / "config.yaml", overrides)
    source, target = (Subwords.load(whole / f"{name}.model") for name in subword_names(config))
    model = build_model(model_sizes(config.model), source, target)
    fill_model(model, load_file(whole / "model.safetensors"), whole)
    return Translator(config, model.to(device).eval(), source, target)


def load_facts(folder: Path) -> dict[str, Any]:
    """What was noted about the model in `folder` when it was saved: its step, what validation said."""
    facts: dict[str, Any] = json.loads((verified_folder(folder) / "model.json").read_text(encoding="utf-8"))
    return facts


def saved_config(folder: Path) -> RunConfig | None:
    """The settings a checkpoint was made with; None where there is no checkpoint."""
    whole = whole_folder(folder)
    return None if whole is None else load_config(verified_folder(folder) / "config.yaml")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, a tensor that is tied under several names only under the first."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


@torch.no_grad()
def fill_model(model: nn.Module, saved: Mapping[str, Tensor], folder: Path | str) -> None:
    """Copy saved tensors into a model of the same shape."""
    own = tensors_of(model)
    for name in sorted(own.keys() ^ saved.keys()):
        where = "the model has no such tensor" if name in saved else "it is missing there"
        raise CheckpointError(f"{folder} does not fit the model its config.yaml describes: {name}: {where}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointError(
                f"{folder} does not fit the model its config.yaml describes: {name} is {tuple(saved[name].shape)} "
                f"there and {tuple(tensor.shape)} here"
            )
        tensor.copy_(saved[name])


def subword_names(config: RunConfig) -> tuple[str, str]:
    """What the subword models of source and target are called."""
    return ("joint", "joint") if config.subwords.joint else ("source", "target")


def _write_model(folder: Path, translator: Translator, facts: Mapping[str, object]) -> None:
    save_config(translator.config, folder / "config.yaml")
    made = verified_folder(Path(translator.config.run) / "subwords")
    for name in set(subword_names(translator.config)):
        shutil.copyfile(made / f"{name}.model", folder / f"{name}.model")
    save_file(tensors_of(translator.model), folder / "model.safetensors")
    _write_json(folder / "model.json", facts)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
