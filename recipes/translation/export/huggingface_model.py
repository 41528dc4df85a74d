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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
)

from models import EncoderDecoder, TransformerConfig
from models.attention import Attention
from recipes.translation.errors import ConfigError
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK, Subwords


class Entry(NamedTuple):
    """A weight under its name in transformers."""

    name: str
    tensor: Tensor


def write(translator: Translator, folder: Path) -> None:
    """Replace `folder` by one with the model, its generation settings and its tokenizer.

    Raises ConfigError for a pre-norm model with two vocabularies: Pegasus has one.
    """
    model = huggingface_model(translator)
    with replaced_folder(folder) as new:
        model.save_pretrained(new)
        write_tokenizer(translator, new)


def huggingface_model(translator: Translator) -> PreTrainedModel:
    """Return the model in transformers' own class, with the same weights in float32."""
    model = empty_model(translator)
    order = order_of(transformer_sizes(translator))
    weights = {name: tensor.detach().cpu().float() for name, tensor in entries(translator.model, order)}
    if not hasattr(model.model, "shared"):  # a Marian model that does not share its embeddings
        del weights["model.shared.weight"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    # transformers computes its tables of positions itself
    left = [name for name in missing if not name.endswith("embed_positions.weight")]
    if left or unexpected:
        raise AssertionError(f"weights without a counterpart: {left}, {unexpected}")
    model.tie_weights()
    model.generation_config = generation_config(translator.config, translator.target.symbols.start[0])
    return model.eval()


def empty_model(translator: Translator) -> PreTrainedModel:
    """Return a model of the class and the sizes that fit, with random weights."""
    config = translator.config
    sizes = transformer_sizes(translator)
    source, target = len(translator.source), len(translator.target)
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
        "bos_token_id": translator.target.symbols.start[0],
        "eos_token_id": EOS,
        "decoder_start_token_id": translator.target.symbols.start[0],
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
    if translator.source.pieces() != translator.target.pieces():
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


def entries(model: EncoderDecoder, order: Tensor) -> Iterator[Entry]:
    """Yield every weight under its name in transformers, with the dimensions of hidden states permuted."""
    yield Entry("model.shared.weight", model.src_embed.lookup.weight[:, order])
    yield Entry("model.encoder.embed_tokens.weight", model.src_embed.lookup.weight[:, order])
    yield Entry("model.decoder.embed_tokens.weight", model.tgt_embed.lookup.weight[:, order])
    yield Entry("lm_head.weight", model.generator.weight[:, order])
    yield Entry("final_logits_bias", model.generator.bias[None])
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, layer in enumerate(stack.layers):
            yield from layer_entries(f"model.{side}.layers.{number}", layer, order)
        if isinstance(stack.norm, nn.LayerNorm):
            yield from norm_entries(f"model.{side}.layer_norm", stack.norm, order)


def layer_entries(name: str, layer: Any, order: Tensor) -> Iterator[Entry]:
    """Yield the weights of one layer."""
    norms = [residual.norm for residual in layer.residuals]
    yield from attention_entries(f"{name}.self_attn", layer.self_attention, order)
    yield from norm_entries(f"{name}.self_attn_layer_norm", norms[0], order)
    if hasattr(layer, "memory_attention"):
        yield from attention_entries(f"{name}.encoder_attn", layer.memory_attention, order)
        yield from norm_entries(f"{name}.encoder_attn_layer_norm", norms[1], order)
    yield from reading_entries(f"{name}.fc1", layer.feed_forward.inner.weight, layer.feed_forward.inner.bias, order)
    yield from writing_entries(f"{name}.fc2", layer.feed_forward.outer, order)
    yield from norm_entries(f"{name}.final_layer_norm", norms[-1], order)


def attention_entries(name: str, attention: Attention, order: Tensor) -> Iterator[Entry]:
    """Yield the four projections of an attention."""
    key_weight, value_weight = attention.key_value.weight.chunk(2)
    key_bias, value_bias = attention.key_value.bias.chunk(2)
    yield from reading_entries(f"{name}.q_proj", attention.query.weight, attention.query.bias, order)
    yield from reading_entries(f"{name}.k_proj", key_weight, key_bias, order)
    yield from reading_entries(f"{name}.v_proj", value_weight, value_bias, order)
    yield from writing_entries(f"{name}.out_proj", attention.output, order)


def reading_entries(name: str, weight: Tensor, bias: Tensor, order: Tensor) -> Iterator[Entry]:
    """Yield a projection of hidden states."""
    yield Entry(f"{name}.weight", weight[:, order])
    yield Entry(f"{name}.bias", bias)


def writing_entries(name: str, linear: nn.Linear, order: Tensor) -> Iterator[Entry]:
    """Yield a projection whose result is added to hidden states."""
    yield Entry(f"{name}.weight", linear.weight[order])
    yield Entry(f"{name}.bias", linear.bias[order])


def norm_entries(name: str, norm: nn.LayerNorm, order: Tensor) -> Iterator[Entry]:
    """Yield a layer norm of hidden states."""
    yield Entry(f"{name}.weight", norm.weight[order])
    yield Entry(f"{name}.bias", norm.bias[order])


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


def write_tokenizer(translator: Translator, folder: Path) -> None:
    """Write the files of transformers' MarianTokenizer, which reads sentencepiece models."""
    translator.source.save(folder / "source.spm")
    translator.target.save(folder / "target.spm")
    separate = translator.source.pieces() != translator.target.pieces()
    write_vocabulary(translator.source, folder / "vocab.json")
    if separate:
        write_vocabulary(translator.target, folder / "target_vocab.json")
    special = translator.source.pieces()
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": translator.config.data.source,
        "target_lang": translator.config.data.target,
        "separate_vocabs": separate,
        "pad_token": special[PAD],
        "unk_token": special[UNK],
        "eos_token": special[EOS],
        "model_max_length": max(translator.config.training.max_length, translator.config.decoding.max_length) + 1,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_vocabulary(subwords: Subwords, path: Path) -> None:
    """Write the id of every subword.

    transformers looks up the tag of a language, such as >>fra<<, without the blank that begins its piece.
    """
    names = [re.sub("^\u2581(>>.+<<)$", r"\1", piece) for piece in subwords.pieces()]
    ids = {name: number for number, name in enumerate(names)}
    path.write_text(json.dumps(ids, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
