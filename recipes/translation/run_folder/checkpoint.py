"""Checkpoints: models that can be used on their own, and the states from which training resumes.

A model's folder, such as `<run>/averaged` or `<run>/checkpoints/step-00000200`:

    config.yaml          every setting, resolved
    joint.model          the subwords, or source.model and target.model
    model.safetensors    the weights; a tied one is stored once. With training.lora_rank LoRA's matrices are beside the
                         weights, and are added up when the model is read, except to train on
    model.json           the step, its validation, and the SHA-256 of the three above

The folder of the state that belongs to it, `<run>/checkpoints/state-00000200`:

    training.safetensors the optimizer's moments; with training.ema also the weights, of which model.safetensors has the
                         average
    training.json        the progress, and the SHA-256 of weights and moments

Weights and moments are whole, whatever the layout that trained them. A file's SHA-256 is taken once, while it is
written, and stands in the manifest of its folder (see `atomic_folder`), which proves that the bytes are those, and in
one of the two JSON files, which proves that they belong together: files of two runs, or of two steps of one run, are
refused. When the folder is read each file is hashed once, and the result compared with both. Tensors are safetensors,
the rest is JSON, YAML and sentencepiece's own format: reading a checkpoint never runs code from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.lora import has_lora, merged_tensors
from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import (
    listed_files,
    replaced_folder,
    sha256,
    undisturbed,
    verified_folder,
    whole_folder,
)
from recipes.translation.files.json_fields import Check, WrongFieldError, parsed
from recipes.translation.files.tensors import MIXED, OneByOne, described, read_tensors, renamed, write_tensors
from recipes.translation.run_folder.fields import FACTS, STATE
from recipes.translation.run_folder.numbered import state_of
from recipes.translation.run_folder.translator import (
    Translator,
    check_sizes,
    fill_model,
    model_on_meta,
    model_sizes,
    tensors_of,
)
from recipes.translation.settings.config import RunConfig, load_config, save_config
from recipes.translation.text.subwords import Subwords, subword_names


@dataclass
class TrainingState:
    """The progress of a run: the numbers from which, with weights and moments, it resumes."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch done."""
    tokens: int = 0
    """Target tokens trained on, without padding."""
    train_seconds: float = 0.0
    """Time spent in optimizer steps."""
    seconds: float = 0.0
    """The same, including validations and saving."""
    best_loss: float | None = None
    """Best validation loss so far."""
    best_score: float | None = None
    """That number of the best validation which `training.best_by` names, where it is not the loss."""
    best_step: int = 0
    stale: int = 0
    """Validations since the best one."""
    data: str = ""
    """Fingerprint of the training and validation data."""
    teacher: str = ""
    """Fingerprint of the weights that the run learns from; empty without a teacher."""


def save_model(folder: Path, translator: Translator, facts: Mapping[str, object]) -> None:
    """Replace `folder` by one with everything that translation needs."""
    write_model(folder, translator, tensors_of(translator.model), facts)


def write_model(
    folder: Path, model: Translator | SavedModel, weights: Mapping[str, Tensor], facts: Mapping[str, object]
) -> str:
    """Replace `folder` by one with these weights in place of the model's own; return their SHA-256."""
    of: dict[str, str] = {}
    with replaced_folder(folder, of) as new:
        save_belongings(new, model)
        of.update({path.name: sha256(path) for path in new.iterdir()})
        of[WEIGHTS_FILE] = write_tensors(new / WEIGHTS_FILE, weights)
        _write_json(new / "model.json", {**facts, "of": of})
    return of[WEIGHTS_FILE]


def write_state(folder: Path, weights: str, moments: Mapping[str, Tensor], state: TrainingState) -> None:
    """Replace `folder` by one with what training needs, besides the weights with this SHA-256, to resume."""
    of: dict[str, str] = {}
    with replaced_folder(folder, of) as new:
        of[MOMENTS_FILE] = write_tensors(new / MOMENTS_FILE, moments)
        _write_json(new / "training.json", {**asdict(state), "of": {WEIGHTS_FILE: weights, **of}})


WEIGHTS_FILE = "model.safetensors"
MOMENTS_FILE = "training.safetensors"


