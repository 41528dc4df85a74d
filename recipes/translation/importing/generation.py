"""A published model's settings for transformers' `generate`, as settings of a run, and the names of what is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.translation.importing.folder import Folder
from recipes.translation.importing.tokenizer import Tokenizer
from recipes.translation.text.subwords import EOS, PAD

KNOWN = (
    "num_beams length_penalty max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size "
    "decoder_start_token_id pad_token_id bos_token_id use_cache transformers_version _from_model_config early_stopping "
    "forced_eos_token_id renormalize_logits output_attentions output_hidden_states remove_invalid_values"
)
"""Settings of translation that a run has, or that change nothing here: padding is never output, the symbols are in the
subwords, and of the search's end see `searches_on`."""
NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": None,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "constraints": [],
    "force_words_ids": [],
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "dola_layers": None,
    "stop_strings": [],
    "max_time": None,
    "num_return_sequences": 1,
    "token_healing": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": False,
}
"""The settings of `generate` that a run does not have, each with the value by which it changes no translation."""
SAMPLING = "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff"
"""Settings of `generate` that have an effect where `do_sample` is true."""
EXAMINED = ("forced_bos_token_id", "eos_token_id", "bad_words_ids", "suppress_tokens")
"""Settings that a run has for some of their values."""


def read_generation(files: Folder, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the settings of translation and their file, as transformers reads them: once it was config.json."""
    name = "generation_config.json"
    if (files.path / name).is_file():
        return files.json(name), name
    names = {*KNOWN.split(), *NEUTRAL, *SAMPLING.split(), *EXAMINED}
    return {key: value for key, value in config.items() if key in names}, "config.json"


def decoding_of(generation: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return the run's settings of translation; `start` is the number of tokens with which a translation begins."""
    penalty = generation.get("length_penalty")
    if penalty is None:  # transformers divides by length^length_penalty, 1 unless it is set
        penalty = 1.0
    found: dict[str, Any] = {
        "decoding.beam": generation.get("num_beams") or 1,
        "decoding.length_norm": "length",
        "decoding.length_penalty": float(penalty),
    }
    # The start is counted there: all of it in a length, and all but its first token in a number of new tokens
    if generation.get("max_new_tokens"):
        found["decoding.max_length"] = generation["max_new_tokens"] - (start - 1)
    elif generation.get("max_length"):
        found["decoding.max_length"] = generation["max_length"] - start
    shortest = max((generation.get("min_length") or 0) - start, (generation.get("min_new_tokens") or 0) - (start - 1))
    if shortest > 0:
        found["decoding.min_length"] = shortest
    if (size := generation.get("no_repeat_ngram_size") or 0) > 0:
        found["decoding.no_repeat_ngram"] = size
    return found


def searches_on(generation: Mapping[str, Any]) -> bool:
    """Return whether transformers' search goes on after as many translations have ended as end ours."""
    return (generation.get("num_beams") or 1) > 1 and generation.get("early_stopping") is not True


def lost_settings(generation: Mapping[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Return the names of settings that change what `generate` gives, and that a run does not have."""
    given = {name: value for name, value in generation.items() if value is not None}
    found = {name for name, value in given.items() if value is not False and value != NEUTRAL.get(name)}
    found -= {*KNOWN.split(), *EXAMINED}
    if not given.get("do_sample"):
        found -= set(SAMPLING.split())
    start, *tags = (tokenizer.target_ids[each] for each in tokenizer.start)
    end = tokenizer.target_ids[EOS]
    never = {tokenizer.target_ids[PAD], start}
    honoured = {
        "forced_bos_token_id": given.get("forced_bos_token_id") in (None, *tags),
        "eos_token_id": given.get("eos_token_id", end) in (end, [end]),
        "bad_words_ids": all(len(words) == 1 and words[0] in never for words in given.get("bad_words_ids", ())),
        "suppress_tokens": never.issuperset(given.get("suppress_tokens", ())),
    }
    return sorted({*found, *(name for name, yes in honoured.items() if not yes)})
