"""Linear layers with weights in the memory layout that the CPU's matrix products prefer, while nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 2**15
"""Weights in the smallest layer for which packing pays: 320 rows times 128 x 128 take 1.1 of the time of `F.linear`,
times 256 x 256 0.9."""

_PACKING = Lock()
"""Held while a layer is packed, so that two threads with the same model do not both pack it."""


@contextmanager
def packed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, let large float32 `nn.Linear`s on the CPU use oneDNN with weights that are packed once.

    This is for many products of few rows without gradients. On 2 cores, with 5 to 500 rows, they take 0.25 to 0.95 of
    `F.linear`'s time, and packing takes about as long as one product of 100 rows. Other layers do not change. The
    operators are those that `torch.compile` puts in place of frozen layers; without them, or with oneDNN switched off,
    no layer changes.

    A packed copy of the weights exists within the block, and the memory of weights that are moved or replaced there is
    freed at its end. A layer whose weights are changed or moved computes `F.linear` from then on, as does any layer
    under autocast, in another dtype, or where gradients are enabled. A change in place through `weight.data` cannot be
    seen. A copy or pickle of a layer is an ordinary one. Several threads may have blocks around the same modules; where
    the block that packed a layer ends first, the others go on with `F.linear`.
    """
    changed = []
    try:
        # By identity: a tied or reused layer is packed once
        for linear in {id(m): m for module in modules for m in module.modules()}.values():
            with _PACKING:
                if isinstance(linear, nn.Linear) and can_be_packed(linear):
                    # First, because Ctrl-C may arrive in between
                    changed.append(linear)
                    pack(linear)
        yield
    finally:
        for linear in changed:
            unpack(linear)


def can_be_packed(linear: nn.Linear) -> bool:
    """Return whether a layer is a plain `nn.Linear` in float32 on the CPU, and oneDNN is available."""
    plain = type(linear).forward is nn.Linear.forward and "forward" not in vars(linear)
    weight = linear.weight
    # Tensor subclasses, such as DTensor or quantised weights, compute their own product
    ordinary = type(weight) in (nn.Parameter, Tensor) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    available = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    available = available and hasattr(torch.ops.mkldnn, "_linear_pointwise") and not torch.is_autocast_enabled("cpu")
    return bool(plain and available and ordinary and weight.numel() >= SMALLEST)


class Weight(NamedTuple):
    """A layer's packed weight, and what it was made from."""

    packed: Tensor
    weight: Tensor
    memory: Tensor
    version: int

    @classmethod
    def of(cls, weight: Tensor) -> Weight:
        """Pack a weight."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        # An alias keeps the memory, so that no later value of the weight can have its address
        return cls(packed, weight, weight.detach(), _version(weight))

    def is_that_of(self, weight: Tensor) -> bool:
        """Return whether this is the weight's present value."""
        return self.weight is weight and _place(self.memory) == _place(weight) and self.version == _version(weight)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Return the memory that a tensor describes, while it lives."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _version(weight: Tensor) -> int:
    """Return how often torch has seen the tensor change; it does not count where the tensor is one of inference."""
    if weight.is_inference():
        return 0
    return weight._version


class _PackedLinear(nn.Linear):
    """A layer within the block. It has another class, so that its copies are told apart from it.

    A forward in the layer's own dict would be copied with the dict, together with the original's weights.
    """

    plain: ClassVar[type[nn.Linear]]
    packed_weight: Weight

    def forward(self, input: Tensor) -> Tensor:
        """Compute `F.linear`, by the packed weight wherever it is as good."""
        # While compiling, the address is not known; gradients and autocast are unknown to the operator
        usual = torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        weight = self.weight
        # Another thread's block may end meanwhile, after which this layer is of its plain class
        held: Weight | None = vars(self).get("packed_weight")
        if usual or input.dtype != torch.float32 or held is None or not held.is_that_of(weight):
            return F.linear(input, weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(input, held.packed, self.bias, "none", [], "")
        return y

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Describe the ordinary layer, for `copy` and `pickle`."""
        state = {name: value for name, value in vars(self).items() if name != "packed_weight"}
        return object.__new__, (self.plain,), state


@cache
def _packed_class(plain: type[nn.Linear]) -> type[_PackedLinear]:
    return type(plain.__name__, (_PackedLinear, plain), {"plain": plain})


def pack(linear: nn.Linear) -> None:
    """Pack the layer's present weights; the layer changes its class."""
    vars(linear)["packed_weight"] = Weight.of(linear.weight)
    linear.__class__ = _packed_class(type(linear))  # type: ignore[arg-type]


def unpack(linear: nn.Linear) -> None:
    """Make a layer an ordinary one again, whether `pack` has ended or not."""
    if isinstance(linear, _PackedLinear):
        linear.__class__ = linear.plain  # type: ignore[assignment]
    vars(linear).pop("packed_weight", None)
