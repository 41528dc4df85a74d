"""The weights of a published model under the names of the models here.

Shapes: V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models import TransformerConfig, make_transformer
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
    # The vocabulary first, whose file contradicts a width that could not be built
    found = dict(_of_vocabulary(theirs, sizes, source_ids, target_ids))
    # With one layer: of as many as config.json may promise, no model need be built
    one_layer = replace(sizes, encoder_layers=1, decoder_layers=1, tie="none")
    with torch.device("meta"):
        model = make_transformer(one_layer, len(source_ids), len(target_ids))
    for first, own in model.named_parameters():
        layers = getattr(sizes, f"{first.partition('.')[0]}_layers") if ".layers.0." in first else 1
        for number in range(layers):
            name = first.replace(".layers.0.", f".layers.{number}.")
            if name not in found:
                found[name] = _joined(theirs, name, own)
    if ARCHITECTURES[sizes.architecture].positions != "learned":
        for side in ("encoder", "decoder"):
            _check_positions(theirs, sizes, side)
    theirs.check_all_used()
    return found


def _joined(theirs: Weights, name: str, own: Tensor) -> Tensor:
    """Return a weight that has the shape of `own` and is divided into one part or several there."""
    names = huggingface_names(name)
    if name.endswith("learned.weight"):
        return theirs.take(names[0], own.size(0) + OFFSET, own.size(1))[OFFSET:]
    parts = zip(names, own.chunk(len(names)), strict=True)
    return torch.cat([theirs.take(each, *part.shape) for each, part in parts])


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
