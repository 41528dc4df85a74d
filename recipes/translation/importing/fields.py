"""What the fields of a published model's JSON files must be, as far as they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from recipes.translation.errors import CheckpointError
from recipes.translation.files.json_fields import (
    TEXT,
    TEXTS,
    Check,
    WrongFieldError,
    each,
    either,
    fields,
    is_whole,
    maybe,
    unless_missing,
    value,
)

# Larger sizes would fill the memory before the weights contradict them
WHOLE = value("a whole number of 32 bits", lambda found: is_whole(found) and -(2**31) <= found < 2**31)
BEAM = value("a whole number from 1 to 1,000", lambda found: is_whole(found) and 1 <= found <= 1_000)
NUMBER = value(
    "a number",
    lambda found: (isinstance(found, float) or is_whole(found)) and abs(found) <= sys.float_info.max,
)
YES_OR_NO = value("true or false", lambda found: isinstance(found, bool))
SYMBOL = either(TEXT, fields({"content": unless_missing(TEXT)}))
"""A special subword, which earlier versions of transformers write as an object."""
GENERATION: Mapping[str, Check] = {
    "num_beams": maybe(BEAM),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens"), maybe(WHOLE)),
    "no_repeat_ngram_size": maybe(WHOLE),
    "length_penalty": maybe(NUMBER),
    **dict.fromkeys(("decoder_start_token_id", "forced_bos_token_id", "pad_token_id"), maybe(WHOLE)),
    "eos_token_id": maybe(either(WHOLE, each(WHOLE))),
    "bad_words_ids": maybe(each(each(WHOLE))),
    "suppress_tokens": maybe(each(WHOLE)),
}
"""Settings of translation: generation_config.json, or earlier config.json."""
CONFIG: Mapping[str, Check] = {
    **GENERATION,
    **dict.fromkeys(("vocab_size", "d_model"), WHOLE),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), WHOLE),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), WHOLE),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), WHOLE),
    **dict.fromkeys(("model_type", "activation_function"), unless_missing(TEXT)),
    "architectures": maybe(TEXTS),
    **dict.fromkeys(("scale_embedding", "tie_word_embeddings"), unless_missing(YES_OR_NO)),
    "share_encoder_decoder_embeddings": unless_missing(YES_OR_NO),
    "dropout": unless_missing(NUMBER),
    "max_position_embeddings": unless_missing(WHOLE),
    "decoder_vocab_size": maybe(WHOLE),
}
"""The architecture."""
TOKENIZER: Mapping[str, Check] = {
    **dict.fromkeys(("tokenizer_class", "source_lang", "target_lang"), maybe(TEXT)),
    **dict.fromkeys(("separate_vocabs", "legacy_behaviour"), unless_missing(YES_OR_NO)),
    "language_codes": unless_missing(TEXT),
    "num_madeup_words": unless_missing(WHOLE),
    **dict.fromkeys(("pad_token", "unk_token", "bos_token", "eos_token"), maybe(SYMBOL)),
}
FILES: Mapping[str, Mapping[str, Check]] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER,
    # Beside the sentencepiece model in it, which is checked as a whole
    "tokenizer.json": {"added_tokens": unless_missing(each(fields({"content": TEXT, "id": WHOLE})))},
    "vocab.json": {"*": WHOLE},
    "target_vocab.json": {"*": WHOLE},
    "model.safetensors.index.json": {"weight_map": fields({"*": TEXT})},
}
"""The fields of each file, by their names."""


def check_fields(found: object, name: str, where: str) -> None:
    """Raise CheckpointError if the content of the file `name` has a field that is not what it must be."""
    try:
        fields(FILES[name])(found, "")
    except WrongFieldError as error:
        raise CheckpointError(f"{where}: {error}: correct it, or download the file again") from None
