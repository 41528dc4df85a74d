"""The Transformer as two ONNX graphs: an encoder, and a decoder step with cached keys and values.

The equations are those of `models.transformer` and `models.attention`. Positions are computed in the graphs, so that no
length is too long.

Shapes: B sentences, S source time, T time, P steps so far, D model width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from models import Attention, EncoderDecoder
from models.embedding import Embedding, frequencies
from models.transformer import DecoderLayer, EncoderLayer, FeedForward, Residual
from recipes.translation.export.onnx_graph import Graph, Value
from recipes.translation.export.onnx_interface import (
    MASK,
    SOURCE,
    TOKEN,
    Graphs,
    next_of,
    real_positions,
    write_mask,
    write_scores,
)


class Lookup(NamedTuple):
    """Keys and values by name, each (B, H, time, K)."""

    keys: str
    values: str


def graphs_of(model: EncoderDecoder) -> Graphs:
    """Return the encoder and the decoder step."""
    memory: list[Value] = []
    state: list[Value] = []
    for number, layer in enumerate(model.decoder.layers):
        heads, width = sizes_of(layer.self_attention)  # type: ignore[arg-type]
        for name in Lookup._fields:
            memory.append(Value(f"memory_{name}_{number}", ("batch", heads, "source", width)))
            state.append(Value(f"{name}_{number}", ("batch", heads, "past", width)))
    return Graphs(encoder(model, memory, state), decoder(model, memory, state), [value.name for value in state])


def sizes_of(attention: Attention) -> tuple[int, int]:
    """Return the number of heads and the width of one."""
    return attention.heads, attention.query.out_features // attention.heads


def encoder(model: EncoderDecoder, memory: list[Value], state: list[Value]) -> Graph:
    """Write the encoder; the memory is the keys and values to which each layer of the decoder attends."""
    graph = Graph("encoder", [SOURCE])
    write_mask(graph, real_positions(graph, model.pad))
    x = embedded(graph, model.src_embed, SOURCE.name, graph.integer(0))
    for layer in model.encoder.layers:
        x = encoder_layer(graph, layer, x)  # type: ignore[arg-type]
    x = final_norm(graph, model.encoder.norm, x)
    names: list[str] = []
    for layer in model.decoder.layers:
        names += keys_values(graph, layer.memory_attention, x)  # type: ignore[arg-type]
    for value, name in zip(memory, names, strict=True):
        graph.output(value, name)
    batch = graph.node("Shape", SOURCE.name, start=0, end=1)
    for value in state:
        _, heads, _, width = value.shape
        shape = graph.node("Concat", batch, graph.integers(int(heads), 0, int(width)), axis=0)
        before_first = Value(value.name, ("batch", heads, 0, width))
        graph.output(before_first, graph.node("ConstantOfShape", shape))
    return graph


def decoder(model: EncoderDecoder, memory: list[Value], state: list[Value]) -> Graph:
    """Write the decoder step; the state is the keys and values of the steps so far."""
    graph = Graph("decoder", [TOKEN, MASK, *memory, *state])
    token = graph.node("Unsqueeze", TOKEN.name, graph.integers(1))
    x = embedded(graph, model.tgt_embed, token, graph.size(state[0].name, 2))
    longer: list[str] = []
    for number, layer in enumerate(model.decoder.layers):
        pair = slice(2 * number, 2 * number + 2)
        source = Lookup(*(value.name for value in memory[pair]))
        past = Lookup(*(value.name for value in state[pair]))
        x, steps = decoder_layer(graph, layer, x, source, past)  # type: ignore[arg-type]
        longer += steps
    x = final_norm(graph, model.decoder.norm, x)
    write_scores(graph, model.generator, graph.node("Squeeze", x, graph.integers(1)))
    for value, name in zip(state, longer, strict=True):
        batch, heads, _, width = value.shape
        graph.output(next_of(value, (batch, heads, "past + 1", width)), name)
    return graph


def embedded(graph: Graph, embedding: Embedding, ids: str, start: str) -> str:
    """Embed ids (B, T), the first of them at position `start`, an integer: (B, T, D)."""
    weight = embedding.lookup.weight
    vectors = graph.node("Gather", graph.weight(weight), ids)
    scaled = graph.node("Mul", vectors, graph.number(math.sqrt(weight.size(1))))
    position = graph.range(start, graph.node("Add", start, graph.size(ids, 1)))
    position_T1 = graph.node("Unsqueeze", graph.as_number(position), graph.integers(1))
    angle = graph.node("Mul", position_T1, graph.weight(frequencies(weight.size(1), like=weight)))
    # (T, D/2, 2) -> (T, D): sine and cosine of a frequency alternate
    last = graph.integers(-1)
    both = [graph.node("Unsqueeze", graph.node(wave, angle), last) for wave in ("Sin", "Cos")]
    positions = graph.node("Reshape", graph.node("Concat", *both, axis=-1), graph.integers(-1, weight.size(1)))
    return graph.node("Add", scaled, positions)


def encoder_layer(graph: Graph, layer: EncoderLayer, x: str) -> str:
    """Transform the states x (B, S, D) of a source."""
    own = layer.self_attention
    first, second = layer.residuals
    x = residual(graph, first, x, lambda y: attended(graph, own, y, keys_values(graph, own, y), MASK.name))  # type: ignore[arg-type]
    return residual(graph, second, x, lambda y: feed_forward(graph, layer.feed_forward, y))  # type: ignore[arg-type]


def decoder_layer(graph: Graph, layer: DecoderLayer, x: str, source: Lookup, past: Lookup) -> tuple[str, Lookup]:
    """Transform the state x (B, 1, D) of a step; return it, and the keys and values of all steps up to it."""
    first, second, third = layer.residuals
    steps = past

    def attend_to_itself(y: str) -> str:
        nonlocal steps
        new = keys_values(graph, layer.self_attention, y)
        steps = Lookup(*(graph.node("Concat", *each, axis=2) for each in zip(past, new, strict=True)))
        return attended(graph, layer.self_attention, y, steps, None)

    x = residual(graph, first, x, attend_to_itself)  # type: ignore[arg-type]
    x = residual(graph, second, x, lambda y: attended(graph, layer.memory_attention, y, source, MASK.name))  # type: ignore[arg-type]
    x = residual(graph, third, x, lambda y: feed_forward(graph, layer.feed_forward, y))  # type: ignore[arg-type]
    return x, steps


def residual(graph: Graph, part: Residual, x: str, sublayer: Callable[[str], str]) -> str:
    """Add the sublayer's output to x (B, T, D), with the norm before the sublayer or after the sum."""
    if part.pre:
        return graph.node("Add", x, sublayer(graph.layer_norm(x, part.norm)))
    return graph.layer_norm(graph.node("Add", x, sublayer(x)), part.norm)


