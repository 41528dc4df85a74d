"""The model of another run that a run starts from (`training.start_from`) or learns from (`training.teacher`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from recipes.translation.data.corpora import Corpora
from recipes.translation.data.prepare import SHAPING, prepare
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.atomic_folder import model_folder, verified_folder, whole_folder
from recipes.translation.files.tensors import OneByOne, rename
from recipes.translation.run_folder.checkpoint import (
    BELONGINGS,
    SavedModel,
    TrainingState,
    load_belongings,
    load_facts,
    load_saved,
    saved_config,
)
from recipes.translation.run_folder.translator import model_sizes
from recipes.translation.settings.config import ModelConfig, RunConfig, SubwordConfig
from recipes.translation.text.subwords import Subwords, normalizations

OF_SUBWORDS = (*SHAPING, "model")
"""The subword settings that a run must share with the model whose subwords it takes."""


def other_model(setting: str, name: str) -> tuple[Path, RunConfig]:
    """Return the folder and the settings of the model that a setting names; raise CheckpointError if there is none.

    The setting names the model's own folder, or a run, whose `best` is then used.
    """
    folder = model_folder(name)
    if whole_folder(folder) is None:
        raise CheckpointError(
            f"{setting} is {name}, but there is no trained model in {folder}: name the folder of a run, or of one of "
            "its checkpoints"
        )
    return folder, saved_config(folder)


def starting_weights(name: str, model: ModelConfig, subwords: SubwordConfig) -> Mapping[str, Tensor]:
    """Return the weights of the model that a new run starts from."""
    folder, theirs = fitting_start(name, model, subwords)
    weights = load_saved(folder).weights
    own_layers = _layers(model)
    for stack, layers in _layers(theirs.model).items():
        weights = spaced_layers(weights, stack, layers, own_layers[stack])
    return weights


def start_of(name: str) -> str:
    """Return a description of the model that `training.start_from` names, with its step; empty for random weights."""
    if not name:
        return ""
    folder = model_folder(name)
    if whole_folder(folder) is None:  # moved since the run began
        return str(folder)
    facts = load_facts(folder)
    return f"{folder} (imported)" if "imported_from" in facts else f"{folder} (step {facts['step']:,})"


def spaced_layers(weights: Mapping[str, Tensor], stack: str, layers: int, kept: int) -> OneByOne:
    """Return the weights of a model with `kept` of the `layers` layers of `stack`, "encoder" or "decoder".

    The kept layers are spaced as far apart as possible and include the first and the last; a single one is the first
    (Shleifer and Rush 2020, "shrink and fine-tune", where a student starts from a model shrunk in this way).
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
    return rename(weights, old_names)


def check_made_anew(subwords: SubwordConfig, theirs: SubwordConfig) -> None:
    """Raise ConfigError for settings of new subwords that another model's subwords do not have."""
    for name in ("train_pairs", "character_coverage", "byte_fallback"):
        own = getattr(subwords, name)
        if own not in (getattr(SubwordConfig, name), getattr(theirs, name)):
            raise ConfigError(
                f"subwords.{name} is {own}, but the subwords come from another model and were made with "
                f"{getattr(theirs, name)}: leave it out"
            )


def run_subwords(corpora: Corpora, *, fresh: bool = False) -> tuple[Subwords, Subwords]:
    """Return the subwords of a run: its own, or those of the model that it started from, or else of its teacher.

    With `fresh` the run starts over, and what is in its folder belongs to an earlier one.
    """
    config = corpora.config
    settings = config.training
    folder = None
    if not fresh:  # a run that has begun no longer needs the other model, which may have changed since
        folder = whole_folder(Path(config.run) / "last")
    if not settings.start_from and (folder is None or not settings.teacher):
        subwords = teacher_subwords(settings.teacher, config.subwords) if settings.teacher else prepare(corpora)
        if folder is None:
            check_tie(config.model, *subwords)
        return subwords
    if folder is None:
        folder, _ = fitting_start(settings.start_from, config.model, config.subwords)
    _, source, target = load_belongings(verified_folder(folder, BELONGINGS))
    check_normalization(config.subwords, source, target)
    return source, target


def check_tie(model: ModelConfig, source: Subwords, target: Subwords) -> None:
    """Raise ConfigError if a new model would have one embedding for two different vocabularies of the same size."""
    if model_sizes(model).tie == "all" and source.pieces() != target.pieces():
        raise ConfigError(
            f"model.tie is all (preset {model.preset}), so source and target share one embedding, but their "
            "subwords differ: set model.tie target, or subwords.joint true"
        )


def check_normalization(subwords: SubwordConfig, source: Subwords, target: Subwords) -> None:
    """Raise ConfigError if the settings ask for other normalization rules than another model's subwords have."""
    has = (source.normalization, target.normalization)
    if subwords.normalization and normalizations(subwords) != has:
        raise ConfigError(
            f"subwords.normalization is {' '.join(normalizations(subwords))} (source, target), but the "
            f"subwords come from another model and keep its {' '.join(has)}: leave it out"
        )


