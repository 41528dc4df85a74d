"""Make a run of a model that others have published: weights, subwords and settings of translation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from models import PRESETS, TransformerConfig
from recipes.translation.errors import CheckpointError
from recipes.translation.importing.architectures import published, sizes_of
from recipes.translation.importing.folder import Folder, Weights, check_subwords
from recipes.translation.importing.generation import decoding_of, lost_settings, read_generation, searches_on
from recipes.translation.importing.tokenizer import Tokenizer, read_tokenizer
from recipes.translation.importing.weights import our_weights
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.outputs import is_run
from recipes.translation.run_folder.translator import Translator, fill_model, model_to_fill, tensors_of
from recipes.translation.settings.config import ModelConfig, RunConfig, load_config
from recipes.translation.text.sentencepiece_file import kind_of_model
from recipes.translation.text.subwords import Subwords


class Imported(NamedTuple):
    """A published model as a translator, and what could not be taken over."""

    translator: Translator
    ignored: list[str]
    """Settings of translation that a run does not have."""
    settings_file: str
    """The file that has them."""
    searches_on: bool
    """Whether transformers' search goes on where the run's stops."""


def import_model(folder: Path, run: Path, source: str = "", target: str = "") -> Imported:
    """Write the published model in `folder` to the run's `best`.

    `source` and `target` are the languages, which a model of several languages needs.

    Raises CheckpointError for a folder that is not such a model, or a run that is there already, and ConfigError for a
    language that the model does not have.
    """
    for name in ("best", "last"):
        if (run / name).exists():
            raise CheckpointError(f"{run} has a model already, in {run / name}: name another folder with --run")
    if is_run(run):
        raise CheckpointError(
            f"{run} is a run already, with records, subwords or models: name another folder with --run"
        )
    imported = read_model(folder, run, source, target)
    save_model(run / "best", imported.translator, {"step": 0, "imported_from": folder.resolve().name})
    return imported


def read_model(folder: Path, run: Path, source: str = "", target: str = "") -> Imported:
    """Return the model in `folder`, as a translator of the run, in float32 or, where it has float64, in float64."""
    files = Folder(folder)
    settings = files.json("config.json")
    where = str(folder / "config.json")
    sizes = sizes_of(settings, where)
    generation, settings_file = read_generation(files, settings)
    tokenizer = read_tokenizer(files, settings, generation, (source, target))
    weights = our_weights(Weights(files.tensors(), folder), sizes, tokenizer.source_ids, tokenizer.target_ids)
    config = run_config(published(settings, where).preset, sizes, tokenizer, generation, run)
    subwords = (_subwords(tokenizer.source, folder), _subwords(tokenizer.target, folder))
    model = model_to_fill(sizes, *subwords).to(weights["generator.weight"].dtype)
    fill_model(model, {name: weights[name] for name in tensors_of(model)}, folder)
    ignored = lost_settings(generation, tokenizer)
    translator = Translator(config, model.eval(), *subwords)
    return Imported(translator, ignored, settings_file, searches_on(generation))


def _subwords(model: bytes, folder: Path) -> Subwords:
    check_subwords(
        model,
        f"{folder / 'tokenizer_config.json'} names other special subwords than the sentencepiece model: one of the two "
        "files belongs to another model",
    )
    return Subwords(sentencepiece.SentencePieceProcessor(model_proto=model))


def run_config(
    preset: str, sizes: TransformerConfig, tokenizer: Tokenizer, generation: Mapping[str, Any], run: Path
) -> RunConfig:
    """Return the settings of the run."""
    usual = PRESETS[preset]
    assert isinstance(usual, TransformerConfig)
    changed = {
        f"model.{field.name}": getattr(sizes, field.name)
        for field in fields(ModelConfig)
        if field.name != "preset" and getattr(sizes, field.name) != getattr(usual, field.name)
    }
    given = {
        "run": str(run),
        # Not the built-in corpus: whoever trains on names the data
        "data.format": "text",
        "data.source": tokenizer.languages[0],
        "data.target": tokenizer.languages[1],
        "subwords.vocab_size": len(tokenizer.target_ids),
        "subwords.joint": False,
        "subwords.kind": kind_of_model(tokenizer.source),
        "model.preset": preset,
        **changed,
        **decoding_of(generation, len(tokenizer.start)),
    }
    return load_config(None, given | _lengths(given, sizes))


def _lengths(given: Mapping[str, Any], sizes: TransformerConfig) -> dict[str, Any]:
    """Return lengths that a model with learned positions can read: so many subwords, and three symbols at most."""
    if sizes.architecture != "mbart":
        return {}
    defaults = RunConfig()
    most = max(1, sizes.max_positions - 3)
    return {
        "decoding.max_length": min(most, given.get("decoding.max_length", defaults.decoding.max_length)),
        "training.max_length": min(most, defaults.training.max_length),
    }
