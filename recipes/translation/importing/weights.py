"""The weights of a published model under the names of the models here.

Shapes: V vocabulary, D model width, F inner width of a feed-forward network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models import TransformerConfig
from models.embedding import positions_in_halves
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
    there = f"model.{side}.layers.{number}"
    here = f"{side}.layers.{number}"
    attentions = [("self_attn", "self_attention")]
    if side == "decoder":
        attentions.append(("encoder_attn", "memory_attention"))
    for place, (name, own) in enumerate(attentions):
        yield from _attention(theirs, sizes, f"{there}.{name}", f"{here}.{own}")
        yield from _norm(theirs, sizes, f"{there}.{name}_layer_norm", f"{here}.residuals.{place}.norm")
    yield f"{here}.feed_forward.inner.weight", theirs.take(f"{there}.fc1.weight", sizes.d_ff, sizes.d_model)
    yield f"{here}.feed_forward.inner.bias", theirs.take(f"{there}.fc1.bias", sizes.d_ff)
    yield f"{here}.feed_forward.outer.weight", theirs.take(f"{there}.fc2.weight", sizes.d_model, sizes.d_ff)
    yield f"{here}.feed_forward.outer.bias", theirs.take(f"{there}.fc2.bias", sizes.d_model)
    yield from _norm(theirs, sizes, f"{there}.final_layer_norm", f"{here}.residuals.{len(attentions)}.norm")


def _attention(theirs: Weights, sizes: TransformerConfig, there: str, here: str) -> Iterator[Entry]:
    width = sizes.d_model
    for kind, shape in (("weight", (width, width)), ("bias", (width,))):
        yield f"{here}.query.{kind}", theirs.take(f"{there}.q_proj.{kind}", *shape)
        keys = theirs.take(f"{there}.k_proj.{kind}", *shape)
        values = theirs.take(f"{there}.v_proj.{kind}", *shape)
        yield f"{here}.key_value.{kind}", torch.cat((keys, values))
        yield f"{here}.output.{kind}", theirs.take(f"{there}.out_proj.{kind}", *shape)


def _norm(theirs: Weights, sizes: TransformerConfig, there: str, here: str) -> Iterator[Entry]:
    yield f"{here}.weight", theirs.take(f"{there}.weight", sizes.d_model)
    yield f"{here}.bias", theirs.take(f"{there}.bias", sizes.d_model)


def _around_layers(theirs: Weights, sizes: TransformerConfig, side: str) -> Iterator[Entry]:
    how = ARCHITECTURES[sizes.architecture]
    embedding = {"encoder": "src_embed", "decoder": "tgt_embed"}[side]
    if how.positions == "learned":
        name = f"model.{side}.embed_positions.weight"
        yield f"{embedding}.learned.weight", theirs.take(name, sizes.max_positions + OFFSET, sizes.d_model)[OFFSET:]
    else:
        _check_positions(theirs, sizes, side)
    if how.norm:
        yield from _norm(theirs, sizes, f"model.{side}.layernorm_embedding", f"{embedding}.norm")
    if sizes.norm == "pre":
        yield from _norm(theirs, sizes, f"model.{side}.layer_norm", f"{side}.norm")


def _check_positions(theirs: Weights, sizes: TransformerConfig, side: str) -> None:
    """Raise CheckpointError if the file has a table of positions, as of earlier versions, that is not the usual one."""
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