def fitting_start(name: str, model: ModelConfig, subwords: SubwordConfig) -> tuple[Path, RunConfig]:
    """Return the folder and the settings of the model to start from, if the run's settings fit it.

    A Transformer with fewer layers fits (see `spaced_layers`). Raises CheckpointError if there is no model, and
    ConfigError, naming the setting, if its subwords or other sizes differ.
    """
    folder, theirs = other_model("training.start_from", name)
    given = sizes_and_subwords(model, subwords)
    needed = sizes_and_subwords(theirs.model, theirs.subwords)
    check_made_anew(subwords, theirs.subwords)
    layers = _layers(theirs.model)
    fewer = {f"model.{stack}_layers" for stack, own in _layers(model).items() if own < layers.get(stack, 0)}
    for setting in [*needed, *given]:  # a decoder-only model has other sizes
        own = given.get(setting)
        other = needed.get(setting)
        if own != other and setting not in fewer:
            raise ConfigError(
                f"{setting} is {own!r}, but the model to start from, {folder}, has {other!r}: use the same value, or "
                f"take all its settings with --config {folder / 'config.yaml'}"
            )
    return folder, theirs


def _layers(model: ModelConfig) -> dict[str, int]:
    """Return the number of layers in each stack that a model can start with a subset of."""
    sizes = model_sizes(model)
    names = {"encoder": "encoder_layers", "decoder": "decoder_layers"}
    return {stack: getattr(sizes, name) for stack, name in names.items() if hasattr(sizes, name)}


def sizes_and_subwords(model: ModelConfig, subwords: SubwordConfig) -> dict[str, object]:
    """Return the settings that give weights their meaning: those of the subwords, and all sizes of the model."""
    sizes = asdict(model_sizes(model))
    del sizes["dropout"]
    own = {f"subwords.{name}": getattr(subwords, name) for name in OF_SUBWORDS}
    return own | {f"model.{name}": value for name, value in sizes.items()}


def teacher_folder(name: str) -> Path:
    """Return the folder of the model that `training.teacher` names; raises as `other_model` does."""
    return other_model("training.teacher", name)[0]


def teacher_subwords(teacher: str, subwords: SubwordConfig) -> tuple[Subwords, Subwords]:
    """Return the subwords of the teacher; raise ConfigError if the settings ask for others."""
    folder, theirs = other_model("training.teacher", teacher)
    for name in OF_SUBWORDS:
        own = getattr(subwords, name)
        other = getattr(theirs.subwords, name)
        if own != other:
            raise ConfigError(
                f"subwords.{name} is {own!r}, but the teacher {folder} has {other!r}, and a student uses its teacher's "
                "subwords: use the same value"
            )
    check_made_anew(subwords, theirs.subwords)
    _, source, target = load_belongings(verified_folder(folder, BELONGINGS))
    check_normalization(subwords, source, target)
    return source, target


def load_teacher(name: str, language_tags: bool, source: Subwords, target: Subwords) -> SavedModel:
    """Open the model to learn from.

    Raises CheckpointError if it is missing or damaged, and ConfigError unless its subwords are `source` and `target`.
    """
    saved = load_saved(teacher_folder(name))
    if saved.config.data.language_tags != language_tags:
        raise ConfigError(
            f"data.language_tags is {language_tags}, but the teacher {saved.folder} has "
            f"{saved.config.data.language_tags} and would read sentences unlike those it was trained on: use the same "
            "value, or learn only from its translations, with training.teacher_weight 0"
        )
    for side, own, other in (("source", source, saved.source), ("target", target, saved.target)):
        if own.digest != other.digest:
            raise ConfigError(
                f"the {side} subwords of training.teacher {saved.folder} differ from this run's ({len(other):,} and "
                f"{len(own):,}), so their predictions cannot be compared: choose a teacher with the same subwords, or "
                "begin a new run without training.start_from, to use the teacher's"
            )
    return saved


def check_same_teacher(teacher: SavedModel | None, state: TrainingState, run: Path) -> None:
    """Raise ConfigError if a run that has begun has learnt from a different teacher."""
    if state.teacher == (teacher.digest if teacher else ""):
        return
    if teacher and teacher.folder.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"--run {run} is the teacher's own folder: name another one for the student")
    here = teacher.folder if teacher else "none"
    what = "another model" if teacher else "a teacher"
    if not state.teacher:
        what = "no teacher"
    raise ConfigError(
        f"training.teacher is {here}, but {run} learned from {what}, according to the SHA-256 of the weights: restore "
        "the teacher, choose another --run, or start over with --fresh"
    )
