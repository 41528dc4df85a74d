"""Compute the scores of tokens under the engine's projection, and losses of these scores, over its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seqpar.core.device_facts import is_capturing
from seqpar.core.row_independence import largest_difference, precision_of
from seqpar.core.token_loss import wide
from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.distributed.wrappers import refuse_sharded, structural_copy
from seqpar.engine.formula_match import FormulaMatch, NoFormula, is_projection_replaced, match_formula
from seqpar.engine.shards import OneOrScattered, Shard, check_targets, check_width, scatter_batch
from seqpar.multi_device.parallel_apply import parallel_apply
from seqpar.multi_device.replicas import check_replicable, needs_no_replica, replicate
from seqpar.multi_device.sent_weights import forget
from seqpar.rows.criteria import ignored_target

Found = TypeVar("Found")

FEW = 4
"""On how many rows the generator is called, to see whether its scores are those of its weight and bias."""


def over_devices(
    function: Callable[..., Found],
    head: nn.ModuleDict,
    devices: Sequence[torch.device] | None,
    vocab: VocabShard | None,
    hidden: Any,
    target: Any,
    per_token: dict[str, OneOrScattered],
    options: dict[str, Any],
) -> list[Found]:
    """Return what a function such as `token_scores` returns for the rows of each device, on that device.

    Args:
        per_token: keywords of the function that are scattered with hidden.
        options: its other keywords.

    Raises:
        TypeError: the generator and the criterion have no closed form.
    """
    refuse_sharded(head)
    generator = head["generator"]
    if is_fsdp_unit(generator):
        # `inside_unit` has run the unit's hooks, after which its parameters are plain tensors
        parameters = generator._parameters
        generator = structural_copy(generator)
        generator._parameters = parameters
    match = match_formula(generator, head["criterion"])
    if isinstance(match, NoFormula):
        raise TypeError(
            f"scores are those of a projection and a criterion with a closed form: {match.reason}; call "
            "seqpar.token_scores with the weight that makes the logits"
        )
    if vocab is not None:
        return [_of_rows(function, match, hidden, target, {"vocab": vocab, **per_token, **options})]
    check_replicable(head)
    shards = scatter_batch(hidden, target, per_token, devices, None, ignored_target(head["criterion"]))
    check_width(shards, match.projection.weight.size(1))
    check_targets(shards, match.vocab_size)
    if is_projection_replaced():
        _refuse_other_scores(generator, match, shards)
    on = [shard.hidden.device for shard in shards]
    heads = [head] if needs_no_replica(head.parameters(), on) else replicate(head, on)
    arguments = [
        (function, match.of_replica(replica), shard.hidden, shard.target, {**shard.per_token, **options})
        for replica, shard in zip(heads, shards, strict=True)
    ]
    found: list[Found] = parallel_apply([_of_rows] * len(shards), arguments, devices=on)
    forget(head.parameters())
    return found


def _refuse_other_scores(generator: nn.Module, match: FormulaMatch, shards: Sequence[Shard]) -> None:
    """Raise TypeError if a call of the generator on a few rows gives scores other than those of its weight and bias."""
    rows = next((s.hidden[s.counted][:FEW] for s in shards if s.counted.any()), None)
    if rows is None or is_capturing(rows.device):
        return
    with torch.no_grad():
        called = generator(rows)
        logits = rows @ match.projection.weight.t()
        if match.projection.bias is not None:
            logits = logits + match.projection.bias
        # The generator may end in a log-softmax, which a second one does not change
        found, right = (scores.to(wide(scores.dtype)).log_softmax(-1) for scores in (called, logits))
    if largest_difference(found, right) > precision_of(called, called.dtype).rounding:
        raise TypeError(
            "scores are those of the generator's weight and bias, and a call of the generator gives others: something "
            "that it calls was replaced; call seqpar.token_scores with the weight that makes the logits"
        )


def _of_rows(
    function: Callable[..., Found], match: FormulaMatch, hidden: Tensor, target: Tensor, options: dict[str, Any]
) -> Found:
    """Return the function's result under the matched projection."""
    weight = match.projection.weight
    bias = match.projection.bias
    return function(hidden, weight, target, bias=bias, ignore_index=match.ignore_index, **options)
