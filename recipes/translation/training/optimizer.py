"""The optimizer of a training, the learning rate at each step, and the number of steps.

A training ends after `training.steps` or `training.epochs`, whichever comes first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from recipes.translation.data.batches import Epochs
from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.schedules import SCHEDULES, Step


def make_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW for the parameters of a model, which its layout has already split or sharded.

    Weight decay is decoupled from the gradient (Loshchilov and Hutter 2019, algorithm 2), and without it this is Adam
    bit for bit. Norms and biases have none: it would draw what they scale and shift to 0.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.adam_eps, fused=True)


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Take a step with this learning rate, and drop the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(settings: TrainingConfig, step: int, d_model: int, reductions: int = 0) -> float:
    """Return the learning rate of step `step`, counted from 1, after validations have reduced it `reductions` times."""
    reduced = settings.plateau_factor**reductions
    warmup = max(settings.warmup, 1)
    return SCHEDULES[settings.schedule].rate(
        Step(step, settings.learning_rate, warmup, settings.steps, d_model, reduced)
    )


def check_rate(before: TrainingConfig, now: TrainingConfig, made: int, d_model: int) -> None:
    """Raise ConfigError if changed settings give the next step of a resumed run a different learning rate."""
    if not SCHEDULES[now.schedule].by_steps:
        return
    old, new = (learning_rate(settings, made + 1, d_model) for settings in (before, now))
    if old != new:
        raise ConfigError(
            f"training.steps was {before.steps:,} and is {now.steps:,}, and training.schedule {now.schedule} depends "
            f"on it: the learning rate of step {made + 1:,} would be {new:.2g}, not {old:.2g}; keep training.steps, "
            "begin another --run with training.start_from, or add --insist"
        )


def with_steps(settings: TrainingConfig, batches: Epochs) -> TrainingConfig:
    """Return the settings with the number of steps after which training ends, even if epochs determine it.

    Every epoch counts as having as many batches as the first: if subwords are sampled or corpora mixed, the others have
    a few more or less, but only drawing them would tell how many.
    """
    if not settings.epochs:
        return settings
    steps = steps_of_epochs(settings, batches)
    return replace(settings, steps=min(steps, settings.steps or steps))


def steps_of_epochs(settings: TrainingConfig, batches: Epochs) -> int:
    """Return the number of steps in the epochs; the last step is filled up with batches from the next epoch."""
    return -(-settings.epochs * batches.count(0) // settings.accumulate)
