"""What every exported pair of ONNX graphs takes and returns, whatever the model's architecture.

    encoder   source (B, S)             -> mask, memory, state before the first step
    decoder   token (B,), mask, memory, state -> log_probabilities (B, V), next state

The first axis of every tensor is the sentence. Each part of the state has the same name in the encoder's outputs and
the decoder's inputs, and `next_` before it in the decoder's outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from onnx import TensorProto

from models import Generator
from recipes.translation.export.onnx_graph import Graph, Value

SOURCE = Value("source", ("batch", "source"), TensorProto.INT64)
"""Ids with the end symbol, padded at the end."""
TOKEN = Value("token", ("batch",), TensorProto.INT64)
"""The latest token of each translation: the start symbol at first."""
MASK = Value("mask", ("batch", 1, 1, "source"))
"""What is added to the scores of attention to the memory: 0 for a token, a large negative number for padding."""


class Graphs(NamedTuple):
    """A model as two graphs."""

    encoder: Graph
    decoder: Graph
    state: list[str]
    """The names of the parts of the state."""


def real_positions(graph: Graph, pad: int) -> str:
    """Return which positions of the source are tokens: (B, S), as `models.padding_mask` does."""
    position = graph.range(graph.integer(0), graph.size(SOURCE.name, 1))
    first = graph.node("Equal", position, graph.integer(0))
    padding = graph.node("Equal", SOURCE.name, graph.integer(pad))
    # The first position is a token, or that of a source of padding alone, where it counts as one
    return graph.node("Or", graph.node("Not", padding), first)


def write_mask(graph: Graph, real: str) -> None:
    """Write the mask, from what `real_positions` returned."""
    # As in `models.attention.added_scores`
    added = graph.node("Where", real, graph.number(0.0), graph.number(torch.finfo(torch.bfloat16).min))
    graph.output(MASK, graph.node("Unsqueeze", added, graph.integers(1, 2)))


def write_scores(graph: Graph, generator: Generator, hidden: str) -> None:
    """Write the log-probabilities of the next token: hidden (B, D) -> (B, V)."""
    # Not transposed beforehand, so that the matrix of a tied embedding is stored once
    weights = (graph.weight(generator.weight), graph.weight(generator.bias))
    logits = graph.node("Gemm", hidden, *weights, transB=1)
    scores = Value("log_probabilities", ("batch", generator.out_features))
    graph.output(scores, graph.node("LogSoftmax", logits, axis=-1))


def next_of(value: Value, shape: tuple[int | str, ...] | None = None) -> Value:
    """Return a part of the state as the decoder returns it."""
    return Value(f"next_{value.name}", shape or value.shape)
