"""Compute the cross-entropy with a target distribution over a few classes of each row, in chunks.

    loss = - sum_j q_j log p_j + z_loss lse^2,      d loss / d z_i = p_i (sum_j q_j + 2 z_loss lse) - q_i

as the divergence "cross_entropy" of `rows/divergences.py`, on the given classes and the rest, whose q is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.divergence_formula import divergence_loss
from seqpar.linear.inputs import Inputs, Settings, checked
from seqpar.linear.leaves import product_dtype
from seqpar.linear.sparse_rows import AgainstFewClasses
from seqpar.linear.teachers import SparseTarget, check_sparse_target, ids_fact
from seqpar.rows.divergences import cross_entropy_


def soft_cross_entropy(
    inputs: Inputs,
    settings: Settings,
    soft_target: SparseTarget,
    loss_scale: float | Tensor,
    vocab: VocabShard | None,
) -> TokenLoss:
    """Return the loss of `linear_cross_entropy` with a soft target, after checking all arguments."""

    def further(shard: VocabShard) -> Mapping[str, object]:
        _check_alone(soft_target, inputs, settings)
        check_sparse_target(soft_target, inputs.target, settings.ignore_index, shard.vocab_size)
        if vocab is None:
            return {}
        return {"soft_target.ids": ids_fact(soft_target.ids)}

    shard, _ = checked(inputs, settings, vocab, loss_scale, further=further)
    ids_NC = soft_target.ids.detach().flatten(0, -2).long()
    probs_NC = soft_target.probs.detach().flatten(0, -2).masked_fill(ids_NC < 0, 0)
    if vocab is not None:
        shard.check(len(inputs.weight), {}, probs_NC, "soft_target.probs")
    # The rest has probability 0
    q_NC = torch.nn.functional.pad(probs_NC.to(wide(product_dtype(inputs.hidden))), (0, 1))
    few = AgainstFewClasses(cross_entropy_, shard, ids_NC, q_NC, q_NC, float(settings.z_loss))
    return divergence_loss(inputs, settings, shard, few, loss_scale)


def _check_alone(soft_target: object, inputs: Inputs, settings: Settings) -> None:
    """Raise unless it is a soft target, and no other argument changes the target distribution."""
    if not isinstance(soft_target, SparseTarget):
        raise TypeError(f"soft_target is a {type(soft_target).__name__}; it must be a seqpar.SparseTarget, or None")
    others = {"class_weight": inputs.class_weight is not None, "label_smoothing": settings.label_smoothing != 0}
    for name, given in others.items():
        if given:
            raise ValueError(f"{name} is given with soft_target; put it into the probabilities of soft_target")
