"""The optimizer of a training, and its step."""

from __future__ import annotations

import torch
from torch import nn

from recipes.translation.settings.config import TrainingConfig


def make_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW for the parameters of a model, which its layout has split or sharded already.

    Weight decay is decoupled from the gradient (Loshchilov and Hutter 2019, algorithm 2), and without it this is Adam
    bit for bit. Norms and biases have none: what they scale and shift would be drawn to 0.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.adam_eps, fused=True)


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Take a step of this learning rate by the gradients, and drop them."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
