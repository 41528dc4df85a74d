"""Any model class of Hugging Face, made tiny: its default configuration with small numbers for large ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.integrations.transformers_model import configurations

VOCAB, TIME = 99, 7
IMAGE = 5
"""The token that stands for an image where a configuration leaves the choice; a picture has four."""
LARGEST = 80_000_000
"""Parameters; what is larger was not shrunk."""

RULES = [
    (r"vocab_size|^n_vocab$|bigram_size", VOCAB),
    (r"per_layer_input$", 8),
    (r"(key_value_heads|kv_heads)$", 0),  # replaced by a shape's own
    (r"(head_dim|d_kv|head_size|d_head|_head_dim)$", 0),
    (r"(^n_heads?|num_heads|attention_heads|_heads)$", 0),
    (r"(hidden_size|d_model|n_embd|embd?_dim|hidden_dim|embedding_size|embedding_dim|model_dim|d_embed)$|^dim$", 32),
    (r"(proj_dim|projection_dim|projection_size|condition_dim|_width|_hidden_size|output_dim|out_dim)$", 32),
    (r"(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|inner_dim|n_inner|mlp_dim|ffn_size)$", 64),
    (r"(hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|_layers|depth)$", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"(experts_per_tok|moe_topk|moe_k|top_k_experts|experts_per_token|top_k)$", 2),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"(max_position_embeddings|n_positions|_positions|max_seq_len|seq_length|context_length|n_ctx)$", 64),
    (r"upsample_groups$", 32),
    (r"(lora_rank|time_step_rank)$", 16),
    (r"^(image_size|crop_size)$", 32),
    (r"^(patch_size)$", 8),
    (r"(num_queries|num_query_tokens)$", 4),
]
SHAPES = [(4, 2, 8), (4, 4, 8), (2, 2, 16), (1, 1, 32), (1, 1, 64), (1, 1, 128)]
"""Heads, heads of keys and values, and their size: what suits one architecture does not suit another."""
IDENTITY = ("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "_name_or_path")


class NotTinyError(Exception):
    """A class that these rules do not make tiny, with the reason."""


def shrunk(settings: dict[str, Any], shape: tuple[int, int, int]) -> dict[str, Any]:
    """A configuration's dictionary with small numbers."""
    layers = settings.get("num_hidden_layers") or settings.get("num_layers")
    return {name: _smaller(str(name), value, shape, layers) for name, value in settings.items()}


