"""ONNX graphs, written node by node: the nodes that the exports need, and nothing of a model.

Every method that adds a node returns the name of its output. Graphs are written here and not traced, so that no length
and no branch of the example of a trace can get into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

OPSET = 17
"""The first with LayerNormalization."""
IR_VERSION = 8
"""That of the first onnx with this opset, so that older runtimes read the file too."""
LARGEST_FILE = 1_900_000_000
"""Bytes of weights in one file: protobuf allows 2 GiB. What is larger has its weights in a file beside it."""

Dim = int | str
"""A size, or the name of one that is free."""


class Value(NamedTuple):
    """An input or output of a graph."""

    name: str
    shape: tuple[Dim, ...]
    type: int = TensorProto.FLOAT


class Graph:
    """A graph that is being written."""

    def __init__(self, name: str, inputs: Sequence[Value]) -> None:
        self.name = name
        self.inputs = list(inputs)
        self.outputs: list[Value] = []
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[object, onnx.TensorProto] = {}
        self._tensors: list[Tensor] = []

    def nodes(self, op: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node of several outputs."""
        names = [f"{op}_{len(self._nodes)}_{number}" for number in range(outputs)]
        self._nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node of one output."""
        (name,) = self.nodes(op, 1, *inputs, **attributes)
        return name

    def output(self, value: Value, source: str) -> None:
        """Let a node's output be one of the graph's."""
        self._nodes.append(helper.make_node("Identity", [source], [value.name]))
        self.outputs.append(value)

    def weight(self, tensor: Tensor, transposed: bool = False) -> str:
        """Return the name of a weight; one that is used twice, as tied embeddings are, is stored once."""
        key = (tensor.data_ptr(), tuple(tensor.shape), transposed)
        self._tensors.append(tensor)  # kept, so that its memory does not become another tensor's
        values = tensor.detach().numpy()
        if transposed:
            values = values.T
        return self._stored(key, values)

    def integers(self, *values: int) -> str:
        """Return the name of a list of integers."""
        return self._stored(values, numpy.array(values, dtype=numpy.int64))

    def integer(self, value: int) -> str:
        """Return the name of an integer without dims."""
        return self._stored(value, numpy.array(value, dtype=numpy.int64))

    def number(self, value: float) -> str:
        """Return the name of a number without dims."""
        return self._stored(("number", value), numpy.array(value, dtype=numpy.float32))

    def _stored(self, key: object, values: numpy.ndarray[Any, Any]) -> str:
        if key not in self._weights:
            name = f"weight_{len(self._weights)}"
            self._weights[key] = numpy_helper.from_array(numpy.ascontiguousarray(values), name)
        return self._weights[key].name

    def linear(self, x: str, linear: nn.Linear) -> str:
        """Compute x W^T + b for x of any dims."""
        product = self.node("MatMul", x, self.weight(linear.weight, transposed=True))
        return self.node("Add", product, self.weight(linear.bias))

    def layer_norm(self, x: str, norm: nn.LayerNorm) -> str:
        """Normalise the last dim."""
        weights = (self.weight(norm.weight), self.weight(norm.bias))
        return self.node("LayerNormalization", x, *weights, axis=-1, epsilon=norm.eps)

    def size(self, x: str, dim: int) -> str:
        """Return a tensor's size in one dim, as an integer without dims."""
        return self.node("Squeeze", self.node("Shape", x, start=dim, end=dim + 1))

    def range(self, start: str, stop: str) -> str:
        """Return the integers from start up to stop, without it."""
        return self.node("Range", start, stop, self.integer(1))

    def as_number(self, x: str) -> str:
        """Convert integers or truth values to float32."""
        return self.node("Cast", x, to=TensorProto.FLOAT)

    def save(self, folder: Path) -> None:
        """Write `<name>.onnx`, and beside it `<name>.onnx.data` with the weights if they are too large for one file."""
        inputs = [helper.make_tensor_value_info(value.name, value.type, value.shape) for value in self.inputs]
        outputs = [helper.make_tensor_value_info(value.name, value.type, value.shape) for value in self.outputs]
        graph = helper.make_graph(self._nodes, self.name, inputs, outputs, list(self._weights.values()))
        opset = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION, producer_name="seqpar")
        path = folder / f"{self.name}.onnx"
        if sum(len(weight.raw_data) for weight in self._weights.values()) <= LARGEST_FILE:
            onnx.save_model(model, path)
            return
        onnx.save_model(model, path, save_as_external_data=True, location=f"{path.name}.data")
