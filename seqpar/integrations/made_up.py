"""Make up logits for a few tokens and run a model on them without leaving a trace, to compare its numbers with ours.

Shape suffixes: R rows and W tokens of the window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn

from seqpar.core.effects import Held
from seqpar.core.graphs import version_of
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


def certain_logits(target_RW: Tensor, like_V: Tensor) -> Tensor:
    """Return logits (R, W, V), in float32 or wider, that are certain of each target: their cross-entropy is 0."""
    logits_RWV = torch.full((*target_RW.shape, len(like_V)), -SPREAD, dtype=wide(like_V.dtype), device=like_V.device)
    certain_RW1 = target_RW.clamp(min=0).unsqueeze(-1).to(like_V.device)
    return logits_RWV.scatter_(-1, certain_RW1, SPREAD)


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
    """Restore random states, buffers (those of batch normalisation) and all attributes of modules after the block.

    Raises:
        RefusedModelError: a parameter has changed, which is not restored, because a copy would double its memory.
    """
    held = Held(model)
    buffers = [(vars(module)["_buffers"], dict(vars(module)["_buffers"])) for module in model.modules()]
    numbers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # Not those that FSDP2 or DeepSpeed shards, which are written when they are gathered
    versions = [(name, p, version_of(p)) for name, p in model.named_parameters() if type(p) is nn.Parameter]
    try:
        with held.keep_state(device):
            yield
    finally:
        for own, objects in buffers:
            own.clear()
            own.update(objects)
        with torch.no_grad():
            for buffer, before in numbers:
                buffer.copy_(before)
    if changed := [name for name, p, version in versions if version_of(p) != version and not hasattr(p, "ds_id")]:
        raise RefusedModelError(
            f"the forward of {type(model).__name__} has changed its parameter {changed[0]}, and the check of a few "
            "made-up tokens calls it once more: run a batch through the model before, if only the first forward does"
        )


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
    return bool(are_close(ours, theirs, dtype))


def are_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the answer of `close` as a tensor, without waiting for the device."""
    ours = ours.to(wide(ours.dtype)).flatten()
    theirs = theirs.to(wide(theirs.dtype)).flatten()
    scale = torch.cat([ours.where(ours.isfinite(), 0).abs(), ours.new_ones(1)]).amax()
    tolerance = 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * scale
    # An infinite number is close to itself, and nan to none
    return ((ours == theirs) | ((ours - theirs).abs() <= tolerance)).all()