@dataclass(frozen=True)
class SavedTraining:
    """A checkpoint from which training resumes."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    state: TrainingState
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """The moving averages of the weights, with `training.ema`."""


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
    of = {WEIGHTS_FILE: digest, MOMENTS_FILE: listed_files(there).get(MOMENTS_FILE)}
    if record.pop("of", None) != of:
        raise CheckpointError(
            f"{there / 'training.json'} belongs to other weights or moments than those beside it; {MIXED}"
        )
    if record.keys() != {field.name for field in fields(TrainingState)}:
        raise CheckpointError(f"{there / 'training.json'} is not what this version writes; {MIXED}")
    _check(record, STATE, there / "training.json")
    state = TrainingState(**record)
    trained = renamed(moments, {name.removeprefix(TRAINED): name for name in moments if name.startswith(TRAINED)})
    if not trained:
        return SavedTraining(weights, moments, state)
    if _shapes_of(trained) != _shapes_of(weights):
        raise CheckpointError(f"{whole} has weights that do not fit their averages; {MIXED}")
    moments = renamed(moments, {name: name for name in moments if not name.startswith(TRAINED)})
    return SavedTraining(trained, moments, state, averages=weights)


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in described(tensors).items()}


TRAINED = "weights/"
"""What the names of weights begin with in `training.safetensors`."""


def _check(record: Mapping[str, Any], check: Check, path: Path) -> None:
    try:
        check(record, "")
    except WrongFieldError as error:
        raise CheckpointError(f"{path}: {error}; {MIXED}") from None


@dataclass(frozen=True)
class SavedModel:
    """A model in a verified folder, of which each weight is read when it is asked for."""

    folder: Path
    config: RunConfig
    source: Subwords
    target: Subwords
    weights: Mapping[str, Tensor]
    digest: str
    """The SHA-256 of the weights, as they were saved."""


def load_saved(folder: Path, overrides: Mapping[str, object] | None = None) -> SavedModel:
    """Open and verify the model in `folder`, without room for its weights; `overrides` are those of `load_config`."""

    def read() -> SavedModel:
        whole = verified_folder(folder)
        weights, digest = _merged_weights(whole)
        config, source, target = load_belongings(whole, overrides)
        check_sizes(model_sizes(config.model), source, target, weights, whole)
        return SavedModel(folder, config, source, target, weights, digest)

    return undisturbed(folder, read)


def load_translator(
    folder: Path, device: str | torch.device = "cpu", overrides: Mapping[str, object] | None = None
) -> Translator:
    """Read and verify the model in `folder`, in eval mode on `device`; `overrides` are those of `load_config`."""
    saved = load_saved(folder, overrides)
    model = model_on_meta(model_sizes(saved.config.model), saved.source, saved.target)
    fill_model(model, saved.weights, folder)
    return Translator(saved.config, model.to(device).eval(), saved.source, saved.target, digests=(saved.digest,))


def load_weights(folder: Path) -> Mapping[str, Tensor]:
    """Read and verify the weights of the model in `folder`, in the dtype in which they were saved."""
    weights, _ = undisturbed(folder, lambda: _merged_weights(verified_folder(folder)))
    return weights


def _merged_weights(folder: Path) -> tuple[Mapping[str, Tensor], str]:
    """Read the weights of a verified folder, to which LoRA's change is added, and the SHA-256 of what is saved."""
    weights, digest = _read_weights(folder)
    if has_lora(weights.described):
        try:
            weights = _merged(weights, load_config(folder / "config.yaml").training.lora_alpha)
        except (LookupError, ArithmeticError, ValueError, RuntimeError):
            raise CheckpointError(
                f"{folder / 'model.safetensors'} has matrices of LoRA that do not fit; {MIXED}"
            ) from None
    return weights, digest


def _merged(weights: OneByOne, alpha: float) -> OneByOne:
    """Return weights to which LoRA's change is added, each when it is asked for."""

    def merged(name: str) -> Tensor:
        outer, _, own = name.rpartition(".")
        needed = [name]
        if own == "weight" and f"{outer}.lora_A" in weights.described:
            needed += [f"{outer}.lora_A", f"{outer}.lora_B"]
        return merged_tensors({each: weights[each] for each in needed}, alpha)[name]

    return OneByOne(merged_tensors(weights.described, alpha), merged)


