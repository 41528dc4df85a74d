"""The LSTM model as two ONNX graphs: an encoder, and a decoder step.

The equations are those of `models.recurrent`. ONNX's LSTM has time as its first axis and its gates in another order.

Shapes: B sentences, S source time, D model width, H width of a direction, G directions.
"""

from __future__ import annotations

import math

import torch
from onnx import TensorProto
from torch import Tensor, nn

from models.embedding import Embedding
from models.recurrent import RecurrentDecoder, RecurrentEncoderDecoder
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


def graphs_of(model: RecurrentEncoderDecoder) -> Graphs:
    """Return the encoder and the decoder step."""
    width = model.generator.in_features
    memory = Value("memory", ("batch", "source", width))
    state = [
        Value(f"{name}_{number}", ("batch", width))
        for number in range(model.decoder.layers)
        for name in ("hidden", "cell")
    ]
    return Graphs(encoder(model, memory, state), decoder(model, memory, state), [value.name for value in state])


def encoder(model: RecurrentEncoderDecoder, memory: Value, state: list[Value]) -> Graph:
    """Write the encoder, and the decoder's state before the first step."""
    graph = Graph("encoder", [SOURCE])
    real = real_positions(graph, model.pad)
    write_mask(graph, real)
    x = graph.node("Transpose", embedded(graph, model.src_embed, SOURCE.name), perm=[1, 0, 2])
    length = lengths(graph, real)
    for number in range(model.encoder.lstm.num_layers):
        weights = lstm_weights(graph, model.encoder.lstm, number)
        y, _, _ = graph.nodes("LSTM", 3, x, *weights, length, hidden_size=width_of(model.encoder.lstm), direction=BOTH)
        # (S, G, B, H) -> (S, B, G x H)
        beside = graph.node("Transpose", y, perm=[0, 2, 1, 3])
        x = graph.node("Reshape", beside, graph.integers(0, 0, -1))
    states = graph.node("Transpose", x, perm=[1, 0, 2])
    graph.output(memory, states)
    for value, name in zip(state, first_state(graph, model.decoder, states, real), strict=True):
        graph.output(value, name)
    return graph


BOTH = "bidirectional"


def width_of(lstm: nn.LSTM) -> int:
    """Return the width of one direction."""
    width: int = lstm.hidden_size
    return width


def decoder(model: RecurrentEncoderDecoder, memory: Value, state: list[Value]) -> Graph:
    """Write the decoder step; the state is that of the LSTM's layers."""
    graph = Graph("decoder", [TOKEN, MASK, memory, *state])
    first = graph.integers(0)
    x = graph.node("Unsqueeze", embedded(graph, model.tgt_embed, TOKEN.name), first)
    lstm = model.decoder.lstm
    following: list[str] = []
    for number in range(lstm.num_layers):
        values = state[2 * number : 2 * number + 2]
        held = [graph.node("Unsqueeze", value.name, first) for value in values]
        weights = lstm_weights(graph, lstm, number)
        _, hidden, cell = graph.nodes("LSTM", 3, x, *weights, "", *held, hidden_size=width_of(lstm))
        following += [graph.node("Squeeze", each, first) for each in (hidden, cell)]
        x = hidden
    write_scores(graph, model.generator, attended(graph, model.decoder, graph.node("Squeeze", x, first), memory))
    for value, name in zip(state, following, strict=True):
        graph.output(next_of(value), name)
    return graph


def embedded(graph: Graph, embedding: Embedding, ids: str) -> str:
    """Embed ids of any dims; the embedding is a WordEmbedding, which has no positions."""
    weight = embedding.lookup.weight
    vectors = graph.node("Gather", graph.weight(weight), ids)
    return graph.node("Mul", vectors, graph.number(math.sqrt(weight.size(1))))


def lengths(graph: Graph, real: str) -> str:
    """Return the number of tokens of each source, up to the last one that is not padding."""
    position = graph.range(graph.integer(1), graph.node("Add", graph.size(SOURCE.name, 1), graph.integer(1)))
    counted = graph.node("Mul", graph.node("Cast", real, to=TensorProto.INT64), position)
    length = graph.node("ReduceMax", counted, axes=[1], keepdims=0)
    return graph.node("Cast", length, to=TensorProto.INT32)


def lstm_weights(graph: Graph, lstm: nn.LSTM, layer: int) -> list[str]:
    """Return ONNX's W (G, 4H, inputs), R (G, 4H, H) and B (G, 8H) of a layer."""
    ends = [f"l{layer}"]
    if lstm.bidirectional:
        ends.append(f"l{layer}_reverse")

    def each(name: str) -> list[Tensor]:
        return [in_onnx_order(getattr(lstm, f"{name}_{end}").detach()) for end in ends]

    biases = [torch.cat(pair) for pair in zip(each("bias_ih"), each("bias_hh"), strict=True)]
    return [graph.weight(torch.stack(some)) for some in (each("weight_ih"), each("weight_hh"), biases)]


def in_onnx_order(gates: Tensor) -> Tensor:
    """Reorder torch's gates (input, forget, cell, output) as ONNX has them (input, output, forget, cell)."""
    into, forget, cell, output = gates.chunk(4)
    return torch.cat((into, output, forget, cell))


def first_state(graph: Graph, part: RecurrentDecoder, memory: str, real: str) -> list[str]:
    """Compute tanh(W_0 mean_s m_s) for the hidden states, and 0 for the cells: of each layer one after the other."""
    weight = graph.node("Unsqueeze", graph.as_number(real), graph.integers(2))
    total = graph.node("ReduceSum", graph.node("Mul", memory, weight), graph.integers(1), keepdims=0)
    mean = graph.node("Div", total, graph.node("ReduceSum", weight, graph.integers(1), keepdims=0))
    hidden = graph.node("Tanh", graph.linear(mean, part.start))
    names = []
    for each in graph.nodes("Split", part.layers, hidden, axis=-1):
        names += [each, graph.node("ConstantOfShape", graph.node("Shape", each))]
    return names


def attended(graph: Graph, part: RecurrentDecoder, hidden: str, memory: Value) -> str:
    """Compute tanh(W_c [c; h]) for the attention c of the LSTM's state h: (B, D) -> (B, D)."""
    second = graph.integers(1)
    query = graph.node("Unsqueeze", graph.linear(hidden, part.score), second)
    scores = graph.node("MatMul", query, graph.node("Transpose", memory.name, perm=[0, 2, 1]))
    masked = graph.node("Add", scores, graph.node("Squeeze", MASK.name, second))
    context = graph.node("MatMul", graph.node("Softmax", masked, axis=-1), memory.name)
    both = graph.node("Concat", graph.node("Squeeze", context, second), hidden, axis=-1)
    return graph.node("Tanh", graph.linear(both, part.output))
