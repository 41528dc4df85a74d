"""Checkpoints: models that can be used on their own, and the states that training resumes from.

A model's folder, such as `<run>/averaged` or `<run>/checkpoints/step-00000200`:

    config.yaml          every setting, resolved
    joint.model          the subwords, or source.model and target.model
    model.safetensors    the weights; a tied one is stored once. With training.lora_rank LoRA's matrices are stored
                         separately, and are merged when the model is read, except to resume training
    model.json           the step and its validation

The folder of the state that belongs to it, `<run>/checkpoints/state-00000200`:

    training.safetensors the optimizer's moments; with training.ema also the weights, since model.safetensors has their
                         average
    training.json        the progress, and the SHA-256 of the weights

Weights and moments are whole, whatever layout trained them. The SHA-256 of each file is in its folder's manifest (see
`atomic_folder`), which proves that the files were written together; that of weights and moments is computed while they
are written. Tensors are in safetensors, the rest in JSON, YAML and sentencepiece's own format: reading a checkpoint
never runs code from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.lora import has_lora, merged_tensors
from recipes.translation.data.corpus import check_length, most_subwords
from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import (
    listed_files,
    read_consistently,
    replaced_folder,
    verified_folder,
)
from recipes.translation.files.json_fields import OBJECT, read_json, write_json
from recipes.translation.files.tensors import MIXED, OneByOne, read_tensors, rename, write_tensors
from recipes.translation.run_folder.numbered import state_of
from recipes.translation.run_folder.translator import (
    Translator,
    check_fits,
    check_layers,
    fill_model,
    model_on_meta,
    model_sizes,
    tensors_of,
)
from recipes.translation.settings.config import RunConfig, load_config, save_config
from recipes.translation.text.subwords import BOS, PAD, Subwords


@dataclass
class TrainingState:
    """The progress of a run: the numbers that it resumes from, together with weights and moments."""

    step: int = 0
    """Number of optimizer steps done."""
    epoch: int = 0
    batch: int = 0
    """Number of batches of this epoch done."""
    tokens: int = 0
    """Number of target tokens trained on, without padding."""
    train_seconds: float = 0.0
    """Time spent in optimizer steps."""
    seconds: float = 0.0
    """The same, including validations and saving."""
    best_loss: float | None = None
    """Best validation loss so far."""
    best_score: float | None = None
    """The best validation's value of the metric that `training.best_by` names, if that is not the loss."""
    best_step: int = 0
    stale: int = 0
    """Number of validations since the best one."""
    reductions: int = 0
    """How often validations have reduced the learning rate, with `training.schedule` plateau."""
    loss_scale: float = 65_536.0
    """What the loss is multiplied by before backward, with `training.precision` fp16."""
    steps_of_scale: int = 0
    """Number of steps since this scale was set, none of which overflowed."""
    skipped: int = 0
    """Number of steps without an update because their gradient overflowed."""
    data: str = ""
    """Fingerprint of the training and validation data."""
    teacher: str = ""
    """Fingerprint of the weights that the run learns from; empty without a teacher."""


def save_model(folder: Path, translator: Translator, facts: Mapping[str, object]) -> None:
    """Replace `folder` with one that has everything that translation needs."""
    write_model(folder, translator, tensors_of(translator.model), facts)


def write_model(
    folder: Path, model: Translator | SavedModel, weights: Mapping[str, Tensor], facts: Mapping[str, object]
) -> str:
    """Replace `folder` with one that has these weights in place of the model's own; return their SHA-256."""
    digests: dict[str, str] = {}
    with replaced_folder(folder, digests) as new:
        save_belongings(new, model)
        digests[WEIGHTS_FILE] = write_tensors(new / WEIGHTS_FILE, weights)
        write_json(new / "model.json", facts)
    return digests[WEIGHTS_FILE]


