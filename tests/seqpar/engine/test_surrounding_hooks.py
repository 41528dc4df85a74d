"""Hooks for saved tensors around the loss, as a checkpoint's, do not reach the graphs inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqpar

TARGET = torch.tensor([1, 0, 6, 3, 2, 5, 4, 0, 1])


CALLS: list[int] = []


class Gated(nn.Module):
    """A generator without a closed form, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        scores: Tensor = self.out(torch.tanh(self.mix(x)))
        return scores


class InPlace(Gated):
    """One that changes a tensor that its gradient needs."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.mix(x))
        scores: Tensor = self.out(mixed)
        mixed.add_(1)
        return scores


def engine(generator: nn.Module, devices: list[str] | None) -> seqpar.LossCompute:
    return seqpar.LossCompute(generator.double(), seqpar.CrossEntropy(), devices=devices, chunk_tokens=2)


def step(loss: seqpar.LossCompute, around: Callable[..., Any]) -> list[Tensor]:
    """The loss of tokens behind a trained layer, and the gradients of that layer and the generator."""
    torch.manual_seed(1)
    below = nn.Linear(4, 4).double()
    inputs = torch.randn(len(TARGET), 4).double()
    total = around(lambda x: loss(torch.sin(below(x)), TARGET).total, inputs)
    total.backward()
    return [total.detach(), *(p.grad for p in [*below.parameters(), *loss.parameters()] if p.grad is not None)]


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("first", [True, False])
def test_in_a_checkpoint_the_loss_is_recomputed_at_most_once(devices: list[str] | None, first: bool) -> None:
    expected = step(engine(Gated(), devices), plain)
    generator = Gated()
    loss = engine(generator, devices)
    if not first:
        step(loss, plain)
        loss.zero_grad()
    CALLS.clear()
    got = step(loss, lambda f, x: checkpoint(f, x, use_reentrant=False))
    in_checkpoint = len(CALLS)
    loss.zero_grad()
    CALLS.clear()
    step(loss, plain)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    # The first call also looks at the generator on a few rows
    assert in_checkpoint <= 2 * len(CALLS) + 80 * first


def test_the_hooks_are_given_no_tensor_of_a_chunk() -> None:
    sizes = []

    def seen(tensor: Tensor) -> Tensor:
        sizes.append(tuple(tensor.shape))
        return tensor

    loss = engine(Gated(), None)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        step(loss, plain)
    assert sizes
    assert not [size for size in sizes if size and size[0] == 2]


def test_a_change_in_place_is_still_an_error() -> None:
    # torch.DoubleTensor on a CPU; an accelerator's tensors have another name
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[\S+Double\w+ \[\d, 4\]\]"):
        step(engine(InPlace(), None), plain)
    with (
        pytest.raises(RuntimeError, match=r"of shape \(\d, 4\) that is needed for the gradient was changed in place"),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        step(engine(InPlace(), None), plain)
