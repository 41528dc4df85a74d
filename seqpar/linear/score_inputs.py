"""Check what the caller of `token_scores` asks for beside the log-probability of the target."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunks import recording
from seqpar.core.tensor_checks import check_floating, check_integer_target
from seqpar.distributed.vocab_parallel import check_whole
from seqpar.linear.inputs import Inputs


class ScoreRequest(NamedTuple):
    """What the caller asked for, beside the log-probability of the target."""

    temperature: Tensor | None
    entropy: bool
    top_k: int | None
    ids: Tensor | None
    product_dtype: torch.dtype | None
    batch_invariant: bool
    rank: bool = False


def checked_request(request: ScoreRequest, inputs: Inputs, ignore_index: int, vocab_size: int) -> dict[str, object]:
    """Return what must be the same on all ranks of a split vocabulary's group; raise for an invalid argument."""
    counted = inputs.target.long() != ignore_index
    for name in ("entropy", "batch_invariant", "rank"):
        value = getattr(request, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r:.60}; it must be True or False")
    if request.product_dtype is not None and not request.product_dtype.is_floating_point:
        raise TypeError(f"product_dtype is {request.product_dtype}; it must be a floating dtype, such as torch.float32")
    if request.top_k is not None:
        check_whole(request.top_k, "top_k", 1)
        if request.top_k > vocab_size:
            raise ValueError(f"top_k is {request.top_k} and there are {vocab_size} classes; it must be at most as many")
    facts: dict[str, object] = {
        name: getattr(request, name) for name in ("entropy", "top_k", "product_dtype", "batch_invariant", "rank")
    }
    facts["temperature of each token"] = _check_temperature(request.temperature, inputs.target, counted)
    facts["ids"] = _check_ids(request.ids, inputs.target, counted, vocab_size)
    return facts


def _check_temperature(temperature: Tensor | None, target: Tensor, counted: Tensor) -> object:
    """Raise unless it is None or one number above 0 for each token; return what must be the same on all ranks."""
    if temperature is None:
        return "none"
    check_floating(temperature, "temperature")
    if temperature.requires_grad:
        raise TypeError("temperature requires a gradient, and gets none here: pass temperature.detach()")
    if temperature.shape != target.shape:
        raise ValueError(
            f"temperature has shape {tuple(temperature.shape)} and target {tuple(target.shape)}; it must be a number, "
            "or one for each token"
        )
    _check_device(temperature, "temperature", target)
    if recording(target.device):
        return "given"
    bad = counted & ~((temperature > 0) & temperature.isfinite())
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"temperature {temperature[place].item()} at position {place} is not a finite number above 0")
    numbers = torch.arange(1, temperature.numel() + 1, device=temperature.device)
    return float((temperature.double().where(counted, 1.0).flatten() * numbers).sum())


def _check_ids(ids: Tensor | None, target: Tensor, counted: Tensor, vocab_size: int) -> object:
    """Raise unless ids is None or has classes for each token; return what must be the same on all ranks."""
    if ids is None:
        return "none"
    check_integer_target(ids, "ids")
    if ids.dim() != target.dim() + 1 or ids.shape[:-1] != target.shape:
        raise ValueError(
            f"ids has shape {tuple(ids.shape)} and target {tuple(target.shape)}; it must be (target's shape, J)"
        )
    _check_device(ids, "ids", target)
    if recording(target.device):
        return tuple(ids.shape)
    bad = counted.unsqueeze(-1) & ((ids < 0) | (ids >= vocab_size))
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise IndexError(
            f"ids has {ids[place].item()} at position {place}, outside the vocabulary [0, {vocab_size}); only tokens "
            "whose target is ignore_index may have any number"
        )
    numbers = torch.arange(1, ids.numel() + 1, device=ids.device)
    return (*ids.shape, int((ids.long().where(counted.unsqueeze(-1), 0).flatten() * numbers).sum()))


def _check_device(tensor: Tensor, name: str, target: Tensor) -> None:
    """Raise ValueError unless the tensor is on target's device."""
    if tensor.device != target.device:
        raise ValueError(f"target is on {target.device} and {name} on {tensor.device}; move them to one device")
