"""Write a model as a folder that Hugging Face transformers loads.

    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

A post-norm model becomes a Marian model, a pre-norm one a Pegasus model: the same architecture but for the positions.
Here sine and cosine of a frequency alternate, there all sines come before all cosines. The dimensions of the hidden
states are permuted accordingly in every weight, which changes no output. A model that was imported from Marian's has
its positions in Marian's order already.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
)

from models import TransformerConfig
from models.huggingface_names import huggingface_names
from recipes.translation.errors import ConfigError
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.files.tensors import OneByOne, write_tensors
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.translator import model_on_meta
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK, Subwords


def write(saved: SavedModel, folder: Path) -> None:
    """Replace `folder` by one with the model in float32, its generation settings and its tokenizer.

    Only one weight at a time is in memory. Raises ConfigError for a pre-norm model with two vocabularies: Pegasus has
    one.
    """
    with torch.device("meta"):
        model = empty_model(saved)
    weights = weights_of(saved, model)
    # What transformers' own `save_pretrained` notes, which has all weights in memory
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    digests: dict[str, str] = {}
    with replaced_folder(folder, digests) as new:
        model.config.save_pretrained(new)
        generation_config(saved.config, saved.target.symbols.start[0]).save_pretrained(new)
        digests["model.safetensors"] = write_tensors(new / "model.safetensors", weights, {"format": "pt"})
        write_tokenizer(saved, new)


def empty_model(saved: SavedModel) -> PreTrainedModel:
    """Return a model of the class and the sizes that fit, with random weights."""
    config = saved.config
    sizes = transformer_sizes(saved)
    source, target = len(saved.source), len(saved.target)
    shared: dict[str, Any] = {
        "vocab_size": source,
        "d_model": sizes.d_model,
        "encoder_layers": sizes.encoder_layers,
        "decoder_layers": sizes.decoder_layers,
        "encoder_attention_heads": sizes.heads,
        "decoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.d_ff,
        "decoder_ffn_dim": sizes.d_ff,
        "activation_function": sizes.activation,
        "dropout": sizes.dropout,
        "scale_embedding": True,
        # A source has its end symbol too, and a target its start symbol
        "max_position_embeddings": max(config.training.max_length, config.decoding.max_length) + 1,
        "pad_token_id": PAD,
        "bos_token_id": saved.target.symbols.start[0],
        "eos_token_id": EOS,
        "decoder_start_token_id": saved.target.symbols.start[0],
        "forced_eos_token_id": None,
    }
    if sizes.norm == "post":
        return MarianMTModel(
            MarianConfig(
                **shared,
                decoder_vocab_size=target,
                share_encoder_decoder_embeddings=sizes.tie == "all",
                tie_word_embeddings=sizes.tie != "none",
            )
        )
    if saved.source.pieces() != saved.target.pieces():
        raise ConfigError(
            f"the model is pre-norm and has two vocabularies, of {source:,} and {target:,} subwords; Pegasus, the "
            "pre-norm model of transformers, has one: train with --subwords.joint true or --model.norm post"
        )
    return PegasusForConditionalGeneration(PegasusConfig(**shared, tie_word_embeddings=sizes.tie == "all"))


def order_of(sizes: TransformerConfig) -> Tensor:
    """Return the dimensions of hidden states in transformers' order."""
    width = torch.arange(sizes.d_model)
    if sizes.architecture == "marian":
        return width
    # (sin_0, cos_0, sin_1, cos_1, ...) -> (sin_0, sin_1, ..., cos_0, cos_1, ...)
    return torch.cat((width[0::2], width[1::2]))


class Origin(NamedTuple):
    """Which weight here a weight of transformers is made from."""

    name: str
    part: int
    parts: int
    """Of the weight here, along its first axis."""


