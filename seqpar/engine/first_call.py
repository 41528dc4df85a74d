"""What the first call finds out from a few rows: the vocabulary's size, and whether both modules keep the contract.

It looks once for each mode and dtype, because batch normalisation mixes rows in training only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.chunks import recording
from seqpar.engine.contract import check_additive, first_scores, probe_index, project, refuse_mixing
from seqpar.engine.formula_match import check_class_weight
from seqpar.engine.shards import Shard, check_targets, rows_of
from seqpar.linear.leaves import product_dtype
from seqpar.multi_device.replicas import bind


class LogitFacts(NamedTuple):
    """What is known of the logits."""

    vocab_size: int
    dtype: torch.dtype
    criterion_is_checked: bool
    """False where the rows could not tell, such as where their loss is 0; the next call then looks again."""


class Situation(NamedTuple):
    """What the facts depend on."""

    shapes: tuple[torch.Size, ...]
    """Of the parameters."""
    modes: tuple[bool, ...]
    """Which modules are in training mode."""
    dtype: torch.dtype
    wants_gradients: bool


def logit_facts(
    known: dict[Situation, LogitFacts],
    head: nn.ModuleDict,
    replicas: Sequence[nn.ModuleDict],
    shards: Sequence[Shard],
    kept: Sequence[Tensor],
) -> LogitFacts:
    """Return the facts about these inputs, from `known` or from a few rows, with every target checked.

    Args:
        known: the facts found so far; new ones are added.
        head: the engine's generator and criterion; `replicas` are theirs, one for each shard.
        kept: which tokens of each shard are not ignored.

    Raises:
        IndexError: a target outside the vocabulary.
        TypeError, ValueError: a generator or criterion that does not keep the contract (`seqpar.engine.contract`).
        RuntimeError: the facts are not known and a CUDA graph is being recorded.
    """
    hidden = shards[0].hidden
    situation = Situation(
        tuple(p.shape for p in head.parameters()),
        tuple(module.training for module in head.modules()),
        product_dtype(hidden),
        _wants_gradients(head, shards[0]),
    )
    found = _facts_while_recording(known, situation) if recording(hidden.device) else known.get(situation)
    if found is not None and found.criterion_is_checked:
        check_targets(shards, kept, found.vocab_size)
        return found
    for replica, shard, keep in zip(replicas, shards, kept, strict=True):
        index_K = probe_index(keep.flatten())
        if len(index_K):
            known[situation] = _look(replica, shard, index_K, lambda size: check_targets(shards, kept, size))
            return known[situation]
    return LogitFacts(1, hidden.dtype, False)  # every target is ignored: there is nothing to project


def _facts_while_recording(known: Mapping[Situation, LogitFacts], situation: Situation) -> LogitFacts:
    """Return the facts found in another mode or dtype: while a CUDA graph is recorded nothing can be looked at."""
    for earlier, facts in known.items():
        if earlier.shapes == situation.shapes and facts.criterion_is_checked:
            return facts
    raise RuntimeError(
        "the first call of the engine is being recorded in a CUDA graph, and it looks at the logits; call it once "
        "before (torch.cuda.graph asks for a warm-up in any case)"
    )


def _look(head: nn.ModuleDict, shard: Shard, index_K: Tensor, check_classes: Callable[[int], None]) -> LogitFacts:
    """Project a few rows on a copy of the head, without touching its buffers or the random state."""
    copies = {id(p): p.detach() for p in head.parameters()} | {id(b): b.clone() for b in head.buffers()}
    copy = bind(head, copies)
    lead = shard.target.dim()
    rows = [t.detach()[index_K] for t in rows_of(shard)]

    def scores(shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
        return project(copy["generator"], tuple(shard.per_token), shape, rows)

    device = shard.hidden.device
    forked = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(forked, device_type=device.type):
        with torch.no_grad():
            logits_KV = first_scores(copy["generator"], scores, (*(1,) * (lead - 1), len(index_K)), rows)
            check_classes(logits_KV.size(-1))
            check_class_weight(head["criterion"], logits_KV.size(-1))
            is_checked = check_additive(copy["criterion"], logits_KV, shard.target.flatten()[index_K])
        refuse_mixing(copy["generator"], scores, rows, lead, _wants_gradients(head, shard))
    return LogitFacts(logits_KV.size(-1), logits_KV.dtype, is_checked)


def _wants_gradients(head: nn.Module, shard: Shard) -> bool:
    tensors = (shard.hidden, *shard.per_token.values(), *head.parameters())
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
