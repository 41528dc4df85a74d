"""The names that Hugging Face transformers gives to the weights of the Transformers here, in all models like BART."""

from __future__ import annotations

import re

RENAMED = (
    (r"^generator\.weight", "lm_head.weight"),
    (r"^generator\.bias", "final_logits_bias"),
    (r"^(encoder|decoder)\.norm", r"model.\1.layer_norm"),
    (r"^(encoder|decoder)\.", r"model.\1."),
    (r"_embed\.norm", "_embed.layernorm_embedding"),
    (r"^src_embed\.", "model.encoder."),
    (r"^tgt_embed\.", "model.decoder."),
    (r"residuals\.0\.norm", "self_attn_layer_norm"),
    (r"(decoder\..*)residuals\.1\.norm", r"\1encoder_attn_layer_norm"),
    (r"residuals\.\d\.norm", "final_layer_norm"),
    (r"self_attention\.", "self_attn."),
    (r"memory_attention\.", "encoder_attn."),
    (r"query\.", "q_proj."),
    (r"output\.", "out_proj."),
    (r"feed_forward\.inner", "fc1"),
    (r"feed_forward\.outer", "fc2"),
    (r"lookup\.", "embed_tokens."),
    (r"learned\.", "embed_positions."),
)
"""What parts of a name become; all are applied, in this order."""


def huggingface_names(name: str) -> list[str]:
    """Return a weight's names in transformers: two for keys and values, which are one matrix here."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    if "key_value." not in name:
        return [name]
    return [name.replace("key_value.", f"{part}_proj.") for part in "kv"]
