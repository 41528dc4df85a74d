"""Refuse function transforms, which the chunked loss cannot go through: its gradient is stored, not traced."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms(tensors: Iterable[object] = ()) -> None:
    """Raise RuntimeError inside `torch.func.grad`, `vmap` or `jvp`, and for tensors with a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return
    # What is no tensor is refused elsewhere
    given = [t for t in tensors if isinstance(t, Tensor)]
    # is_grads_batched has a vmap of its own, which is no interpreter
    batched = any(torch._C._functorch.is_legacy_batchedtensor(t) for t in given)
    if batched or torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "the chunked loss was called inside a transform of torch.func (grad, vjp, jvp, vmap) or by a batched "
            "gradient (is_grads_batched), and it runs under plain autograd only; use torch.nn.functional.cross_entropy "
            "there"
        )
    # -1 outside of forward_ad.dual_level, so that this costs nothing there
    if forward_ad._current_level < 0:
        return
    for tensor in given:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} has a forward-mode derivative (torch.autograd.forward_ad), "
                "which the chunked loss would lose; use torch.nn.functional.cross_entropy there"
            )