def _smaller(name: str, value: Any, shape: tuple[int, int, int], layers: int | None) -> Any:
    if name == "per_layer_config":
        return {}
    if isinstance(value, dict):
        return shrunk(value, shape)
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if name == "use_cache":
        return False
    if isinstance(value, list) and len(value) > 2 and (len(value) == layers or name.endswith("layer_types")):
        first = _smaller_number("intermediate_size", value[0], shape) if type(value[0]) is int else value[0]
        return [first, next((v for v in value if v != value[0] and type(v) is not int), first)]
    if isinstance(value, list) and name.endswith("mrope_section"):
        half = shape[2] // 2
        return [half - 2 * (half // 3), half // 3, half // 3]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return _smaller_number(name, value, shape)


def _smaller_number(name: str, value: int, shape: tuple[int, int, int]) -> int:
    if re.search(r"token_(id|index)$|_ids?$", name):
        return value if value < VOCAB else 5 + len(name) % 7
    number = next((small for pattern, small in RULES if re.search(pattern, name)), value)
    if number == 0:
        heads, key_value_heads, size = shape
        number = key_value_heads if "kv_heads" in name or "key_value" in name else heads
        if re.search(r"head_dim|d_kv|head_size|d_head", name):
            number = size if not name.startswith("qk_") else 8
    if number == 32 and shape[2] > 32:
        number = shape[2]  # rotary sections of a fixed size
    return min(value, number) if value > 0 else value


def configured(config_class: Any, shape: tuple[int, int, int], changes: dict[str, Any]) -> Any:
    try:
        settings = config_class().to_dict()
    except ValueError:  # a default that its own validation refuses
        settings = config_class(**changes).to_dict()
    for name in IDENTITY:
        settings.pop(name, None)
    if settings.get("is_encoder_decoder"):  # T5's names no start, and its labels cannot be shifted without
        changes = {"decoder_start_token_id": 2, "pad_token_id": 1} | changes
    return config_class(**merged(shrunk(settings, shape), changes))


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with those of `changes`, which may go into the dictionaries inside."""
    both = dict(settings)
    for name, value in changes.items():
        inside = isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = merged(both[name], value) if inside else value
    return both


def built(model_class: Any, changes: dict[str, Any], shapes: Sequence[tuple[int, int, int]]) -> Iterator[Any]:
    """The class at every one of these shapes of attention at which it can be built, in training mode."""
    error: Exception = NotTinyError("no shape")
    found = False
    for shape in shapes:
        try:
            config = configured(model_class.config_class, shape, changes)
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(config).parameters())
            if count > LARGEST:
                raise NotTinyError(f"{count / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = model_class(config).float().train()
        except Exception as e:
            error = e
            continue
        found = True
        yield model
    if not found:
        raise NotTinyError(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}") from error


def batches(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs that may suit the class, with labels, the second sentence shorter; text alone first."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(20, VOCAB, (2, TIME), generator=generator)
    ids, mask = labels.clone(), torch.ones_like(labels)
    labels[1, -2:], mask[1, -2:] = -100, 0
    names = inspect.signature(model.forward).parameters
    text = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    yield text
    yield {"input_ids": ids, "labels": labels}
    rest = {"decoder_input_ids": ids, "labels": labels} if "decoder_input_ids" in names else text
    mels = [getattr(c, "num_mel_bins", None) or getattr(c, "feature_size", None) for c in configurations(model.config)]
    for bins in sorted({m for m in mels if m} | {80}):
        for frames in (64, 128):
            features = torch.randn(2, bins, frames, generator=generator)
            yield rest | {"input_features": features}
            yield rest | {"input_features": features.transpose(1, 2).contiguous()}
    yield text | {"bbox": torch.zeros(2, TIME, 4)}
    yield text | {"mm_token_type_ids": torch.zeros_like(ids)}
    patches = torch.randn(2, 8, 34, generator=generator)
    patches[..., :2] = 1.0  # row and column
    yield {"flattened_patches": patches, "labels": labels}
    yield rest | {"input_values": torch.randn(2, 2000, generator=generator)}
    images = [getattr(c, "image_size", None) for c in configurations(model.config)]
    for size in sorted({s for s in images if isinstance(s, int)} | {32}):
        pixels = torch.randn(2, 3, size, size, generator=generator)
        yield {"pixel_values": pixels} | rest
        yield {"pixel_values": pixels} | text
        yield {"pixel_values": pixels, "labels": labels}
        shown = torch.cat([torch.full((2, 4), IMAGE), ids], 1)
        ignored = torch.full((2, 4), -100)
        seen = {"pixel_values": pixels, "input_ids": shown, "labels": torch.cat([ignored, labels], 1)}
        yield seen
        yield seen | {"qformer_input_ids": ids}


def working(
    model_class: Any, changes: dict[str, Any], shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> tuple[Any, dict[str, Tensor]]:
    """The class made tiny, and a batch of which it makes a loss; raises NotTinyError with the last reason."""
    error: Exception = NotTinyError("no batch")
    for model in built(model_class, changes, shapes):
        for number, batch in enumerate(batches(model)):
            try:
                outputs = model(**batch)
                if outputs["loss"].isfinite():
                    return model, batch
            except Exception as e:
                error = e if number == 0 or isinstance(error, NotTinyError) else error
    raise NotTinyError(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}") from error
