"""Write a model as a folder that Hugging Face transformers loads.

    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

A post-norm model becomes a Marian model, a pre-norm one a Pegasus model: the same architecture except for positions.
Here the sine and cosine of a frequency alternate; in transformers all sines come before all cosines. The dimensions of
the hidden states are permuted accordingly in every weight, which changes no output. An imported model gets its original
class back, and its positions are already in the right order.

In transformers, translations by Marian and Pegasus start with padding, the last subword, and CTranslate2's converter
assumes that its vector is 0. So the start symbol is written as padding, and for Marian its vector c is subtracted from
all token vectors. The resulting change is the same at every position, so biases of the first layer compensate for it:

    W (e + c) + b = W e + (b + W c)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
)

from models import TransformerConfig
from models.huggingface_names import huggingface_names
from recipes.translation.errors import ConfigError
from recipes.translation.export.lost_settings import length_penalty_there, transformer_sizes
from recipes.translation.export.multilingual_tokenizer import write_multilingual_tokenizer
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.files.tensors import OneByOne, write_tensors
from recipes.translation.run_folder.checkpoint import SavedModel
from recipes.translation.run_folder.translator import model_on_meta
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK

MULTILINGUAL = ("m2m100", "mbart")
"""Architectures that follow fairseq in their ids, language tags and generation settings."""


def write(saved: SavedModel, folder: Path) -> None:
    """Replace `folder` with one that has the model in float32, its generation settings and its tokenizer.

    Only one weight at a time is in memory. Raises ConfigError for a pre-norm model with two vocabularies, since Pegasus
    has one, for an output projection with a bias, which M2M-100 does not have, and for language tags in a model of
    another kind.
    """
    for side in () if is_multilingual(saved) else (saved.source, saved.target):
        prefix, suffix, start = side.symbols
        if prefix or suffix != (EOS,) or len(start) > 1:
            raise ConfigError(
                "the subwords are those of an imported model with language tags, which transformers does not have "
                f"for models like model.preset {saved.config.model.preset}: export it --to ctranslate2 or safetensors"
            )
    with torch.device("meta"):
        model = empty_model(saved)
    weights = weights_of(saved, model)
    # As transformers' `save_pretrained` would set them, which is not used because it has all weights in memory
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    ids = ids_there(saved)
    digests: dict[str, str] = {}
    with replaced_folder(folder, digests) as new:
        model.config.save_pretrained(new)
        starts = [ids[1].index(each) for each in saved.target.symbols.start]
        generation_config(saved.config.decoding, starts, model.config).save_pretrained(new)
        digests["model.safetensors"] = write_tensors(new / "model.safetensors", weights, {"format": "pt"})
        if is_multilingual(saved):
            write_multilingual_tokenizer(saved, ids[0], new)
        else:
            write_tokenizer(saved, ids, new)


def is_multilingual(saved: SavedModel) -> bool:
    """Return whether the model is an imported multilingual one."""
    return transformer_sizes(saved).architecture in MULTILINGUAL


def ids_there(saved: SavedModel) -> tuple[list[int], list[int]]:
    """Return our ids for source and target, in the order of transformers' ids.

    The start symbol comes last in a vocabulary that both sides share; fairseq begins with <s>, <pad>, </s>, <unk>.
    """
    sizes = len(saved.source), len(saved.target)
    if saved.source.pieces() != saved.target.pieces():
        return list(range(sizes[0])), list(range(sizes[1]))
    start = saved.target.symbols.start[0]
    ids = [*(each for each in range(sizes[0]) if each != start), start]
    if is_multilingual(saved):
        ids = [BOS, PAD, EOS, UNK, *range(EOS + 1, sizes[0])]
    return ids, ids


def empty_model(saved: SavedModel) -> PreTrainedModel:
    """Return a model of the matching class and sizes, with random weights."""
    config = saved.config
    sizes = transformer_sizes(saved)
    source, target = len(saved.source), len(saved.target)
    ids = ids_there(saved)[1]
    start = ids.index(saved.target.symbols.start[0])
    pad = ids.index(PAD)
    longest = max(config.training.max_length, config.decoding.max_length) + 1
    if saved.source.pieces() == saved.target.pieces() and not is_multilingual(saved):
        pad = start
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
        # A source also has its end symbol, and a target its start symbol
        "max_position_embeddings": longest,
        "pad_token_id": pad,
        "bos_token_id": start,
        "eos_token_id": ids.index(EOS),
        "decoder_start_token_id": start,
        "forced_eos_token_id": None,
        # Read by CTranslate2's converter
        "normalize_before": sizes.norm == "pre",
        "normalize_embedding": sizes.architecture == "mbart",
    }
    if is_multilingual(saved):
        shared |= {"bos_token_id": ids.index(BOS), "tie_word_embeddings": sizes.tie == "all"}
        if sizes.norm == "post":
            raise ConfigError(f"the model is post-norm, and {sizes.architecture} of transformers is pre-norm")
        if sizes.architecture == "mbart":
            # By this name CTranslate2's converter recognises the older models, which start with the language
            kind = "MBart50Tokenizer" if len(saved.target.symbols.start) > 1 else "MBartTokenizer"
            shared |= {"max_position_embeddings": sizes.max_positions, "tokenizer_class": kind}
            return MBartForConditionalGeneration(MBartConfig(**shared))
        if saved.weights["generator.bias"].any():
            raise ConfigError(
                "the model's projection has a bias, since it was not imported, or was trained by an earlier version; "
                "M2M-100 of transformers has none: export it --to ctranslate2 or safetensors"
            )
        return M2M100ForConditionalGeneration(M2M100Config(**shared))
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
    if sizes.architecture != "vaswani":
        return width
    # (sin_0, cos_0, sin_1, cos_1, ...) -> (sin_0, sin_1, ..., cos_0, cos_1, ...)
    return torch.cat((width[0::2], width[1::2]))


class Origin(NamedTuple):
    """Which weight here one of transformers' weights is made from."""

    name: str
    part: int
    parts: int
    """How many parts the weight here is divided into, along its first axis."""


