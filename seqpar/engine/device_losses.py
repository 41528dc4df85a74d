"""Compute the engine's loss over its devices: scatter the batch, cut each shard into chunks, add the devices' losses.

    loss_over_devices   check the batch, scatter it over the devices, choose one of the two below, add up
    _ByFormula          each device's sum, with gradients in closed form
    _ByAutograd         each device's sum, with gradients by autograd, chunk by chunk

Shape suffixes: B batch, T time, N rows (B*T, or the rows of a 2-D hidden), K rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.chunked_gradient import (
    AutogradChunkLoss,
    Leaves,
    Walk,
    differentiable_sum,
    leaf_copies,
    sum_over_chunks,
)
from seqpar.core.chunks import Chunk, cut_rows, cut_time, rows_per_chunk
from seqpar.core.device_facts import FACTS, LateNumber, is_capturing
from seqpar.core.device_sum import Job, sum_over_devices
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.distributed.wrappers import refuse_sharded
from seqpar.engine.formula_match import (
    REPLACED,
    Asked,
    FormulaMatch,
    NoFormula,
    check_class_weight,
    match_inputs,
    what_formulas_replace,
)
from seqpar.engine.kept_state import refuse_lost_numbers
from seqpar.engine.module_calls import Parts, parts_of, refuse_cached
from seqpar.engine.pair import counts_itself, criterion_loss, project, takers_of
from seqpar.engine.probe import gives_formula, logit_facts
from seqpar.engine.shards import (
    OneOrScattered,
    Shard,
    check_targets,
    check_width,
    heads_on,
    one_for_each_device,
    rows_of,
    scatter_batch,
)
from seqpar.engine.situation import LogitFacts, Situation, facts_in, situation_of
from seqpar.linear.inputs import Checked, Inputs, Settings, count_late, cross_entropy_job, whole_vocabulary
from seqpar.multi_device.parallel_apply import parallel_apply
from seqpar.multi_device.replicas import bind, check_parts_replicable
from seqpar.multi_device.sent_weights import forget
from seqpar.rows.criteria import ignored_target


class Cut(NamedTuple):
    """How the batch is divided: over devices, and on each device into chunks of tokens or of time steps."""

    devices: Sequence[torch.device] | None
    chunk_tokens: int | None
    chunk_size: int | None


def loss_over_devices(
    head: nn.ModuleDict,
    cut: Cut,
    known: dict[Situation, LogitFacts],
    formulas: dict[Asked, bool],
    hidden: OneOrScattered,
    target: OneOrScattered,
    loss_scale: float | Tensor,
    per_token: dict[str, OneOrScattered | None],
) -> TokenLoss:
    """Return the summed loss over all devices, on the first one.

    Args:
        known: what earlier calls have found out about the logits; this call adds to it.
        formulas: likewise, for whether the pair gives the loss of its closed form.
        hidden, target, loss_scale, per_token: as in `LossCompute`.
    """
    given = {name: value for name, value in per_token.items() if value is not None}
    shards = scatter_batch(hidden, target, given, cut.devices, cut.chunk_size, ignored_target(head["criterion"]))
    if given:
        shards = _with_takers(head, shards)
    parts = parts_of(head)
    match, count = _match(head, parts, shards, cut, formulas)
    way: _ByFormula | _ByAutograd
    if isinstance(match, FormulaMatch):
        way = _ByFormula(head, parts, match, count, shards, cut)
    else:
        way = _ByAutograd(head, parts, shards, cut, known)
    jobs = [way.job(replica, shard) for replica, shard in zip(way.heads, way.shards, strict=True)]
    if cut.devices is None and way.heads[0] is head and way.is_linear:
        return differentiable_sum(*jobs[0], loss_scale)
    loss = sum_over_devices(jobs, way.parameters, loss_scale, way.run, way.is_linear)
    forget(parts.parameters)
    return loss


class _ByFormula:
    """The loss in closed form.

    Args:
        count: as in `Checked`.
    """

    is_linear = True

    def __init__(
        self,
        head: nn.ModuleDict,
        parts: Parts,
        match: FormulaMatch,
        count: LateNumber | None,
        shards: list[Shard],
        cut: Cut,
    ) -> None:
        # Time steps are cut from (B, T), and joining shards would flatten that
        if cut.chunk_size is None and len(shards) > 1:
            shards = one_for_each_device(shards)
        self.match = match
        self.count = count
        self.cut = cut
        self.shards = shards
        self.heads = heads_on(head, parts.parameters, shards)
        self.parameters = match.parameters

    def job(self, replica: nn.ModuleDict, shard: Shard) -> Job:
        """Return a device's job; the caller's whole batch was checked before it was scattered."""
        here = self.match.of_replica(replica)
        inputs = Inputs(shard.hidden, here.projection.weight, shard.target, here.projection.bias)
        settings = Settings(
            here.ignore_index, here.label_smoothing, here.smoothing_convention, chunk_tokens=self.cut.chunk_tokens
        )
        given = Checked(whole_vocabulary(here.vocab_size), here.soft_target, here.class_weight, self.count)
        chunks = None if self.cut.chunk_size is None else cut_time(shard.counted, self.cut.chunk_size)
        return cross_entropy_job(inputs, settings, given, chunks)

    def run(self, walks: Sequence[Walk], arguments: Sequence[tuple[Any, ...]]) -> list[TokenLoss]:
        """Return the loss of each walk; the CPU comes last, because an accelerator is not waited for."""
        found: dict[int, TokenLoss] = {}
        for i in sorted(range(len(walks)), key=lambda i: FACTS[self.shards[i].hidden.device.type].is_host):
            found[i] = walks[i](*arguments[i])
        return [found[i] for i in range(len(walks))]


class _ByAutograd:
    """The loss with autograd's gradients, chunk by chunk.

    Args:
        known: what earlier calls have found out about the logits; this call adds to it.
    """

    def __init__(
        self,
        head: nn.ModuleDict,
        parts: Parts,
        shards: list[Shard],
        cut: Cut,
        known: dict[Situation, LogitFacts],
    ) -> None:
        refuse_cached(parts)
        situation = situation_of(parts, shards[0])
        found = facts_in(known, situation)
        if found is None:
            refuse_sharded(head)
            check_parts_replicable(parts.modules)
        self.head = head
        self.parts = parts
        self.cut = cut
        self.shards = shards
        self.heads = heads_on(head, parts.parameters, shards)
        # The probe checks the targets as soon as it knows the number of classes
        self.facts = logit_facts(known, situation, found, head, self.heads, shards)
        if (name := self.facts.buffers.not_added_to) and len(shards) > 1:
            raise _no_sum_error(name)
        self.is_linear = self.facts.is_linear
        self.parameters = parts.parameters

    def job(self, replica: nn.ModuleDict, shard: Shard) -> Job:
        """Return a device's job."""
        # A tied parameter is listed once, and its gradient is the sum over all of its uses
        params = self.parameters if replica is self.head else parts_of(replica).parameters
        # Avoid the structural copy where possible: it costs as much as the layers of a small generator
        call_itself = replica is self.head and self.facts.keeps_nothing and not _fires_hooks(replica, params)
        names = tuple(shard.per_token)
        weights = tuple(shard.of_criterion)
        target_N = shard.target.flatten()
        ends = params if call_itself else leaf_copies(params)

        def per_chunk(leaves: tuple[Tensor, ...], rows: tuple[Tensor, ...], chunk: Chunk) -> TokenLoss:
            bound = replica
            if not call_itself:
                # A copy of the head whose parameters are the leaves of this chunk's graph
                bound = bind(replica, {id(p): leaf for p, leaf in zip(params, leaves, strict=True)})
            # With as many dimensions as hidden had, because the generator may expect (batch, time, D)
            shape = (*(1,) * (shard.target.dim() - 1), len(rows[0]))
            logits_KV = project(bound["generator"], names, shape, rows[: 1 + len(names)])
            own = dict(zip(weights, rows[1 + len(names) :], strict=True))
            loss = criterion_loss(bound["criterion"], logits_KV, target_N[chunk], own)
            if not call_itself:
                refuse_lost_numbers(bound, self.parts.modules, self.facts.written)
            return loss

        empty = TokenLoss.zero(shard.hidden.dtype, shard.hidden.device, counts_itself(replica["criterion"]))
        walk = partial(sum_over_chunks, AutogradChunkLoss(per_chunk, ends))
        return walk, _chunks(shard.counted, self.facts, self.cut), Leaves(rows_of(shard), params, empty)

    def run(self, walks: Sequence[Walk], arguments: Sequence[tuple[Any, ...]]) -> Sequence[TokenLoss]:
        """Return the loss of each walk; the caller's modules run in one thread per device."""
        buffers = self.facts.buffers
        written = self.parts.buffers if buffers.adds_up or buffers.unproven else []
        with _adding_up(written, self.heads, self.head, buffers.unproven):
            return parallel_apply(walks, arguments, devices=[shard.hidden.device for shard in self.shards])


