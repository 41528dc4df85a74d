"""Prepare the rows of a call that computes scores of tokens, after checking its arguments.

Shape suffixes: N rows (batch x time), J given classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.checks import (
    check_classes,
    check_entries,
    check_floating,
    check_function,
    check_integer,
    check_one_device,
    check_per_token,
    check_shapes,
    check_type,
)
from seqpar.core.token_loss import wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.agreement import checksum, compare_ranks
from seqpar.linear.inputs import Inputs, PreparedCall, Settings, check_inputs, local_tensors, prepare, tell_errors


class ScoreRequest(NamedTuple):
    """What the caller asked for besides the log-probability of the target."""

    temperature: float | Tensor
    """One for all tokens, or one for each token."""
    entropy: bool
    top_k: int | None = None
    ids: Tensor | None = None
    product_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    rank: bool = False


class ScoreCall(NamedTuple):
    """A prepared call and what was asked for, with one row for each token."""

    prepared: PreparedCall
    shape: torch.Size
    """The target's shape."""
    counted_N: Tensor
    """Whether the target is not ignored."""
    temperature_N: Tensor | None
    ids_NJ: Tensor | None
    per_token: dict[str, Tensor]
    vocab_size: int
    """The size of the whole vocabulary."""


def prepare_scores(
    inputs: Inputs,
    settings: Settings,
    request: ScoreRequest,
    vocab: VocabShard | None,
    loss_scale: float | Tensor = 1.0,
    *,
    per_token: Mapping[str, Tensor] | None = None,
    loss: object = None,
) -> ScoreCall:
    """Return the call, after checking all arguments on every rank of a split vocabulary.

    Args:
        settings: the settings without the temperature, which is in the request.
        per_token: further tensors with one row for each token; None if the call has no loss.
        loss: the function of the scores.
    """
    has_loss = per_token is not None
    per_token = per_token or {}
    temperature = request.temperature
    if not isinstance(temperature, Tensor):
        settings = settings._replace(temperature=temperature)
    inputs, vocab = local_tensors(inputs, vocab)
    with tell_errors(vocab):
        given = check_inputs(inputs, settings, vocab, loss_scale, any_dtype=request.product_dtype is not None)
        if has_loss:
            check_function(loss, "loss", "a function of scores that returns (rows,)")
        _check_request(request, inputs.target, settings.ignore_index, given.shard.vocab_size)
        check_per_token(per_token, inputs.target)
        check_one_device(target=inputs.target, **per_token)
    if vocab is not None:
        facts = _facts(request, per_token, inputs.target, settings.ignore_index)
        compare_ranks(inputs, settings, vocab, facts)
    prepared = prepare(inputs, settings, given, request.product_dtype)
    counted_N = prepared.target_N != settings.ignore_index
    temperature_N = None
    if isinstance(temperature, Tensor):
        dtype = wide(prepared.projection.weight_VD.dtype)
        temperature_N = temperature.flatten().to(dtype).where(counted_N, 1.0)
    ids_NJ = None if request.ids is None else request.ids.flatten(0, -2).long()
    lead = inputs.target.dim()
    flat = {name: tensor.flatten(0, lead - 1) for name, tensor in per_token.items()}
    return ScoreCall(prepared, inputs.target.shape, counted_N, temperature_N, ids_NJ, flat, given.shard.vocab_size)


def _facts(
    request: ScoreRequest, per_token: Mapping[str, Tensor], target: Tensor, ignore_index: int
) -> dict[str, object]:
    """Return what must be the same on all ranks of a split vocabulary's group, by name."""
    counted = target.long() != ignore_index
    facts: dict[str, object] = dict(request._asdict())
    # A single temperature for all tokens is among the settings
    temperature = facts.pop("temperature")
    if isinstance(temperature, Tensor):
        temperature = checksum(temperature.where(counted, 1.0))
    facts["temperature of each token"] = temperature
    if request.ids is not None:
        facts["ids"] = (*request.ids.shape, checksum(request.ids.long().where(counted.unsqueeze(-1), 0)))
    for name, tensor in per_token.items():
        facts[f"the shape and dtype of {name}"] = (tuple(tensor.shape), tensor.dtype)
        # Not -1: without tokens that size would be undetermined
        rows_NC = tensor.detach().reshape(target.numel(), math.prod(tensor.shape[target.dim() :]))
        facts[name] = rows_NC if rows_NC.is_floating_point() else rows_NC.float()
    return facts


def _check_request(request: ScoreRequest, target: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Raise for an invalid argument; only rows that count are checked."""
    counted = target.long() != ignore_index
    for name in ("entropy", "batch_invariant", "rank"):
        check_type(getattr(request, name), name, bool, "True or False")
    if request.product_dtype is not None and not request.product_dtype.is_floating_point:
        raise TypeError(f"product_dtype is {request.product_dtype}; it must be a floating dtype, such as torch.float32")
    if request.top_k is not None:
        check_integer(request.top_k, "top_k", 1, vocab_size)
    temperature = request.temperature
    if isinstance(temperature, Tensor):
        check_floating(temperature, "temperature")
        if temperature.requires_grad:
            raise TypeError("temperature requires a gradient, and gets none here: pass temperature.detach()")
        wanted = "the same, unless temperature is one number"
        check_shapes(temperature.shape == target.shape, wanted, temperature=temperature, target=target)
        check_one_device(target=target, temperature=temperature)
        good = ~counted | ((temperature > 0) & temperature.isfinite())
        check_entries(good, temperature, "temperature", " is not a finite number above 0")
    if request.ids is not None:
        why = "only a row whose target is ignored may have any value"
        check_classes(request.ids, "ids", target, counted, range(vocab_size), why)