def load_facts(folder: Path) -> dict[str, Any]:
    """Read the facts that were saved with the model in `folder`: its step and its validation."""
    facts = undisturbed(folder, lambda: _read_json(verified_folder(folder, ["model.json"]) / "model.json"))
    facts.pop("of", None)
    _check(facts, FACTS, folder / "model.json")
    return facts


def saved_config(folder: Path) -> RunConfig | None:
    """Read the settings of a checkpoint; None if there is no checkpoint."""
    if whole_folder(folder) is None:
        return None
    return undisturbed(folder, lambda: load_config(verified_folder(folder, ["config.yaml"]) / "config.yaml"))


def check_moments(model: nn.Module, saved: SavedTraining, folder: Path) -> None:
    """Raise CheckpointError unless there are Adam's moments for every parameter of the whole model that is trained."""
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size([])}
        shapes |= {f"optimizer/{name}/{what}": shape for what, shape in own.items()}
    if saved.state.step == 0:  # stopped before the first step
        shapes = {}
    there = _shapes_of(saved.moments)
    for key in sorted(shapes.keys() | there.keys()):
        if key not in there:
            raise CheckpointError(f"{folder} does not fit the model its config.yaml describes: {key} is missing there")
        if there[key] != shapes.get(key):
            raise CheckpointError(
                f"{folder} does not fit the model its config.yaml describes: {key} is {tuple(there[key])} there"
            )


BELONGINGS = ("config.yaml", "joint.model", "source.model", "target.model")
"""What belongs to weights, whatever their format; of the three models it is either the first or the others."""


def save_belongings(folder: Path, model: Translator | SavedModel) -> None:
    """Write what belongs to a model's weights, whatever their format: the settings and the subword models."""
    save_config(model.config, folder / "config.yaml")
    for name, subwords in _subwords_of(model).items():
        subwords.save(folder / name)


def load_belongings(
    folder: Path, overrides: Mapping[str, object] | None = None
) -> tuple[RunConfig, Subwords, Subwords]:
    """Read the settings and the subword models of source and target that `save_belongings` wrote."""
    config = load_config(folder / "config.yaml", overrides)
    source, target = (Subwords.load(folder / f"{name}.model") for name in subword_names(config))
    return config, source, target


def _subwords_of(model: Translator | SavedModel) -> dict[str, Subwords]:
    """Return the subword models by file name; in memory, since those in the run's folder may have been replaced."""
    source, target = subword_names(model.config)
    return {f"{source}.model": model.source, f"{target}.model": model.target}


def _read_weights(folder: Path) -> tuple[OneByOne, str]:
    """Read the weights of a verified folder and their SHA-256.

    Settings, subwords and weights must be those that `model.json` lists.
    """
    of = _listed_in(folder)
    hashed = listed_files(folder)
    for name, digest in of.items():
        if name != WEIGHTS_FILE and hashed.get(name) != digest:
            raise CheckpointError(f"{folder / 'model.json'} belongs to another {name} than the one beside it; {MIXED}")
    weights = read_tensors(folder / WEIGHTS_FILE)
    for name, tensor in weights.items():
        # A sum is quick, and finite only of finite numbers; a bias may be -inf: a token that is never to come
        if not tensor.sum().isfinite() and not (tensor < math.inf).all():
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE}: {name} has values that are nan or inf, with which nothing can be "
                "translated: restore the folder from a copy, or train or import the model again"
            )
    if hashed.get(WEIGHTS_FILE) != of[WEIGHTS_FILE]:
        raise CheckpointError(f"{folder / 'model.json'} belongs to other weights than those beside it; {MIXED}")
    return weights, of[WEIGHTS_FILE]


def _listed_in(folder: Path) -> dict[str, str]:
    """Return the hashes in `model.json` by file name: of weights, settings and subwords."""
    if not (folder / "model.json").is_file():
        raise CheckpointError(
            f"{folder} has no model.json, so it was written for another program, or is damaged: name a run, a model of "
            "it, or a folder that export --to safetensors wrote; a folder of CTranslate2 needs --engine ctranslate2"
        )
    of = _read_json(folder / "model.json").get("of")
    if not isinstance(of, dict) or WEIGHTS_FILE not in of:
        raise CheckpointError(f"{folder / 'model.json'} is not what this version writes; {MIXED}")
    return of


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {MIXED}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not what this version writes; {MIXED}")
    return values