def write_state(folder: Path, weights: str, moments: Mapping[str, Tensor], state: TrainingState) -> None:
    """Replace `folder` with one that has what training needs to resume, besides the weights with this SHA-256."""
    digests: dict[str, str] = {}
    with replaced_folder(folder, digests) as new:
        digests[MOMENTS_FILE] = write_tensors(new / MOMENTS_FILE, moments)
        write_json(new / "training.json", {**asdict(state), "of": {WEIGHTS_FILE: weights}})


WEIGHTS_FILE = "model.safetensors"
MOMENTS_FILE = "training.safetensors"


@dataclass(frozen=True)
class SavedTraining:
    """A checkpoint that training resumes from."""

    config: RunConfig
    facts: Mapping[str, Any]
    """Those of the model: its step and its validation."""
    state: TrainingState
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    averages: Mapping[str, Tensor]
    """The moving averages of the weights, with `training.ema`; otherwise empty."""


def load_training(folder: Path) -> SavedTraining:
    """Read and verify a model and the state that belongs to it."""
    whole = verified_folder(folder)
    weights, digest = _read_weights(whole)
    there = state_of(whole)
    if not there.exists():
        raise CheckpointError(
            f"{there}, the state that belongs to {folder}, is missing: restore it from a copy, choose another --run, "
            "or start over with --fresh"
        )
    verified_folder(there)
    record = _read_json(there / "training.json")
    moments = read_tensors(there / MOMENTS_FILE)
    of = record.pop("of", None)
    if not isinstance(of, dict) or of.get(WEIGHTS_FILE) != digest:
        raise CheckpointError(f"{there / 'training.json'} does not belong to the weights in {whole}; {MIXED}")
    if record.keys() != {field.name for field in fields_of(TrainingState)}:
        raise CheckpointError(f"{there / 'training.json'} does not have the fields that this version writes; {MIXED}")
    saved = SavedTraining(
        load_config(whole / "config.yaml"), _facts_in(whole), TrainingState(**record), weights, moments, averages={}
    )
    trained = rename(moments, {name.removeprefix(TRAINED): name for name in moments if name.startswith(TRAINED)})
    if not trained:
        return saved
    moments = rename(moments, {name: name for name in moments if not name.startswith(TRAINED)})
    return replace(saved, weights=trained, moments=moments, averages=weights)


TRAINED = "weights/"
"""The prefix of weights' names in `training.safetensors`."""


@dataclass(frozen=True)
class SavedModel:
    """A model in a verified folder, whose weights are each read when asked for."""

    folder: Path
    config: RunConfig
    source: Subwords
    target: Subwords
    weights: Mapping[str, Tensor]
    digest: str
    """The SHA-256 of the weights, as they were saved."""


def load_saved(folder: Path, overrides: Mapping[str, object] | None = None) -> SavedModel:
    """Open and verify the model in `folder`, without memory for its weights; `overrides` are as in `load_config`."""

    def read() -> SavedModel:
        whole = verified_folder(folder)
        weights, digest = _read_weights(whole)
        config, source, target = load_belongings(whole, overrides)
        if overrides:
            most = most_subwords(model_sizes(config.model), source.symbols)
            check_length("decoding.max_length", config.decoding.max_length, most)
        if has_lora(weights.described):
            weights = _merge_lora(weights, config.training.lora_alpha)
        check_layers(model_sizes(config.model), weights, whole)
        check_fits(tensors_of(model_on_meta(model_sizes(config.model), source, target)), weights, whole)
        return SavedModel(folder, config, source, target, weights, digest)

    return read_consistently(folder, read)


def load_translator(
    folder: Path, device: str | torch.device = "cpu", overrides: Mapping[str, object] | None = None
) -> Translator:
    """Read and verify the model in `folder`, in eval mode on `device`; `overrides` are as in `load_config`."""
    saved = load_saved(folder, overrides)
    model = model_on_meta(model_sizes(saved.config.model), saved.source, saved.target)
    fill_model(model, saved.weights, folder)
    return Translator(saved.config, model.to(device).eval(), saved.source, saved.target, digests=(saved.digest,))