def weights_of(saved: SavedModel, model: PreTrainedModel) -> OneByOne:
    """Return every weight of transformers' model, which is on "meta", by its name; each is made when it is asked for.

    The dimensions of hidden states are permuted. Positions that transformers keeps in its files are its own.
    """
    origins = origins_of(saved)
    order = order_of(transformer_sizes(saved))
    # A tied weight under the first of its names
    kept = dict(chain(model.named_parameters(), model.named_buffers()))
    positions = {name for name in kept if name.endswith("embed_positions.weight")}
    if isinstance(model, MarianMTModel):  # whose files have none
        for name in positions:
            del kept[name]
        positions = set()
    if unknown := kept.keys() - origins.keys() - positions:
        raise AssertionError(f"weights without a counterpart: {', '.join(sorted(unknown))}")
    if unused := {each.name for each in origins.values()} - {origins[name].name for name in kept.keys() - positions}:
        raise AssertionError(f"weights without a counterpart there: {', '.join(sorted(unused))}")

    def made(name: str) -> Tensor:
        if name in positions:
            table: Tensor = model.get_submodule(name.removesuffix(".weight")).create_weight()
            return table
        own, part, parts = origins[name]
        tensor = saved.weights[own].float()
        if re.search(r"norm\.|output\.|outer\.", own):  # of hidden states, or added to them
            tensor = tensor[order]
        elif tensor.dim() == 2:
            tensor = tensor[:, order]
        return tensor.chunk(parts)[part].view(kept[name].shape)

    return OneByOne({name: torch.empty_like(each, dtype=torch.float32) for name, each in kept.items()}, made)


def origins_of(saved: SavedModel) -> dict[str, Origin]:
    """Return, by its name in transformers, what each weight is made from, tied ones under each of their names."""
    model = model_on_meta(transformer_sizes(saved), saved.source, saved.target)
    first = {id(weight): name for name, weight in model.named_parameters()}
    found = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names = huggingface_names(name)
        for part, theirs in enumerate(names):
            found[theirs] = Origin(first[id(weight)], part, len(names))
    return {**found, "model.shared.weight": found["model.encoder.embed_tokens.weight"]}


def generation_config(config: RunConfig, start: int = BOS) -> GenerationConfig:
    """Return the run's settings of translation; transformers divides a log-probability by length^length_penalty."""
    decoding = config.decoding
    settings: dict[str, Any] = {}
    if decoding.beam > 1:  # transformers refuses a length penalty without beams
        settings["length_penalty"] = 0.0
        if decoding.length_norm == "length":
            settings["length_penalty"] = decoding.length_penalty
    return GenerationConfig(
        **settings,
        num_beams=decoding.beam,
        max_length=decoding.max_length + 1,  # the start symbol is counted there
        min_length=decoding.min_length and decoding.min_length + 1,
        no_repeat_ngram_size=decoding.no_repeat_ngram,
        suppress_tokens=sorted({PAD, start}),
        pad_token_id=PAD,
        bos_token_id=start,
        eos_token_id=EOS,
        decoder_start_token_id=start,
    )


def write_tokenizer(saved: SavedModel, folder: Path) -> None:
    """Write the files of transformers' MarianTokenizer, which reads sentencepiece models."""
    saved.source.save(folder / "source.spm")
    saved.target.save(folder / "target.spm")
    separate = saved.source.pieces() != saved.target.pieces()
    write_vocabulary(saved.source, folder / "vocab.json")
    if separate:
        write_vocabulary(saved.target, folder / "target_vocab.json")
    special = saved.source.pieces()
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": saved.config.data.source,
        "target_lang": saved.config.data.target,
        "separate_vocabs": separate,
        "pad_token": special[PAD],
        "unk_token": special[UNK],
        "eos_token": special[EOS],
        "model_max_length": max(saved.config.training.max_length, saved.config.decoding.max_length) + 1,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_vocabulary(subwords: Subwords, path: Path) -> None:
    """Write the id of every subword.

    transformers looks up the tag of a language, such as >>fra<<, without the blank that begins its piece.
    """
    names = [re.sub("^\u2581(>>.+<<)$", r"\1", piece) for piece in subwords.pieces()]
    ids = {name: number for number, name in enumerate(names)}
    path.write_text(json.dumps(ids, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
