"""The optimizer of a training, and its step."""

from __future__ import annotations

import torch
from torch import nn

from recipes.translation.settings.config import TrainingConfig


def make_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Return Adam for the parameters of a model, which its layout has split or sharded already."""
    return torch.optim.Adam(model.parameters(), betas=settings.betas, eps=1e-9, fused=True)


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Take a step of this learning rate by the gradients, and drop them."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
