"""The start of a run whose weights or subwords are another run's, by `training.start_from` or `training.teacher`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from models import RecurrentConfig
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.prepare import SHAPING, prepare
from recipes.translation.errors import ConfigError
from recipes.translation.files.atomic_folder import verified_folder, whole_folder
from recipes.translation.files.tensors import OneByOne, renamed
from recipes.translation.run_folder.checkpoint import BELONGINGS, load_belongings, load_weights
from recipes.translation.run_folder.teacher import other_model, teacher_subwords
from recipes.translation.run_folder.translator import check_layers, model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import Subwords


def starting_weights(config: RunConfig) -> Mapping[str, Tensor] | None:
    """Return the weights of the model that a new run starts from; None if it starts from random ones."""
    if not config.training.start_from:
        return None
    folder, theirs = fitting_start(config)
    weights = load_weights(folder)
    check_layers(model_sizes(theirs.model), weights, folder)
    own_layers = _layers(config)
    for stack, layers in _layers(theirs).items():
        weights = spaced_layers(weights, stack, layers, own_layers[stack])
    return weights


def spaced_layers(weights: Mapping[str, Tensor], stack: str, layers: int, kept: int) -> OneByOne:
    """Return the weights of a model with `kept` of the `layers` layers of `stack`, "encoder" or "decoder".

    They are as far apart as can be, the first and the last one among them; of a single one, it is the first (Shleifer
    and Rush 2020, "shrink and fine-tune", where a model that was shrunk in this way is the start of a student).
    """
    spaced = [round(place * (layers - 1) / max(kept - 1, 1)) for place in range(kept)]
    new = {f"{stack}.layers.{old}": f"{stack}.layers.{place}" for place, old in enumerate(spaced)}
    old_names = {}
    for name in weights:
        *layer, rest = name.split(".", maxsplit=3)
        if not name.startswith(f"{stack}.layers."):
            old_names[name] = name
        elif ".".join(layer) in new:
            old_names[f"{new['.'.join(layer)]}.{rest}"] = name
    return renamed(weights, old_names)


def run_subwords(corpora: Corpora, *, fresh: bool = False) -> tuple[Subwords, Subwords]:
    """Return the subwords of a run: its own, or those of the model that it started from, or else of its teacher.

    With `fresh` the run begins anew, and what is in its folder belongs to an earlier one.
    """
    config = corpora.config
    settings = config.training
    if not settings.start_from and not settings.teacher:
        return prepare(corpora)
    folder = None
    if not fresh:  # a run that has begun needs the other one no longer, which may have changed since
        folder = whole_folder(Path(config.run) / "last")
    if folder is None and not settings.start_from:
        return teacher_subwords(config)
    _, source, target = load_belongings(verified_folder(folder or fitting_start(config)[0], BELONGINGS))
    return source, target


def fitting_start(config: RunConfig) -> tuple[Path, RunConfig]:
    """Return the folder and the settings of the model to start from, if the settings of the run fit it.

    A Transformer with fewer layers fits (see `spaced_layers`). Raises CheckpointError if there is no model, and
    ConfigError, naming the setting, if its subwords or other sizes differ.
    """
    folder, theirs = other_model("training.start_from", config.training.start_from)
    given = sizes_and_subwords(config)
    needed = sizes_and_subwords(theirs)
    layers = _layers(theirs)
    fewer = {f"model.{stack}_layers" for stack, own in _layers(config).items() if own < layers.get(stack, 0)}
    for name in [*needed, *given]:  # an LSTM has other sizes than a Transformer
        own = given.get(name)
        other = needed.get(name)
        if own != other and name not in fewer:
            raise ConfigError(
                f"{name} is {own!r}, but {folder}, to start from, has {other!r}: set it to the same, or begin with all "
                f"its settings by --config {folder / 'config.yaml'}"
            )
    return folder, theirs


def _layers(config: RunConfig) -> dict[str, int]:
    """Return the number of layers of each stack that a model can begin with some of; an LSTM has none."""
    sizes = model_sizes(config.model)
    if isinstance(sizes, RecurrentConfig):
        return {}
    names = {"encoder": "encoder_layers", "decoder": "decoder_layers"}
    return {stack: getattr(sizes, name) for stack, name in names.items() if hasattr(sizes, name)}


def sizes_and_subwords(config: RunConfig) -> dict[str, object]:
    """Return the settings without which weights mean nothing: those of the subwords, and all sizes of the model."""
    sizes = asdict(model_sizes(config.model))
    del sizes["dropout"]
    subwords = {f"subwords.{name}": getattr(config.subwords, name) for name in SHAPING}
    return {**subwords, **{f"model.{name}": value for name, value in sizes.items()}}
