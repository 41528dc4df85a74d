"""Hold the state of one training forward of a Hugging Face model, and compute its loss.

Shape suffixes: B batch, T time, D hidden, R rows and W tokens of the window.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.core.token_loss import TokenLoss
from seqpar.integrations.transformers_model import WITHOUT, Reading


@dataclass
class Call:
    """The state of one training forward, from before the model runs until after."""

    model: PreTrainedModel
    window_RW: Tensor
    """The target of each token of the window."""
    target_BT: Tensor | None = None
    """The label that each position predicts; None if the labels come after the forward."""
    reading: Reading | None = None
    """What the model does to its logits; None during the check that finds this out."""
    examined: bool = False
    """Whether this is that check, in which the output embeddings return made-up logits."""
    keeps_logits: bool = False
    """Whether this is an evaluation whose logits may be used, so that the model computes all of them."""
    certain: bool = False
    """Whether the logits that the model gets for the window are certain of its targets, so that their loss is 0."""
    items: Tensor | int | None = None
    """The number that the summed loss is divided by; None means the number of labels that are not ignored."""
    as_tuple: bool = False
    """Whether the caller asked for a tuple of outputs."""
    hidden_BTD: Tensor | None = None
    loss: TokenLoss | None = None
    window_RWD: Tensor | None = None
    made_up: Tensor | None = None
    """The logits of the check, once the output embeddings have returned them."""
    few_RWV: Tensor | None = None
    """The logits that the model gets for the window in any other forward."""


class Running(threading.local):
    """The forward that is running, one per thread: DataParallel runs one in each."""

    call: Call | None = None


class UsingParameters(torch.autograd.Function):
    """Put parameters that the loss will use later into the graph of the hidden states.

    DDP searches the outputs' graph for used parameters, and would not wait for the gradients of any others.
    """

    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
        # Only their number matters: here each gets None for a gradient, and its real one from the loss
        ctx.parameters = len(parameters)
        return hidden_BTD.view_as(hidden_BTD)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream, *[None] * ctx.parameters


def divide_loss(loss: TokenLoss, items: Tensor | int | None) -> Tensor:
    """Return the summed loss divided by `items`, else by the number of labels not ignored; 0 if there are none."""
    if items is None:
        # As the model's own loss does, regardless of other ranks' tokens
        items = loss.tokens
    # A Trainer counts on the batch's device, which need not be the device of the model's last layers
    if isinstance(items, Tensor):
        items = items.to(loss.total.device)
    return loss.total / (items + (items == 0))


HIDDEN = "hidden_for_loss"
"""The field of the outputs with the hidden states from which a `compute_loss_func` computes the loss."""


@cache
def with_hidden(outputs: type) -> type:
    """Return a model's output class, extended by a field for the hidden states."""
    return make_dataclass(outputs.__name__, [(HIDDEN, Tensor | None, None)], bases=(outputs,))


def refuse_another_part(name: str, loss: object) -> None:
    """Raise RuntimeError if a discarded loss requires a gradient, and so contains more than the window's loss."""
    if isinstance(loss, Tensor) and loss.requires_grad:
        raise RuntimeError(f"{name} adds something to its own loss, and did not when it was checked; {WITHOUT}")


def with_fields(call: Call, outputs: Any, fields: dict[str, Any]) -> Any:
    """Return the model's outputs with these fields replaced, in the form that the caller asked for."""
    if not call.as_tuple:
        kind: Any = type(outputs)
        if HIDDEN in fields:
            kind = with_hidden(kind)
        return kind(**{**outputs, **fields})
    # As the model does: a loss that is None is left out of the tuple. Hidden states come last
    names = [name for name in outputs if name != "loss" or fields["loss"] is not None]
    return tuple((outputs | fields)[name] for name in [*names, *(name for name in fields if name == HIDDEN)])
