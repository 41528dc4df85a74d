"""Probe the generator and the criterion on a few rows in the first call.

The probe finds the size of the vocabulary and checks that both modules meet the engine's requirements. It is repeated
for each mode and dtype, because batch normalisation, for example, mixes rows in training only, and whenever another
code may run: after hooks, submodules, buffers, flags or the number of hidden's dimensions have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.chunks import recording
from seqpar.engine.buffers import buffers_of, changed, refuse_changing_buffers
from seqpar.engine.contract import (
    check_additive,
    criterion_loss,
    first_scores,
    probe_index,
    project,
    refuse_mixing,
)
from seqpar.engine.formula_match import check_class_weight
from seqpar.engine.module_calls import what_calls_run
from seqpar.engine.shards import Shard, check_targets, rows_of
from seqpar.linear.leaves import product_dtype
from seqpar.multi_device.replicas import bind


class LogitFacts(NamedTuple):
    """What a probe has found about the logits."""

    vocab_size: int
    dtype: torch.dtype
    criterion_is_checked: bool
    """False if the probed rows cannot show it, for example because their loss is 0; the next call probes again."""


MOST_SITUATIONS = 256
"""How many situations are remembered: more than there are lengths of sources, over which a copy generator attends; but
one with a hook that is made anew for each step never comes back."""


class Situation(NamedTuple):
    """Everything that the facts depend on, as far as it can be compared."""

    shapes: tuple[torch.Size, ...]
    """The shapes of the parameters and buffers."""
    calls: tuple[object, ...]
    """What a call of each module runs, from hooks of all modules to the mode."""
    dtypes: tuple[torch.dtype, ...]
    """Those of the products and of the parameters."""
    wants_gradients: bool
    leading: int
    """The number of leading dimensions: a softmax over dimension 1 is over the classes of (N, V), or over time."""
    per_token: tuple[tuple[str, torch.Size], ...]
    """The shape of one token's share of hidden and of each per-token tensor, which may have a column for a class."""


def logit_facts(
    known: dict[Situation, LogitFacts],
    head: nn.ModuleDict,
    replicas: Sequence[nn.ModuleDict],
    shards: Sequence[Shard],
) -> LogitFacts:
    """Return the facts about these inputs, from `known` or from a probe, after checking every target.

    Args:
        known: the facts found so far; new ones are added.
        head: the engine's generator and criterion.
        replicas: the replicas of `head`, one per shard.

    Raises:
        IndexError: a target outside the vocabulary.
        TypeError, ValueError: a generator or criterion that violates a requirement (`seqpar.engine.contract`).
        RuntimeError: the facts are not known and a CUDA graph is being recorded.
    """
    hidden = shards[0].hidden
    leading = shards[0].target.dim()
    columns = {"hidden": hidden, **shards[0].per_token}
    situation = Situation(
        tuple(t.shape for t in (*head.parameters(), *head.buffers())),
        what_calls_run(head),
        (product_dtype(hidden), *(p.dtype for p in head.parameters())),
        _wants_gradients(head, shards[0]),
        leading,
        tuple((name, t.shape[leading:]) for name, t in columns.items()),
    )
    found = known.get(situation)
    if recording(hidden.device):
        found = _facts_while_recording(known, situation)
    if found is not None and found.criterion_is_checked:
        if situation in known:
            known[situation] = known.pop(situation, found)  # those of the latest call come last
        check_targets(shards, found.vocab_size)
        return found
    # One shard is enough, because all replicas run the same code; the first may have nothing but padding
    for replica, shard in zip(replicas, shards, strict=True):
        index_K = probe_index(shard.counted.flatten())
        if len(index_K):
            facts = _probe(replica, shard, index_K, lambda size: check_targets(shards, size))
            known[situation] = facts
            for earliest in list(known)[:-MOST_SITUATIONS]:
                known.pop(earliest, None)
            return facts
    # Every target is ignored, so there is nothing to project and the size of the vocabulary does not matter
    return LogitFacts(vocab_size=1, dtype=hidden.dtype, criterion_is_checked=False)


def _facts_while_recording(known: Mapping[Situation, LogitFacts], situation: Situation) -> LogitFacts:
    """Return the facts found in any mode or dtype: no number can be read while a CUDA graph is recorded."""
    for earlier, facts in known.items():
        if earlier.shapes == situation.shapes and facts.criterion_is_checked:
            return facts
    raise RuntimeError(
        "the first call of the engine is being recorded in a CUDA graph, but it has to read some logits; call the "
        "engine once before recording (torch.cuda.graph needs a warm-up in any case)"
    )


def _probe(head: nn.ModuleDict, shard: Shard, index_K: Tensor, check_classes: Callable[[int], None]) -> LogitFacts:
    """Return the facts about the logits of a few rows; the head's buffers and the random state do not change.

    Args:
        index_K: the rows to project.
        check_classes: raises if a target is outside a vocabulary of that size. It is called before the criterion is,
            which on an accelerator would fail with a device-side assertion.
    """

    def fresh() -> nn.ModuleDict:
        copies = {id(p): p.detach() for p in head.parameters()} | {id(b): b.clone() for b in head.buffers()}
        return bind(head, copies)

    copy = fresh()
    lead = shard.target.dim()
    ones = (1,) * (lead - 1)
    rows = [t.detach()[index_K] for t in rows_of(shard)]
    target_K = shard.target.flatten()[index_K]

    def scores(shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
        return project(copy["generator"], tuple(shard.per_token), shape, rows)

    def call(head: nn.ModuleDict, some: slice) -> Tensor:
        part = [t[some] for t in rows]
        with torch.random.fork_rng(forked, device_type=device.type):
            logits_KV = project(head["generator"], tuple(shard.per_token), (*ones, len(part[0])), part)
            criterion_loss(head["criterion"], logits_KV, target_K[some])
        return logits_KV

    # Dropout in the probe must not advance the random state: the loss would depend on whether a call was the first
    device = shard.hidden.device
    forked = []
    if device.type != "cpu":
        forked = [device]
    before = buffers_of(copy)
    with torch.random.fork_rng(forked, device_type=device.type):
        with torch.no_grad():
            shape = (*ones, len(index_K))
            logits_KV = first_scores(copy["generator"], scores, shape, rows, tuple(shard.per_token), shard.target.shape)
            check_classes(logits_KV.size(-1))
            check_class_weight(head["criterion"], logits_KV.size(-1))
            is_checked = check_additive(copy["criterion"], logits_KV, target_K)
            if names := changed(before, copy):
                refuse_changing_buffers(names, fresh, call, len(index_K))
        refuse_mixing(copy["generator"], scores, rows, lead, _wants_gradients(head, shard))
    return LogitFacts(logits_KV.size(-1), logits_KV.dtype, is_checked)


def _wants_gradients(head: nn.Module, shard: Shard) -> bool:
    """Return whether the loss will need a gradient."""
    tensors = (shard.hidden, *shard.per_token.values(), *head.parameters())
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
