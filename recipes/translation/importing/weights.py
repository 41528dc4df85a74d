"""The weights of a published model under the names of the models here.

Shapes: V vocabulary, D model width, F inner width of a feed-forward network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models import TransformerConfig
from models.embedding import positions_in_halves
from models.huggingface_names import huggingface_names
from models.presets import ARCHITECTURES
from recipes.translation.errors import CheckpointError
from recipes.translation.importing.folder import Weights

Entry = tuple[str, Tensor]
"""A weight under its name here."""
OFFSET = 2
"""Rows of mBART's learned positions before that of the first token."""


def our_weights(
    theirs: Weights, sizes: TransformerConfig, source_ids: Sequence[int], target_ids: Sequence[int]
) -> dict[str, Tensor]:
    """Return every weight of the model; tied ones under each of their names.

    `source_ids` and `target_ids` are the ids there, in the order of ours: rows of the vocabulary are permuted, which
    changes no probability.

    Raises CheckpointError for a weight that is missing, has another shape, or is left over.
    """
    found = dict(_of_vocabulary(theirs, sizes, source_ids, target_ids))
    for side, layers in (("encoder", sizes.encoder_layers), ("decoder", sizes.decoder_layers)):
        for number in range(layers):
            found |= _of_layer(theirs, sizes, side, number)
        found |= _around_layers(theirs, sizes, side)
    theirs.check_all_used()
    return found


def _of_vocabulary(
    theirs: Weights, sizes: TransformerConfig, source_ids: Sequence[int], target_ids: Sequence[int]
) -> Iterator[Entry]:
    source = "model.encoder.embed_tokens.weight"
    target = "model.decoder.embed_tokens.weight"
    names: dict[str, tuple[str, ...]] = {"src": (source,), "tgt": (target,), "out": ("lm_head.weight",)}
    if sizes.tie == "all":
        same = (source, target, "lm_head.weight", "model.shared.weight")
        names = {"src": same, "tgt": same, "out": same}
    elif sizes.tie == "target":
        names["tgt"] = ("lm_head.weight", target)
        names["out"] = names["tgt"]
    width = sizes.d_model
    # Their rows are as many as there are ids, of which each is a row here
    weight_VD = theirs.take_same(names["out"], len(target_ids), width)[list(target_ids)]
    yield "generator.weight", weight_VD
    for side, ids, name in (("src", source_ids, "src_embed"), ("tgt", target_ids, "tgt_embed")):
        if names[side] == names["out"]:  # one matrix, which may take gigabytes
            yield f"{name}.lookup.weight", weight_VD
        else:
            yield f"{name}.lookup.weight", theirs.take_same(names[side], len(ids), width)[list(ids)]
    bias_V = weight_VD.new_zeros(len(target_ids))
    if "final_logits_bias" in theirs:
        bias_V = theirs.take("final_logits_bias", 1, len(target_ids))[0]
    yield "generator.bias", bias_V[list(target_ids)]


def _of_layer(theirs: Weights, sizes: TransformerConfig, side: str, number: int) -> Iterator[Entry]:
    attentions = ("self_attention", "memory_attention")[: 1 + (side == "decoder")]
    parts = [f"{attention}.{part}" for attention in attentions for part in ("query", "key_value", "output")]
    norms = [f"residuals.{place}.norm" for place in range(len(attentions) + 1)]
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(parts, (sizes.d_model, sizes.d_model)),
        "feed_forward.inner": (sizes.d_ff, sizes.d_model),
        "feed_forward.outer": (sizes.d_model, sizes.d_ff),
        **dict.fromkeys(norms, (sizes.d_model,)),
    }
    for name, shape in shapes.items():
        yield from _of_module(theirs, f"{side}.layers.{number}.{name}", *shape)


def _of_module(theirs: Weights, module: str, *shape: int) -> Iterator[Entry]:
    """Yield a module's weight, each part of it of this shape, and bias."""
    for name, size in ((f"{module}.weight", shape), (f"{module}.bias", shape[:1])):
        yield name, torch.cat([theirs.take(each, *size) for each in huggingface_names(name)])


def _around_layers(theirs: Weights, sizes: TransformerConfig, side: str) -> Iterator[Entry]:
    how = ARCHITECTURES[sizes.architecture]
    embedding = {"encoder": "src_embed", "decoder": "tgt_embed"}[side]
    if how.positions == "learned":
        name = f"model.{side}.embed_positions.weight"
        yield f"{embedding}.learned.weight", theirs.take(name, sizes.max_positions + OFFSET, sizes.d_model)[OFFSET:]
    else:
        _check_positions(theirs, sizes, side)
    if how.norm:
        yield from _of_module(theirs, f"{embedding}.norm", sizes.d_model)
    if sizes.norm == "pre":
        yield from _of_module(theirs, f"{side}.norm", sizes.d_model)


def _check_positions(theirs: Weights, sizes: TransformerConfig, side: str) -> None:
    """Raise CheckpointError if the file has a table of positions, as in earlier versions, that is not the usual one."""
    steps = sizes.d_model // 2
    first = 0
    if sizes.architecture == "m2m100":
        steps -= 1
        first = OFFSET
    for name in (f"model.{side}.embed_positions.weight", f"model.{side}.embed_positions.weights"):
        table = theirs.take_any(name)
        if table is None:
            continue
        expected = positions_in_halves(first, len(table), sizes.d_model, like=table, steps=steps)
        if table.shape[1:] != expected.shape[1:] or not torch.allclose(table[first:], expected, atol=1e-3):
            raise CheckpointError(
                f"{theirs.path}: {name} is not the table of sines and cosines of {sizes.architecture}"
            )