def keys_values(graph: Graph, attention: Attention, x: str) -> Lookup:
    """Project the states that are attended to: (B, S, D) -> two (B, H, S, K)."""
    both = graph.nodes("Split", 2, graph.linear(x, attention.key_value), axis=-1)
    return Lookup(*(split_heads(graph, attention, each) for each in both))


def split_heads(graph: Graph, attention: Attention, x: str) -> str:
    """Split the width into heads: (B, T, D) -> (B, H, T, K)."""
    # In a shape, 0 is the size as it was
    split = graph.node("Reshape", x, graph.integers(0, 0, *sizes_of(attention)))
    return graph.node("Transpose", split, perm=[0, 2, 1, 3])


def attended(graph: Graph, attention: Attention, x: str, lookup: Lookup, mask: str | None) -> str:
    """Compute softmax(Q K^T / sqrt(d_k)) V, and its projection: x (B, T, D) -> (B, T, D)."""
    heads, width = sizes_of(attention)
    query = split_heads(graph, attention, graph.linear(x, attention.query))
    scaled = graph.node("Mul", query, graph.number(width**-0.5))
    scores = graph.node("MatMul", scaled, graph.node("Transpose", lookup.keys, perm=[0, 1, 3, 2]))
    if mask is not None:
        scores = graph.node("Add", scores, mask)
    mixed = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), lookup.values)
    joined = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
    return graph.linear(graph.node("Reshape", joined, graph.integers(0, 0, heads * width)), attention.output)


def feed_forward(graph: Graph, network: FeedForward, x: str) -> str:
    """Compute max(0, x W_1 + b_1) W_2 + b_2."""
    return graph.linear(graph.node("Relu", graph.linear(x, network.inner)), network.outer)


def final_norm(graph: Graph, norm: nn.Module, x: str) -> str:
    """Normalise the output of a pre-norm stack; that of a post-norm one is normalised already."""
    if isinstance(norm, nn.LayerNorm):
        return graph.layer_norm(x, norm)
    return x
