"""What a run keeps: models that can be used on their own, and the state from which training goes on.

`<run>/best` and `<run>/last` are folders that are replaced as a whole (see `durable`):

    config.yaml              every setting, resolved
    joint.model              the subwords, or source.model and target.model
    model.safetensors        the weights; a tied one is stored once
    model.json               the step, and what validation said of it
    training.safetensors     last only: the optimizer's moments and the random number generators
    training.json            last only: how far the run is

Tensors are safetensors, the rest is JSON, YAML and sentencepiece's own format: reading a checkpoint never runs
code from it.
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
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
) -> None:
    """Replace `folder` by one that holds, besides the model, all that training needs to go on."""
    with replaced_folder(folder) as new:
        _write_model(new, translator, facts)
        moments = moments_of(translator.model, optimizer)
        save_file({**moments, **random_states()}, new / "training.safetensors")
        _write_json(new / "training.json", asdict(state))


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


def load_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Put weights, moments and random states back, and say how far the run was."""
    whole = verified_folder(folder)
    fill_model(model, load_file(whole / "model.safetensors"), whole)
    kept = load_file(whole / "training.safetensors")
    fill_moments(model, optimizer, kept)
    restore_random_states(kept)
    return TrainingState(**json.loads((whole / "training.json").read_text(encoding="utf-8")))


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
def fill_model(model: nn.Module, saved: Mapping[str, Tensor], folder: Path) -> None:
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


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything the optimizer remembers, as `optimizer/<parameter>/<what>`."""
    return {
        f"optimizer/{name}/{what}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
    }


def fill_moments(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """The inverse of `moments_of`."""
    parameters = dict(model.named_parameters())
    for key, value in saved.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            name, _, what = rest.rpartition("/")
            optimizer.state[parameters[name]][what] = value.to(parameters[name].device)


def random_states() -> dict[str, Tensor]:
    """The state of every random number generator that dropout may draw from."""
    states = {"random/cpu": torch.get_rng_state()}
    for index in range(torch.cuda.device_count()):
        states[f"random/{index}"] = torch.cuda.get_rng_state(index)
    return states


def restore_random_states(saved: Mapping[str, Tensor]) -> None:
    """Put the generators back; those of devices this machine lacks are left out."""
    torch.set_rng_state(saved["random/cpu"])
    for index in range(torch.cuda.device_count()):
        if f"random/{index}" in saved:
            torch.cuda.set_rng_state(saved[f"random/{index}"], index)


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
