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
from pathlib import Path
from typing import Any

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

from models import EncoderDecoder, TransformerConfig
from models.huggingface_names import huggingface_names
from recipes.translation.errors import ConfigError
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK, Subwords


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
    weights = weights_of(translator.model, order_of(transformer_sizes(translator)))
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


def weights_of(model: EncoderDecoder, order: Tensor) -> dict[str, Tensor]:
    """Return every weight under its name in transformers, with the dimensions of hidden states permuted."""
    found: dict[str, Tensor] = {}
    for name, own in model.state_dict().items():
        tensor = own.cpu().float()
        if re.search(r"norm\.|output\.|outer\.", name):  # of hidden states, or added to them
            tensor = tensor[order]
        elif tensor.dim() == 2:
            tensor = tensor[:, order]
        names = huggingface_names(name)
        found.update(zip(names, tensor.chunk(len(names)), strict=True))
    found["final_logits_bias"] = found["final_logits_bias"][None]
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