def _with_takers(head: nn.ModuleDict, shards: list[Shard]) -> list[Shard]:
    """Return the shards with their per-token tensors divided between generator and criterion."""
    of_generator, of_criterion = takers_of(head, list(shards[0].per_token))
    return [
        replace(
            shard,
            per_token={name: shard.per_token[name] for name in of_generator},
            of_criterion={name: shard.per_token[name] for name in of_criterion},
        )
        for shard in shards
    ]


@contextlib.contextmanager
def _adding_up(
    buffers: Sequence[Tensor], replicas: Sequence[nn.ModuleDict], head: nn.ModuleDict, unproven: Set[str]
) -> Iterator[None]:
    """Add to each buffer what the replicas add to their own copies of it, so that a count is that of all devices.

    Raise ValueError if a replica changes one of the `unproven` buffers, which calls write other than by adding.
    """
    before = [buffer.clone() for buffer in buffers]
    yield
    names = {id(buffer): name for name, buffer in head.named_buffers()} if unproven else {}
    # The original has counted itself, and may have made a further buffer
    for replica in (each for each in replicas if buffers and each is not head):
        for buffer, old, copy in zip(buffers, before, parts_of(replica).buffers, strict=True):
            if copy is not buffer and not torch.equal(now := copy.to(old.device), old):
                if (name := names.get(id(buffer), "")) in unproven:
                    raise _no_sum_error(name)
                # Where both are infinite add 0, because inf - inf is nan
                buffer.add_((now - old).where(now != old, 0))


