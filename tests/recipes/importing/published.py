"""Folders as transformers' `save_pretrained` writes them: the real architectures, tiny, with random weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import sentencepiece
import torch

from recipes.translation.data.builtin_corpus import pairs
from tests.recipes.trained_elsewhere import trained_elsewhere

with warnings.catch_warnings(action="ignore"):
    from transformers import (
        AutoModelForSeq2SeqLM,
        GenerationConfig,
        M2M100Config,
        M2M100ForConditionalGeneration,
        M2M100Tokenizer,
        MarianConfig,
        MarianMTModel,
        MarianTokenizer,
        MBart50Tokenizer,
        MBartConfig,
        MBartForConditionalGeneration,
        MBartTokenizer,
        NllbTokenizer,
        PreTrainedModel,
    )

SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "scale_embedding": True,
    "max_position_embeddings": 64,
}


def made_up_words(side: int) -> list[str]:
    draw = Random(side)
    return ["".join(draw.choices(("ab", "cd", "efg", "h", "ij", "kl", "mno"), k=3)) for _ in range(300)]


@cache
def spm(side: int, kind: str = "unigram", size: int = 300) -> bytes:
    """A sentencepiece model of one side of the built-in corpus, with sentencepiece's own special ids."""
    sentences = [*(pair[side] for pair in pairs(300, 1)), *made_up_words(side)]
    return trained_elsewhere(sentences, vocab_size=size, model_type=kind)


def pieces_of(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]


def save(model: PreTrainedModel, folder: Path, **generation: Any) -> None:
    """Save a model with large random weights, whose translations differ from sentence to sentence."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "shared" in name or "embed_tokens" in name:
                parameter.normal_(std=0.25)
            elif "encoder_attn.out_proj" in name:
                parameter.normal_(std=1.5)  # the source has a say
            else:
                parameter.normal_(std=0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    model.generation_config = GenerationConfig(**generation)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder)


def marian(folder: Path, *, separate: bool = False, **changes: Any) -> Path:
    """An OPUS-MT model: `changes` are of its config.json."""
    folder.mkdir(parents=True)
    (folder / "source.spm").write_bytes(spm(0))
    (folder / "target.spm").write_bytes(spm(1))
    source, target = pieces_of(spm(0)), pieces_of(spm(1))
    # Some pieces that a text may have are in no vocabulary, as in the published ones
    both = [*source[:270], *target[:280]]
    vocabularies = [list(dict.fromkeys(["</s>", "<unk>", *sides, ">>xx<<", "<pad>"])) for sides in (both, both)]
    if separate:
        vocabularies = [["</s>", "<unk>", *side, "<pad>"] for side in (source, target[:-3])]
    ids = [{piece: number for number, piece in enumerate(pieces)} for pieces in vocabularies]
    for name, each in zip(("vocab.json", "target_vocab.json")[: 1 + separate], ids, strict=False):
        (folder / name).write_text(json.dumps(each))
    own = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": "en",
        "target_lang": "de",
        "separate_vocabs": separate,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    pad = ids[1]["<pad>"]
    config = MarianConfig(
        **{
            **SIZES,
            "vocab_size": len(ids[0]),
            "decoder_vocab_size": len(ids[1]),
            "activation_function": "swish",
            "pad_token_id": pad,
            "eos_token_id": 0,
            "decoder_start_token_id": pad,
            "forced_eos_token_id": 0,
            "share_encoder_decoder_embeddings": not separate,
            **changes,
        }
    )
    symbols = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad}
    save(MarianMTModel(config), folder, **symbols, num_beams=3, max_length=30, bad_words_ids=[[pad]])
    return folder


def m2m100(folder: Path, *, kind: str = "bpe", **changes: Any) -> Path:
    """An M2M-100 model."""
    folder.mkdir(parents=True)
    model = spm(0, kind)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(model)[:-2], "madeupword0000"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    own = {
        "tokenizer_class": "M2M100Tokenizer",
        "language_codes": "m2m100",
        "num_madeup_words": 8,
        "additional_special_tokens": ["__en__", "__de__"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    config = M2M100Config(**{**SIZES, "vocab_size": len(names) + 108, **changes})
    save(M2M100ForConditionalGeneration(config), folder, **starting(2), num_beams=5, max_length=30)
    return folder


def starting(token: int) -> dict[str, int]:
    return {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": token}


def nllb(folder: Path, **changes: Any) -> Path:
    """An NLLB-200 model: M2M-100's with another tokenizer."""
    folder.mkdir(parents=True)
    (folder / "sentencepiece.bpe.model").write_bytes(spm(0, "bpe"))
    languages = ["deu_Latn", "eng_Latn", "zho_Hans"]
    tokenizer = NllbTokenizer.from_pretrained(
        folder, src_lang="eng_Latn", tgt_lang="deu_Latn", additional_special_tokens=languages
    )
    tokenizer.save_pretrained(folder)
    config = M2M100Config(**{**SIZES, "vocab_size": len(tokenizer) + 2, **changes})
    save(M2M100ForConditionalGeneration(config), folder, **starting(2), num_beams=1, max_length=30)
    return folder


def mbart(folder: Path, *, fifty: bool = True, **changes: Any) -> Path:
    """An mBART-50 model, or an older mBART one, whose decoder starts with the language."""
    folder.mkdir(parents=True)
    (folder / "sentencepiece.bpe.model").write_bytes(spm(0))
    kind = MBart50Tokenizer if fifty else MBartTokenizer
    tokenizer = kind.from_pretrained(folder, src_lang="en_XX", tgt_lang="de_DE")
    tokenizer.save_pretrained(folder)
    start = 2 if fifty else tokenizer.convert_tokens_to_ids("de_DE")
    config = MBartConfig(
        **{
            **SIZES,
            "vocab_size": len(tokenizer),
            "activation_function": "relu" if fifty else "gelu",
            "decoder_start_token_id": start,
            **changes,
        }
    )
    save(MBartForConditionalGeneration(config), folder, **starting(start), num_beams=5, max_length=30)
    return folder


def model_of(folder: Path) -> Any:
    """transformers' own model."""
    with warnings.catch_warnings(action="ignore"):
        return AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def tokenizer_of(folder: Path, source: str = "", target: str = "") -> Any:
    """transformers' own tokenizer, of these languages if the model has tags for them."""
    with warnings.catch_warnings(action="ignore"):
        name = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        kinds: Sequence[Any] = (MarianTokenizer, M2M100Tokenizer, NllbTokenizer, MBart50Tokenizer, MBartTokenizer)
        (kind,) = (each for each in kinds if each.__name__ == name)
        tokenizer = kind.from_pretrained(folder)
    if source:
        tokenizer.src_lang, tokenizer.tgt_lang = source, target
    return tokenizer
