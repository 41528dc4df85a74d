"""Make up logits for a few tokens and run a model on them without leaving a trace, to compare its numbers with ours.

Shape suffixes: R rows and W tokens of the window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn

from seqpar.core.effects import keep_random_states
from seqpar.core.token_loss import wide


class RefusedModelError(TypeError):
    """The model does not compute its loss in a way that the chunked loss supports."""


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Return whether a module is an `nn.Linear` with that class's forward: a subclass's own may compute anything."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def full_name(value: object) -> str:
    """Return a module's class with the name of its file, or only the class of anything else, for an error."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(value, nn.Module) else kind.__name__


def more_than_linear(name: str) -> str:
    """Return what is wrong with output embeddings that are more than a product and a bias, for an error."""
    return f"the output embeddings of {name} do more than multiply and add a bias (a hook, a forward of their own)"


def in_one_line(error: Exception) -> str:
    """Return the kind and the text of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


WINDOW = 8
"""The number of tokens in the window besides special labels."""

SPREAD = 50.0
"""The largest made-up logit."""


FEW = 32
"""How many rows of random logits are made; further rows repeat them."""


def made_up_logits(labels_RW: Tensor, like: Tensor) -> Tensor:
    """Return random logits (R, W, V) in float32 or wider."""
    # On the CPU, so that every device gets the same numbers
    generator = torch.Generator().manual_seed(1)
    few = torch.empty(min(labels_RW.numel(), FEW), like.size(-1), dtype=wide(like.dtype), device="cpu")
    few = few.uniform_(-SPREAD, SPREAD, generator=generator).to(like.device)
    rows = torch.arange(labels_RW.numel(), device=like.device) % len(few)
    return few[rows].view(*labels_RW.shape, -1)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, without dropout, and restore each module's mode after the block."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def keep_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random states, buffers (those of batch normalisation) and counters after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    counters = [(module, _numbers(module)) for module in model.modules()]
    try:
        with keep_random_states(device, []):
            yield
    finally:
        for module, before_block in counters:
            for name in _numbers(module).keys() - before_block.keys():
                del vars(module)[name]
            vars(module).update(before_block)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _numbers(module: nn.Module) -> dict[str, int | float]:
    """Return a module's attributes that are numbers, such as a step counter."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def same_logits(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether logits have the same shape and, by `close`, the same values up to rounding."""
    return ours.shape == theirs.shape and close(ours, theirs, dtype)


def undo_rounding(output: Tensor, before: Tensor) -> Tensor:
    """Return an output as it was before hooks that only rounded it, as FSDP2's do to their `output_dtype`."""
    if before.shape == output.shape and torch.equal(output, before.to(output.dtype)):
        return before
    return output


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether numbers are the same up to a few roundings of float32, or of a narrower `dtype`.

    Float32 will do for any model precision if the logits that the model was given are at least float32.
    """
    finite = ours[ours.isfinite()]
    scale = 1.0
    if len(finite):
        scale = max(scale, float(finite.abs().max()))
    tolerance = 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * scale
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=tolerance)