def weights_of(saved: SavedModel, model: PreTrainedModel) -> OneByOne:
    """Return every weight of transformers' model, which is on "meta", by name; each is made when it is asked for.

    The dimensions of hidden states and the rows of vocabularies are permuted. Positions that transformers keeps in its
    files are computed by transformers, unless they are learned.
    """
    origins = origins_of(saved)
    sizes = transformer_sizes(saved)
    order = order_of(sizes)
    source, target = ids_there(saved)
    rows = {"src_embed.lookup.weight": source} | dict.fromkeys(
        ("tgt_embed.lookup.weight", "generator.weight", "generator.bias"), target
    )
    kept, computed = weights_there(model, origins)
    shifted = shift_to_start(saved, origins) if isinstance(model, MarianMTModel) else lambda _, tensor: tensor

    def make_weight(name: str) -> Tensor:
        if name in computed:
            table: Tensor = model.get_submodule(name.removesuffix(".weight")).create_weight()
            return table
        own, part, parts = origins[name]
        tensor = shifted(own, saved.weights[own].float())
        if own in rows:
            tensor = tensor[rows[own]]
        if re.search(r"norm\.|output\.|outer\.", own):  # applied to hidden states, or added to them
            tensor = tensor[order]
        elif tensor.dim() == 2:
            tensor = tensor[:, order]
        tensor = tensor.chunk(parts)[part]
        before = kept[name].numel() - tensor.numel()
        if own.endswith("learned.weight"):  # mBART's has rows that are never read
            tensor = torch.cat([tensor.new_zeros(before // sizes.d_model, sizes.d_model), tensor])
        return tensor.view(kept[name].shape)

    return OneByOne({name: torch.empty_like(each, dtype=torch.float32) for name, each in kept.items()}, make_weight)


def weights_there(model: PreTrainedModel, origins: dict[str, Origin]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the tensors in transformers' files, and the names of those that are computed."""
    # Each tied weight appears under its first name
    kept = dict(chain(model.named_parameters(), model.named_buffers()))
    computed = {name for name in kept if re.search(r"embed_positions\.weights?$", name) and name not in origins}
    if not isinstance(model, PegasusForConditionalGeneration):  # the other classes' files have no positions
        kept = {name: each for name, each in kept.items() if name not in computed}
        computed = set()
    if unknown := kept.keys() - origins.keys() - computed:
        raise AssertionError(f"weights without a counterpart: {', '.join(sorted(unknown))}")
    used = {origins[name].name for name in kept.keys() - computed}
    if isinstance(model, M2M100ForConditionalGeneration):
        used.add("generator.bias")  # it is 0
    if unused := {each.name for each in origins.values()} - used:
        raise AssertionError(f"weights without a counterpart there: {', '.join(sorted(unused))}")
    return kept, computed


def shift_to_start(saved: SavedModel, origins: dict[str, Origin]) -> Callable[[str, Tensor], Tensor]:
    """Return a function that, applied to each weight, makes the start symbol's vector 0 without changing any output.

    A projection that is tied to the vectors then only adds the same number to every logit.
    """
    embedding = origins["model.decoder.embed_tokens.weight"].name
    start = saved.weights[embedding][saved.target.symbols.start[0]].float()
    moved = start * math.sqrt(len(start))
    sides = [side for side in ("encoder", "decoder") if origins[f"model.{side}.embed_tokens.weight"].name == embedding]

    def shift(own: str, tensor: Tensor) -> Tensor:
        if own == embedding:
            return tensor - start
        if own in [f"{side}.layers.0.self_attention.output.bias" for side in sides]:
            return tensor + moved  # for the residual connection
        if re.match(rf"({'|'.join(sides)})\.layers\.0\.self_attention\..*bias", own):
            return tensor + saved.weights[own.replace("bias", "weight")].float() @ moved
        return tensor

    return shift


def origins_of(saved: SavedModel) -> dict[str, Origin]:
    """Return what each weight is made from, by its name in transformers; tied ones appear under all their names."""
    model = model_on_meta(transformer_sizes(saved), saved.source, saved.target)
    first = {id(weight): name for name, weight in model.named_parameters()}
    found = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names = huggingface_names(name)
        for part, theirs in enumerate(names):
            found[theirs] = Origin(first[id(weight)], part, len(names))
    return {**found, "model.shared.weight": found["model.encoder.embed_tokens.weight"]}


def generation_config(decoding: DecodingConfig, start: Sequence[int], model: Any) -> GenerationConfig:
    """Return the run's decoding settings for transformers, which divides a log-probability by length^length_penalty.

    `start` is what a translation starts with, in transformers' ids, and `model` is the model's config.
    """
    settings: dict[str, Any] = {}
    if decoding.beam > 1:  # transformers refuses a length penalty without beams
        settings["length_penalty"] = length_penalty_there(decoding)
        settings["early_stopping"] = True  # the search here ends when `beam` translations are finished
    never = sorted({model.pad_token_id, start[-1]})
    if len(start) > 1:  # the tag could not be forced if it were suppressed
        settings |= {"forced_bos_token_id": start[1], "bad_words_ids": [[each] for each in never]}
    else:
        settings["suppress_tokens"] = never
    return GenerationConfig(
        **settings,
        num_beams=decoding.beam,
        max_length=decoding.max_length + len(start),  # transformers counts the start
        min_length=decoding.min_length and decoding.min_length + len(start),
        no_repeat_ngram_size=decoding.no_repeat_ngram,
        pad_token_id=model.pad_token_id,
        bos_token_id=model.bos_token_id,
        eos_token_id=model.eos_token_id,
        decoder_start_token_id=start[0],
    )


def write_tokenizer(saved: SavedModel, ids: tuple[list[int], list[int]], folder: Path) -> None:
    """Write the files of transformers' MarianTokenizer, which reads sentencepiece models."""
    saved.source.save(folder / "source.spm")
    saved.target.save(folder / "target.spm")
    separate = saved.source.pieces() != saved.target.pieces()
    special = saved.source.pieces()
    pieces = list(special)
    if not separate:  # the start symbol becomes padding
        start = saved.target.symbols.start[0]
        pieces[PAD], pieces[start] = special[start], special[PAD]
    write_vocabulary(pieces, ids[0], folder / "vocab.json")
    if separate:
        write_vocabulary(saved.target.pieces(), ids[1], folder / "target_vocab.json")
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


def write_vocabulary(pieces: Sequence[str], ids: Sequence[int], path: Path) -> None:
    """Write the id of every subword.

    transformers looks up a language tag, such as >>fra<<, without the blank that its piece begins with.
    """
    names = [re.sub("^\u2581(>>.+<<)$", r"\1", pieces[each]) for each in ids]
    numbers = {name: number for number, name in enumerate(names)}
    path.write_text(json.dumps(numbers, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
