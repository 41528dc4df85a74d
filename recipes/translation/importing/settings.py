"""What a published model's settings in transformers are here: its architecture, and how `generate` translates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from models import PRESETS, TransformerConfig
from models.presets import ARCHITECTURES, Tie
from recipes.translation.errors import CheckpointError
from recipes.translation.importing.tokenizer import Tokenizer
from recipes.translation.text.subwords import EOS, PAD

PUBLISHED = {"marian": "opus_mt", "m2m_100": "m2m100", "mbart": "mbart"}
"""The name in `models.PRESETS` for each `model_type` in config.json."""


def sizes_of(config: Any, where: str) -> TransformerConfig:
    """Return the sizes and choices of the model that a transformers config describes, except `tie`.

    Raises CheckpointError for a choice that the models here do not support, with its name and value.
    """
    if config.model_type not in PUBLISHED:
        raise CheckpointError(
            f"{where}: model_type is {config.model_type!r}; it must be one of {', '.join(PUBLISHED)} (NLLB-200 is "
            "m2m_100)"
        )
    preset = PRESETS[PUBLISHED[config.model_type]]
    assert isinstance(preset, TransformerConfig)
    if not config.scale_embedding:
        raise CheckpointError(
            f"{where}: scale_embedding is false, but the models here multiply token vectors by the square root of "
            "d_model, as all published ones do"
        )
    for name in ("ffn_dim", "attention_heads"):
        encoder, decoder = (getattr(config, f"{side}_{name}") for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise CheckpointError(
                f"{where}: encoder_{name} is {encoder}, decoder_{name} {decoder}; here both sides must have the same"
            )
    lengths = preset.max_positions
    if ARCHITECTURES[preset.architecture].positions == "learned":
        lengths = config.max_position_embeddings
    try:
        return replace(
            preset,
            d_model=config.d_model,
            d_ff=config.encoder_ffn_dim,
            heads=config.encoder_attention_heads,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            dropout=config.dropout,
            activation={"silu": "swish"}.get(config.activation_function, config.activation_function),
            max_positions=lengths,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def tie_of(model: Any) -> Tie:
    """Return which of the vocabulary's matrices are tied in a transformers model, whatever config.json says."""
    source, target = (side.embed_tokens.weight for side in (model.model.encoder, model.model.decoder))
    if target is not model.lm_head.weight:
        return "none"
    return "all" if source is target else "target"


KNOWN = (
    "num_beams length_penalty max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size "
    "decoder_start_token_id pad_token_id bos_token_id use_cache transformers_version _from_model_config early_stopping "
    "forced_eos_token_id renormalize_logits output_attentions output_hidden_states remove_invalid_values"
)
"""Generation settings that a run has, or that change nothing here: padding is never output, the symbols are in the
subwords, and for the end of the search see `published_model.Imported`."""
SAMPLING = "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff"
"""Settings of `generate` that have an effect only if `do_sample` is true."""


def decoding_of(generation: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return the run's decoding settings; `start` is the number of tokens that a translation begins with."""
    found: dict[str, Any] = {
        "decoding.beam": generation.get("num_beams", 1),
        "decoding.length_norm": "length",
        # transformers divides by length^length_penalty, which is 1 unless it is set
        "decoding.length_penalty": generation.get("length_penalty", 1.0),
    }
    # transformers counts the start: all of it in a length, and all but its first token in a number of new tokens
    if generation.get("max_new_tokens"):
        found["decoding.max_length"] = generation["max_new_tokens"] - (start - 1)
    elif generation.get("max_length"):
        found["decoding.max_length"] = generation["max_length"] - start
    shortest = max(generation.get("min_length", 0) - start, generation.get("min_new_tokens", 0) - (start - 1))
    if shortest > 0:
        found["decoding.min_length"] = shortest
    if (size := generation.get("no_repeat_ngram_size", 0)) > 0:
        found["decoding.no_repeat_ngram"] = size
    return found


def lost_settings(generation: Mapping[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Return the names of settings that change what `generate` returns, and that a run does not have."""
    # With a scale of 1, transformers' own processor leaves the logits as they are
    neutral = {**GenerationConfig._get_default_generation_params(), "guidance_scale": 1.0}
    found = {
        name
        for name, value in generation.items()
        if value is not False and value not in ([], {}) and value != neutral.get(name)
    }
    found -= set(KNOWN.split())
    if not generation.get("do_sample"):
        found -= set(SAMPLING.split())
    start, *tags = (tokenizer.target_ids[each] for each in tokenizer.target.symbols.start)
    end = tokenizer.target_ids[EOS]
    never = (tokenizer.target_ids[PAD], start, *tags)
    honoured = {  # only some of their values are
        "forced_bos_token_id": generation.get("forced_bos_token_id") in (None, *tags),
        "eos_token_id": generation.get("eos_token_id", end) in (end, [end]),
        "bad_words_ids": all(words in ([each] for each in never) for words in generation.get("bad_words_ids", [])),
        "suppress_tokens": all(each in never for each in generation.get("suppress_tokens", [])),
    }
    return sorted(found - honoured.keys() | {name for name, yes in honoured.items() if not yes})
