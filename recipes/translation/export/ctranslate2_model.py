"""Write a model in the format of CTranslate2, an engine for fast translation on CPUs and GPUs.

The folder has CTranslate2's own files (model.bin, config.json, vocabularies) and the run's config.yaml and subword
models, so that it has everything that translation needs: `python -m recipes.translation translate --engine ctranslate2
--run FOLDER`, or `ctranslate2.Translator(FOLDER)` in any program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from ctranslate2 import specs
from ctranslate2.specs import common_spec, model_spec
from torch import Tensor, nn

from models.attention import Attention
from models.transformer import FeedForward
from recipes.translation.export.lost_settings import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.files.tensors import describe_tensors
from recipes.translation.run_folder.checkpoint import SavedModel, save_belongings
from recipes.translation.run_folder.made_from import note_origin
from recipes.translation.run_folder.translator import model_on_meta
from recipes.translation.text.model_text import longest_of
from recipes.translation.text.subwords import EOS, UNK


class SavedVariable(model_spec.Variable):
    """Weights of a saved model, stacked along their rows, as a CTranslate2 variable that is read on demand."""

    def __init__(self, saved: Mapping[str, Tensor], names: Sequence[str], dtype: str = "float32") -> None:
        self.saved = saved
        self.names = names
        self._dtype = dtype

    @property
    def shape(self) -> list[int]:
        """Return the shape of the stacked weights."""
        shapes = [describe_tensors(self.saved)[name].shape for name in self.names]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    @property
    def dtype(self) -> str:
        """Return the name of the type that they are written in."""
        return self._dtype

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """Return an array that CTranslate2 may write to."""
        values: numpy.ndarray[Any, Any] = self._read_rows().numpy()
        return values

    def num_bytes(self) -> int:
        """Return how many bytes are written."""
        return int(torch.empty(self.shape, dtype=getattr(torch, self._dtype), device="meta").nbytes)

    def to_bytes(self) -> bytes:
        """Return the bytes that are written."""
        return self._read_rows().view(torch.uint8).numpy().tobytes()

    def _read_rows(self) -> Tensor:
        rows = torch.cat([self.saved[name].cpu().float() for name in self.names])  # a copy, even of a single weight
        return rows.to(getattr(torch, self._dtype))

    def _to(self, dtype: str) -> SavedVariable:
        return SavedVariable(self.saved, self.names, dtype)

    def _equal(self, other: SavedVariable) -> bool:
        return self.names == other.names  # a tied weight is saved once


class SavedVariables:
    """Every weight of a saved model, by its place in `model`, which is on "meta"."""

    def __init__(self, saved: SavedModel, model: nn.Module) -> None:
        self.saved = saved.weights
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def of(self, *parameters: Tensor) -> SavedVariable:
        """Return the weights, stacked along their rows."""
        return SavedVariable(self.saved, [self.names[id(parameter)] for parameter in parameters])


def write(saved: SavedModel, folder: Path, quantization: str | None) -> None:
    """Replace `folder` with one that has the model in CTranslate2's format; `quantization` None keeps float32.

    Only one weight at a time is in memory and, with an integer `quantization`, the quantized form of all of them.
    """
    spec = spec_of(saved)
    spec.validate()
    spec.optimize(quantization=quantization)
    with replaced_folder(folder) as new:
        spec.save(str(new))
        save_belongings(new, saved)
        note_origin(new, saved.digest)


def spec_of(saved: SavedModel) -> specs.TransformerSpec:
    """Return CTranslate2's description of the model, with the weights in float32."""
    config = saved.config
    sizes = transformer_sizes(saved)
    model = model_on_meta(sizes, saved.source, saved.target)
    variables = SavedVariables(saved, model)
    spec = specs.TransformerSpec.from_config(
        (sizes.encoder_layers, sizes.decoder_layers),
        sizes.heads,
        pre_norm=sizes.norm == "pre",
        activation=getattr(common_spec.Activation, sizes.activation.upper()),
        layernorm_embedding=isinstance(model.src_embed.norm, nn.LayerNorm),
    )
    # A source also has its end symbol, and a target its start symbol and perhaps a tag
    longest = longest_of(config.training, config.decoding) + 2
    for side, stack, embedding in (
        (spec.encoder, model.encoder, model.src_embed),
        (spec.decoder, model.decoder, model.tgt_embed),
    ):
        if isinstance(embedding.norm, nn.LayerNorm):
            fill_norm(side.layernorm_embedding, embedding.norm, variables)
        if embedding.positions == "learned":
            side.position_encodings.encodings = variables.of(embedding.learned.weight)
        else:
            positions = embedding.positions_of(0, longest, like=torch.empty(0, sizes.d_model))
            side.position_encodings.encodings = positions.numpy()
        for layer_spec, layer in zip(side.layer, stack.layers, strict=True):
            fill_layer(layer_spec, layer, variables)
        if isinstance(stack.norm, nn.LayerNorm):
            fill_norm(side.layer_norm, stack.norm, variables)
        embeddings = side.embeddings
        if isinstance(embeddings, list):  # an encoder may have several in CTranslate2
            embeddings = embeddings[0]
        embeddings.weight = variables.of(embedding.lookup.weight)
    fill_linear(spec.decoder.projection, model.generator, variables)
    spec.register_source_vocabulary(saved.source.pieces())
    spec.register_target_vocabulary(saved.target.pieces())
    special = saved.target.pieces()
    start = special[saved.target.symbols.start[0]]
    spec.config.bos_token = start
    spec.config.eos_token = special[EOS]
    spec.config.unk_token = special[UNK]
    spec.config.decoder_start_token = start
    spec.config.add_source_bos = False
    spec.config.add_source_eos = saved.source.symbols.only_end
    spec.config.layer_norm_epsilon = 1e-5
    return spec


def fill_layer(spec: Any, layer: nn.Module, variables: SavedVariables) -> None:
    """Fill the description of an encoder's or a decoder's layer."""
    norms = [residual.norm for residual in layer.residuals]  # type: ignore[union-attr]
    # Queries, keys and values are one matrix there, in this order
    attention: Attention = layer.self_attention  # type: ignore[assignment]
    both = (attention.query, attention.key_value)
    spec.self_attention.linear[0].weight = variables.of(*(linear.weight for linear in both))
    spec.self_attention.linear[0].bias = variables.of(*(linear.bias for linear in both))
    fill_linear(spec.self_attention.linear[1], attention.output, variables)
    fill_norm(spec.self_attention.layer_norm, norms[0], variables)
    if memory := getattr(layer, "memory_attention", None):
        for part, linear in zip(spec.attention.linear, (memory.query, memory.key_value, memory.output), strict=True):
            fill_linear(part, linear, variables)
        fill_norm(spec.attention.layer_norm, norms[1], variables)
    network: FeedForward = layer.feed_forward  # type: ignore[assignment]
    fill_linear(spec.ffn.linear_0, network.inner, variables)
    fill_linear(spec.ffn.linear_1, network.outer, variables)
    fill_norm(spec.ffn.layer_norm, norms[-1], variables)


def fill_linear(spec: common_spec.LinearSpec, linear: nn.Linear, variables: SavedVariables) -> None:
    """Fill a matrix and its bias."""
    spec.weight = variables.of(linear.weight)
    spec.bias = variables.of(linear.bias)


def fill_norm(spec: common_spec.LayerNormSpec, norm: nn.LayerNorm, variables: SavedVariables) -> None:
    """Fill a layer norm's gain and bias."""
    spec.gamma = variables.of(norm.weight)
    spec.beta = variables.of(norm.bias)