def _merge_lora(weights: OneByOne, alpha: float) -> OneByOne:
    """Return the weights with LoRA's change added, each computed when it is asked for."""

    def merged_weight(name: str) -> Tensor:
        outer, _, own = name.rpartition(".")
        needed = [name]
        if own == "weight" and f"{outer}.lora_A" in weights.described:
            needed += [f"{outer}.lora_A", f"{outer}.lora_B"]
        return merged_tensors({each: weights[each] for each in needed}, alpha)[name]

    return OneByOne(merged_tensors(weights.described, alpha), merged_weight)


def load_facts(folder: Path) -> dict[str, Any]:
    """Read the facts that were saved with the model in `folder`: its step and its validation."""
    return read_consistently(folder, lambda: _facts_in(verified_folder(folder, ["model.json"])))


def _facts_in(whole: Path) -> dict[str, Any]:
    facts = _read_json(whole / "model.json")
    facts.pop("of", None)  # the hashes of the other files, which earlier versions wrote
    return facts


def saved_config(folder: Path) -> RunConfig:
    """Read the settings of a checkpoint; raise CheckpointError if there is none."""
    return read_consistently(folder, lambda: load_config(verified_folder(folder, ["config.yaml"]) / "config.yaml"))


BELONGINGS = ("config.yaml", "joint.model", "source.model", "target.model")
"""What belongs to weights, whatever their format; of the subword models there is either the first or the other two."""


def save_belongings(folder: Path, model: Translator | SavedModel) -> None:
    """Write what belongs to a model's weights, whatever their format: the settings and the subword models.

    The subword models are written from memory, since the files in the run's folder may have been replaced.
    """
    save_config(model.config, folder / "config.yaml")
    for name, subwords in dict(zip(saved_names(model), (model.source, model.target), strict=True)).items():
        subwords.save(folder / f"{name}.model")


def saved_names(model: Translator | SavedModel) -> tuple[str, str]:
    """Return the names under which the subword models are saved: one file if they are the same.

    The settings do not tell: a run may have the subwords of another model, with that one's normalisation rules.
    """
    same = model.source.model_bytes() == model.target.model_bytes()
    return ("joint", "joint") if same else ("source", "target")


def load_belongings(
    folder: Path, overrides: Mapping[str, object] | None = None
) -> tuple[RunConfig, Subwords, Subwords]:
    """Read the settings and the subword models of source and target that `save_belongings` wrote."""
    config = load_config(folder / "config.yaml", overrides)
    names = ("joint", "joint") if (folder / "joint.model").is_file() else ("source", "target")
    source, target = (Subwords.load(folder / f"{name}.model") for name in names)
    return config, source, target


def _read_weights(folder: Path) -> tuple[OneByOne, str]:
    """Read the weights in a verified folder and their SHA-256."""
    if not (folder / "model.json").is_file():
        raise CheckpointError(
            f"{folder} has no model.json, so it was written for another program, or is damaged: name a run, one of its "
            "models, or a folder that export --to safetensors wrote; a CTranslate2 folder needs --engine ctranslate2"
        )
    weights = read_tensors(folder / WEIGHTS_FILE)
    for name, tensor in weights.items():
        if not usable(name, tensor):
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE}: {name} has values that are nan or inf, so the model cannot translate: "
                "restore the folder from a copy, or train or import the model again"
            )
    return weights, listed_files(folder)[WEIGHTS_FILE]


def usable(name: str, weight: Tensor) -> bool:
    """Return whether a weight's numbers are finite; the output bias may be -inf for tokens that must never come."""
    if weight.sum().isfinite():  # the quick check
        return True
    if name != OUTPUT_BIAS:
        return bool(weight.isfinite().all())
    others = [each for each in range(len(weight)) if each not in (PAD, BOS)]  # no search chooses these two
    return bool((weight < math.inf).all() and weight[others].isfinite().any())


OUTPUT_BIAS = "generator.bias"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = read_json(path, OBJECT)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {MIXED}") from error
    return values
