"""Training in half precision: the dtype of autocast, the devices that compute in it, and the loss scale of float16.

float16 covers numbers from 6e-8 to 65,504. To keep gradients from underflowing, the loss is multiplied by a scale
before backward, and the gradient is divided by it before it is clipped (Micikevicius et al. 2018, section 3.2). If the
gradient is not finite, there is no update.

The scale follows the algorithm of `torch.amp.GradScaler` with its defaults. GradScaler itself looks only at the
gradients of its own rank, and ranks that split the vocabulary have different ones: some would take a step that others
skip. Here the gradient norm of the whole model decides, which is the same on every rank and is read in each step
anyway. The scale's state is two numbers in `TrainingState`, which are saved with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.settings.config import TrainingConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of autocast for each `training.precision` that uses it."""
GROWTH_INTERVAL = 2_000
"""Steps without overflow after which the scale is doubled."""
LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""
SMALLEST_SCALE = 2.0**-13
"""fairseq also gives up near this scale (`--min-loss-scale` 1e-4): what overflows then is the forward, or the model."""


def check_autocast(precision: str, devices: Iterable[torch.device]) -> None:
    """Raise ConfigError for a device that cannot compute in the dtype of autocast."""
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return
    for device in dict.fromkeys(devices):
        if why := why_not(device, dtype):
            raise ConfigError(
                f"training.precision is {precision}, but {device} does not compute in {dtype} ({why}): set "
                "training.precision float32"
            )


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why a device has no autocast to this dtype, tested with a product and its gradient; empty if it has."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # autocast only warns when it does nothing
            matrix = torch.ones(2, 2, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype):
                product = F.linear(matrix, matrix)
            product.float().sum().backward()
    except (RuntimeError, AssertionError, UserWarning) as error:
        return " ".join(str(error).split())[:200]
    return "" if product.dtype == dtype else f"a product is in {product.dtype}"


def loss_scale(settings: TrainingConfig, state: TrainingState) -> float:
    """Return what the loss of the next step is multiplied by."""
    return state.loss_scale if settings.precision == "fp16" else 1.0


def skips(settings: TrainingConfig, state: TrainingState, norm: float) -> bool:
    """Adapt the loss scale to a step's gradient norm; return whether the step is skipped.

    A step is never skipped in another precision, nor with the smallest scale, where the overflow must be reported.
    """
    if settings.precision != "fp16":
        return False
    if math.isfinite(norm):
        state.steps_of_scale += 1
        if state.steps_of_scale == GROWTH_INTERVAL:
            state.loss_scale = min(2 * state.loss_scale, LARGEST_SCALE)
            state.steps_of_scale = 0
        return False
    if state.loss_scale <= SMALLEST_SCALE:
        return False
    state.loss_scale /= 2
    state.steps_of_scale = 0
    state.skipped += 1
    return True
