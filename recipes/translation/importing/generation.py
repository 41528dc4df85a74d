"""A published model's settings for transformers' `generate`, as a run's settings, and the names of those lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from recipes.translation.importing.tokenizer import Tokenizer
from recipes.translation.text.subwords import EOS, PAD

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
