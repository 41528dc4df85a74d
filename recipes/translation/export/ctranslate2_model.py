"""Write a model in the format of CTranslate2, an engine for fast translation on CPUs and GPUs.

The folder has CTranslate2's own files (model.bin, config.json, vocabularies), and beside them the run's config.yaml and
subword models, so that it is all that translation needs: `python -m recipes.translation translate --engine ctranslate2
--run FOLDER`, or `ctranslate2.Translator(FOLDER)` in any program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from ctranslate2 import specs
from ctranslate2.specs import attention_spec, common_spec
from torch import Tensor, nn

from models.attention import Attention
from models.presets import Activation
from models.transformer import EncoderLayer, FeedForward
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import save_belongings
from recipes.translation.run_folder.made_from import note_origin
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import EOS, UNK

ACTIVATIONS: dict[Activation, Any] = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "swish": common_spec.Activation.SWISH,
}
"""CTranslate2's own names."""


def write(translator: Translator, folder: Path, quantization: str | None, weights: str = "") -> None:
    """Replace `folder` by one with the model in CTranslate2's format; `quantization` None keeps float32.

    `weights`, the SHA-256 of the model's own, tells later whether it is still that of the run.
    """
    spec = spec_of(translator)
    spec.validate()
    spec.optimize(quantization=quantization)
    with replaced_folder(folder) as new:
        spec.save(str(new))
        save_belongings(new, translator)
        note_origin(new, weights)


def spec_of(translator: Translator) -> specs.TransformerSpec:
    """Return the model as CTranslate2 describes one, with its weights in float32."""
    config = translator.config
    sizes = transformer_sizes(translator)
    model = translator.model
    spec = specs.TransformerSpec.from_config(
        (sizes.encoder_layers, sizes.decoder_layers),
        sizes.heads,
        pre_norm=sizes.norm == "pre",
        activation=ACTIVATIONS[sizes.activation],
    )
    # A source has its end symbol too, and a target its start symbol
    longest = max(config.training.max_length, config.decoding.max_length) + 1
    positions = model.tgt_embed.positions_of(0, longest, like=model.generator.weight)
    for side, stack, embedding in (
        (spec.encoder, model.encoder, model.src_embed),
        (spec.decoder, model.decoder, model.tgt_embed),
    ):
        side.position_encodings.encodings = array(positions)
        for layer_spec, layer in zip(side.layer, stack.layers, strict=True):
            fill_layer(layer_spec, layer)
        if isinstance(stack.norm, nn.LayerNorm):
            fill_norm(side.layer_norm, stack.norm)
        embeddings = side.embeddings
        if isinstance(embeddings, list):  # an encoder may have several in CTranslate2
            embeddings = embeddings[0]
        embeddings.weight = array(embedding.lookup.weight)
    fill_linear(spec.decoder.projection, model.generator)
    spec.register_source_vocabulary(translator.source.pieces())
    spec.register_target_vocabulary(translator.target.pieces())
    special = translator.target.pieces()
    start = special[translator.target.symbols.start[0]]
    spec.config.bos_token = start
    spec.config.eos_token = special[EOS]
    spec.config.unk_token = special[UNK]
    spec.config.decoder_start_token = start
    spec.config.add_source_bos = False
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = 1e-5
    return spec


def fill_layer(spec: Any, layer: nn.Module) -> None:
    """Fill the description of an encoder's or a decoder's layer."""
    norms = [residual.norm for residual in layer.residuals]  # type: ignore[union-attr]
    fill_self_attention(spec.self_attention, layer.self_attention)  # type: ignore[arg-type]
    fill_norm(spec.self_attention.layer_norm, norms[0])
    if not isinstance(layer, EncoderLayer):
        memory: Attention = layer.memory_attention  # type: ignore[assignment]
        for part, linear in zip(spec.attention.linear, (memory.query, memory.key_value, memory.output), strict=True):
            fill_linear(part, linear)
        fill_norm(spec.attention.layer_norm, norms[1])
    network: FeedForward = layer.feed_forward  # type: ignore[assignment]
    fill_linear(spec.ffn.linear_0, network.inner)
    fill_linear(spec.ffn.linear_1, network.outer)
    fill_norm(spec.ffn.layer_norm, norms[-1])


def fill_self_attention(spec: attention_spec.MultiHeadAttentionSpec, attention: Attention) -> None:
    """Fill a self-attention, in which queries, keys and values are one matrix, in this order."""
    weights = (attention.query.weight, attention.key_value.weight)
    biases = (attention.query.bias, attention.key_value.bias)
    spec.linear[0].weight = numpy.concatenate([array(weight) for weight in weights])
    spec.linear[0].bias = numpy.concatenate([array(bias) for bias in biases])
    fill_linear(spec.linear[1], attention.output)


def fill_linear(spec: common_spec.LinearSpec, linear: nn.Linear) -> None:
    """Fill a matrix and its bias."""
    spec.weight = array(linear.weight)
    spec.bias = array(linear.bias)


def fill_norm(spec: common_spec.LayerNormSpec, norm: nn.LayerNorm) -> None:
    """Fill a layer norm's gain and bias."""
    spec.gamma = array(norm.weight)
    spec.beta = array(norm.bias)


def array(tensor: Tensor) -> numpy.ndarray[Any, Any]:
    """Return a tensor as an array in float32, in the same memory if it is in the CPU's already."""
    values: numpy.ndarray[Any, Any] = tensor.detach().cpu().float().numpy()
    return values
