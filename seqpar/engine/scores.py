"""Compute the scores of tokens under the engine's projection, over its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.distributed.wrappers import is_fsdp_unit, refuse_sharded, structural_copy
from seqpar.engine.formula_match import FormulaMatch, NoFormula, match_formula
from seqpar.engine.shards import OneOrScattered, Shard, check_targets, check_width, heads_on, scattered
from seqpar.linear.token_scores import TokenScores, token_scores
from seqpar.multi_device.parallel_apply import parallel_apply
from seqpar.multi_device.replicas import check_replicable, gather
from seqpar.rows.criteria import ignored_target


def scores_over_devices(
    head: nn.ModuleDict,
    devices: Sequence[torch.device] | None,
    vocab: VocabShard | None,
    hidden: OneOrScattered,
    target: OneOrScattered,
    temperature: float | Tensor,
    ids: Tensor | None,
    options: dict[str, Any],
) -> TokenScores:
    """Return the scores on the first device, in the order of the batch; the arguments are `LossCompute.token_scores`'.

    Raises:
        TypeError: the generator is no `nn.Linear`, or only autograd knows the criterion's loss.
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
        assert isinstance(hidden, Tensor)
        assert isinstance(target, Tensor)
        given = {"temperature": temperature, "ids": ids, "vocab": vocab, **options}
        return _scores(match, hidden, target, given)
    check_replicable(head)
    per_token: dict[str, OneOrScattered] = {}
    if isinstance(temperature, Tensor):
        per_token["temperature"] = temperature
    else:
        options = {**options, "temperature": temperature}
    if ids is not None:
        per_token["ids"] = ids
    shards = scattered(hidden, target, per_token, devices, None, ignored_target(head["criterion"]))
    check_width(shards, match.projection.weight.size(1))
    check_targets(shards, match.vocab_size)
    on = [shard.hidden.device for shard in shards]
    heads = heads_on(head, on)
    arguments = [(match, replica, shard, options) for replica, shard in zip(heads, shards, strict=True)]
    found = parallel_apply([_scores_of_shard] * len(shards), arguments, devices=on)
    return gather(found, on[0])  # type: ignore[no-any-return]


def _scores_of_shard(match: FormulaMatch, head: nn.ModuleDict, shard: Shard, options: dict[str, Any]) -> TokenScores:
    """Return the scores of one device's rows."""
    replica = match.of_replica(head)
    return _scores(replica, shard.hidden, shard.target, {**shard.per_token, **options})


def _scores(match: FormulaMatch, hidden: Tensor, target: Tensor, options: dict[str, Any]) -> TokenScores:
    """Return the scores under the matched projection."""
    weight = match.projection.weight
    bias = match.projection.bias
    return token_scores(hidden, weight, target, bias=bias, ignore_index=match.ignore_index, **options)
