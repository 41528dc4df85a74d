"""Hold the state of one training forward of a Hugging Face model, and make its loss.

Shape suffixes: B batch, T time, D hidden, W tokens of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.core.token_loss import TokenLoss
from seqpar.integrations.transformers_model import Reading

WINDOW_TOKENS = 2
"""The number of tokens in the window of a call whose settings have been checked before."""


@dataclass
class Call:
    """The state of one training forward, from before the model until after it."""

    model: PreTrainedModel
    window_1W: Tensor
    """The target of each token of the window."""
    target_BT: Tensor | None = None
    """The label that each position predicts; None if the labels come after the forward."""
    reading: Reading | None = None
    """What the model does to its logits; None during the check that finds it out."""
    examined: bool = False
    """Whether this is that check, in which the output embeddings return made-up logits."""
    certain: bool = False
    """Whether the logits that the model gets for the window are certain of its targets, so that their loss is 0."""
    items: Tensor | int | None = None
    """The number that the summed loss is divided by; None is the number of labels that are not ignored."""
    as_tuple: bool = False
    """Whether the caller asked for a tuple of outputs."""
    hidden_BTD: Tensor | None = None
    loss: TokenLoss | None = None
    window_1WD: Tensor | None = None
    made_up: Tensor | None = None
    """The logits of the check, once the output embeddings have returned them."""


def shortened(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the labels of a few tokens of the window."""
    short = {
        name: kwargs[name][:, :WINDOW_TOKENS] for name in ("labels", "shift_labels") if kwargs.get(name) is not None
    }
    return kwargs | short


class UsingParameters(torch.autograd.Function):
    """Return hidden states with parameters in their graph that the loss will use later.

    DDP searches the outputs' graph for parameters that were used, and would not wait for the others' gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
        # They are only counted: each of them gets None for a gradient here, and its real one from the loss
        ctx.parameters = len(parameters)
        return hidden_BTD.view_as(hidden_BTD)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream, *[None] * ctx.parameters


def divided(loss: TokenLoss, items: Tensor | int | None) -> Tensor:
    """Return the summed loss divided by `items`, or the mean over the labels that are not ignored."""
    if items is None:
        # As the model's own loss divides, whatever tokens other ranks have
        return loss.total / loss.tokens.clamp(min=1)
    # A Trainer counts on the device of the batch, which need not be that of the model's last layers
    if isinstance(items, Tensor):
        items = items.to(loss.total.device)
    return loss.total / items