def _no_sum_error(name: str) -> ValueError:
    return ValueError(
        f"the buffer {name} changes by other than a sum over rows, so that each device would have another value of it: "
        "use one device, set the module to evaluation mode (.eval()), or compute what changes before the engine"
    )


def _match(
    head: nn.ModuleDict,
    parts: Parts,
    shards: Sequence[Shard],
    cut: Cut,
    formulas: dict[Asked, bool],
) -> tuple[FormulaMatch | NoFormula, LateNumber | None]:
    """Return the closed form for these inputs, if there is one, and the number of tokens if there is a single shard."""
    match = match_inputs(head, shards[0])
    if isinstance(match, NoFormula):
        return match, None
    check_parts_replicable(parts.modules)
    # Before shards are joined, because the errors name shapes and positions in the caller's batch
    check_width(shards, match.projection.weight.size(1))
    count = None
    if len(shards) == 1 and cut.chunk_size is None:
        # It is read once everything else has been prepared; its error names positions in the only shard
        count = count_late(shards[0].target, match.vocab_size, match.ignore_index)
    if count is None:
        check_targets(shards, match.vocab_size)
    check_class_weight(head["criterion"], match.vocab_size)
    return (match, count) if _is_what_runs(match, head, parts, shards, formulas) else (REPLACED, None)


def _is_what_runs(
    match: FormulaMatch,
    head: nn.ModuleDict,
    parts: Parts,
    shards: Sequence[Shard],
    formulas: dict[Asked, bool],
) -> bool:
    """Return whether calling the pair gives the result of the closed form; it is called once, on a few rows."""
    hidden = shards[0].hidden
    leaves = (hidden, *parts.parameters)
    wanted = tuple([torch.is_grad_enabled() and t.requires_grad for t in leaves])
    called = what_formulas_replace(head["criterion"])
    given = (hidden.dtype, hidden.dim(), torch.is_autocast_enabled(hidden.device.type), *match.options)
    key = (called, given, wanted)
    known = formulas.get(key)
    if known is not None or is_capturing(hidden.device):
        return known is not False
    # Before the criterion is called with these targets
    check_targets(shards, match.vocab_size)
    for replica, shard in zip(heads_on(head, parts.parameters, shards), shards, strict=True):
        found = gives_formula((replica, head), match, shard, any(wanted))
        if found is not None:
            return formulas.setdefault(key, found)
    return True


def _chunks(counted: Tensor, facts: LogitFacts, cut: Cut) -> list[Chunk]:
    """Return the chunks of a shard, given the mask of its tokens that are not ignored."""
    if cut.chunk_size is not None:
        return cut_time(counted, cut.chunk_size)
    most = cut.chunk_tokens or rows_per_chunk(facts.vocab_size, facts.dtype, counted.device.type)
    return cut_rows(counted.flatten(), most)


def _fires_hooks(head: nn.ModuleDict, params: Sequence[Tensor]) -> bool:
    """Return whether a call of the head, or a gradient of these parameters, would run hooks that belong to the step."""
    # `inside_unit` has already run an FSDP2 unit's hooks, and calls this loss as the unit's forward. Hooks that run
    # after a parameter's gradient is accumulated, such as DDP's, do not run in `torch.autograd.grad`; tensor hooks do
    return is_fsdp_unit(head["generator"]) or any(p._backward_hooks or not p.is_leaf for p in params)
