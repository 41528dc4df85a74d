"""Make a run from a model that others have published: weights, subwords and decoding settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models import PRESETS, TransformerConfig
from models.huggingface_names import huggingface_names
from recipes.translation.errors import CheckpointError
from recipes.translation.files.tensors import OneByOne
from recipes.translation.importing.folder import check_room, read_config, read_generation, read_weights, reading
from recipes.translation.importing.settings import PUBLISHED, decoding_of, lost_settings, sizes_of, tie_of
from recipes.translation.importing.tokenizer import Tokenizer, our_tokenizer
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.outputs import is_run
from recipes.translation.run_folder.translator import Translator, fill_model, model_on_meta, tensors_of
from recipes.translation.settings.config import ModelConfig, RunConfig, load_config


class Imported(NamedTuple):
    """A published model as a translator, and what could not be taken over."""

    translator: Translator
    ignored: list[str]
    """Generation settings that a run does not have."""
    settings_file: str
    """The file that has them."""
    searches_on: bool
    """Whether transformers' search continues where the run's stops."""


def import_model(folder: Path, run: Path, source: str = "", target: str = "") -> Imported:
    """Write the published model in `folder` to the run's `best`.

    `source` and `target` are the languages, which a multilingual model needs.

    Raises CheckpointError for a folder that is not such a model, or a run that already exists, and ConfigError for a
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
    """Return the model in `folder`, as a translator of the run, in float32 or, if its weights are, in float64."""
    config = read_config(folder)
    sizes = sizes_of(config, str(folder / "config.json"))
    check_room(folder, config)
    generation, settings_file = read_generation(folder)
    start = generation.get("decoder_start_token_id", config.decoder_start_token_id)
    tokenizer = our_tokenizer(folder, config, start, (source, target))
    theirs = read_weights(folder, config)
    sizes = replace(sizes, tie=tie_of(theirs))
    subwords = (tokenizer.source, tokenizer.target)
    model = model_on_meta(sizes, *subwords).to(torch.promote_types(theirs.dtype, torch.float32))
    fill_model(model, our_weights(model, theirs, tokenizer.source_ids, tokenizer.target_ids), folder)
    with reading(settings_file, folder):  # transformers checks its values only when it translates
        decoding = decoding_of(generation, len(tokenizer.target.symbols.start))
        ignored = lost_settings(generation, tokenizer)
    given = run_settings(PUBLISHED[config.model_type], sizes, tokenizer, run) | decoding
    settings = load_config(None, given | _lengths(given, sizes), str(folder / settings_file))
    searches_on = settings.decoding.beam > 1 and generation.get("early_stopping") is not True
    return Imported(Translator(settings, model.eval(), *subwords), ignored, settings_file, searches_on)


def our_weights(model: nn.Module, theirs: Any, source_ids: Sequence[int], target_ids: Sequence[int]) -> OneByOne:
    """Return every weight of `model`, which is on "meta", by name; each is made when it is asked for.

    `source_ids` and `target_ids` are the published ids in the order of ours: rows of the vocabulary are permuted, which
    changes no probability.
    """
    state = theirs.state_dict()
    own = tensors_of(model)
    rows = {"src_embed.lookup.weight": source_ids} | dict.fromkeys(
        ("tgt_embed.lookup.weight", "generator.weight", "generator.bias"), target_ids
    )

    def make_weight(name: str) -> Tensor:
        if name == "generator.bias":  # M2M-100 has none
            tensor: Tensor = state.get("final_logits_bias", torch.zeros(1, len(target_ids)))[0]
        else:
            tensor = torch.cat([state[each] for each in huggingface_names(name)])
        if name.endswith("learned.weight"):
            tensor = tensor[theirs.model.encoder.embed_positions.offset :]
        if name in rows:
            tensor = tensor[list(rows[name])]
        return tensor.to(own[name].dtype)

    return OneByOne(own, make_weight)


def run_settings(preset: str, sizes: TransformerConfig, tokenizer: Tokenizer, run: Path) -> dict[str, Any]:
    """Return the settings of the run, except those for decoding."""
    usual = PRESETS[preset]
    assert isinstance(usual, TransformerConfig)
    changed = {
        f"model.{field.name}": getattr(sizes, field.name)
        for field in fields(ModelConfig)
        if field.name != "preset" and getattr(sizes, field.name) != getattr(usual, field.name)
    }
    return {
        "run": str(run),
        # Not the built-in corpus: anyone who trains it further names the data
        "data.format": "text",
        "data.source": tokenizer.languages[0],
        "data.target": tokenizer.languages[1],
        "subwords.vocab_size": len(tokenizer.target_ids),
        "subwords.joint": False,
        "subwords.kind": tokenizer.source.kind,
        "model.preset": preset,
        **changed,
    }


def _lengths(given: Mapping[str, Any], sizes: TransformerConfig) -> dict[str, Any]:
    """Return the lengths that a model with learned positions can read: its positions, minus three for symbols."""
    if sizes.architecture != "mbart":
        return {}
    defaults = RunConfig()
    most = max(1, sizes.max_positions - 3)
    return {
        "decoding.max_length": min(most, given.get("decoding.max_length", defaults.decoding.max_length)),
        "training.max_length": min(most, defaults.training.max_length),
    }
