"""Compute generator and criterion over any device list, in chunks, with the gradient of the single-device loss.

    forward -> _loss:   check the batch, scatter it over the devices, cut each shard into chunks
    _formula_loss:      one device's loss, its gradient in closed form
    _autograd_loss:     one device's loss, its gradient by autograd, chunk by chunk
    _linear_loss:       the loss of a split vocabulary, or under `torch.compile`

Shape suffixes: B batch, T time, N rows (B*T, or the rows of a 2-D hidden), K rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.chunked_gradient import AutogradChunkLoss, check_loss_scale, differentiable_sum
from seqpar.core.chunks import Chunk, check_size, cut_rows, cut_time, recording, rows_per_chunk
from seqpar.core.structures import map_tensors
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.distributed.wrappers import inside_unit, is_fsdp_unit, refuse_data_parallel, refuse_sharded
from seqpar.engine.contract import check_roles, criterion_loss, project
from seqpar.engine.explanation import facts_of, how_it_is_computed, how_it_is_cut
from seqpar.engine.first_call import LogitFacts, Situation, logit_facts
from seqpar.engine.formula_match import FormulaMatch, check_class_weight, match_formula, match_inputs, match_split
from seqpar.engine.shards import (
    OneOrScattered,
    Shard,
    check_targets,
    check_width,
    one_for_each_device,
    rows_of,
    scattered,
)
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.linear.formula import LinearFormula, Projection
from seqpar.linear.leaves import LinearLeaves, differentiable_loss, product_dtype
from seqpar.losses.criteria import ignored_target
from seqpar.multi_device.devices import Device, check_devices
from seqpar.multi_device.replicas import bind, check_replicable, parallel_apply, replicate


class LossCompute(nn.Module):
    """Compute `criterion(generator(hidden), target)`, summed, while only one chunk's logits exist at a time.

    Plain equivalent: `criterion(generator(hidden).flatten(0, -2), target.flatten())`. The pattern is the
    `MultiGPULossCompute` of The Annotated Transformer (Harvard NLP, 2018), with the exact gradient.

    For an `nn.Linear` with `seqpar.CrossEntropy`, `seqpar.LabelSmoothing` or `nn.CrossEntropyLoss` the gradient is
    computed in closed form, as in `linear_cross_entropy`; for any other pair by autograd, chunk by chunk. `explain()`
    says which.

    Args:
        generator: any module from hidden states `(..., D)` to scores `(..., V)` of the same number of dimensions
            whose scores of a token depend on that token alone.
        criterion: any module that returns a sum; `seqpar.losses.criteria` lists the requirements.
        devices: the devices of the replicas of both, over which the rows are divided; None is hidden's device.
        chunk_tokens: the most tokens whose logits exist at once on a device; None chooses by bytes.
        chunk_size: instead of chunk_tokens, time steps of the whole batch, as in 2018; hidden must be `(B, T, D)`.
        vocab: the classes of the generator's rows, if the vocabulary is split over ranks, as for
            `linear_cross_entropy`; needs a pair with a closed form, and no device list.

    Raises:
        TypeError, ValueError: a bad device list or chunk size; a generator or criterion that is no module, or has no
            closed form although `vocab` is given.
        ValueError: a criterion whose `reduction` is not "sum".
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        devices: Sequence[Device] | None = None,
        chunk_tokens: int | None = None,
        chunk_size: int | None = None,
        vocab: VocabShard | None = None,
    ) -> None:
        super().__init__()
        _check_modules(generator, criterion)
        _check_sizes(chunk_tokens, chunk_size)
        self.head = nn.ModuleDict({"generator": generator, "criterion": criterion})
        self.devices: tuple[torch.device, ...] | None = None
        if devices is not None:
            self.devices = check_devices(devices)
        self.chunk_tokens = chunk_tokens
        self.chunk_size = chunk_size
        self.vocab = vocab
        if vocab is not None:
            match_split(self.head)
            _check_split(devices, chunk_size)
        self._facts: dict[Situation, LogitFacts] = {}

    def forward(
        self,
        hidden: Tensor | Sequence[Tensor],
        target: Tensor | Sequence[Tensor],
        *,
        loss_scale: float | Tensor = 1.0,
        **per_token: OneOrScattered | None,
    ) -> TokenLoss:
        """Return the summed loss of all tokens.

        Args:
            hidden: `(N, D)` or `(B, T, D)`; or already scattered, a list of such tensors, one per device.
            target: int64, hidden's leading shape; or a list like hidden's.
            loss_scale: the factor that `total` will be multiplied by before `backward`, for float16:
                `scaler.get_scale() / tokens` with a GradScaler. Gradients are stored multiplied by it and divided by it
                in backward; any factor gives the right gradient.
            per_token: further tensors the generator takes as keywords (copy attention, a teacher's states), whose
                first dimensions are target's shape. They are scattered and chunked like hidden, and get a gradient if
                they require one. A None is not passed on.

        Returns:
            `TokenLoss` on the first device. `(loss.total / tokens_of_the_step).backward()` is the one backward.

        Raises:
            TypeError, ValueError: an argument that is no dense tensor, or has a wrong dtype or shape; class weights of
                another number of classes; a `loss_scale` of 0 or nan.
            ValueError: on the first call, a generator that mixes rows, or a criterion that is no sum over rows
                (`seqpar.engine.contract` explains what the call detects).
            IndexError: a target outside [0, V) that is not ignored (with value and position).
            RuntimeError: the generator's parameters are sharded and FSDP2 has not unsharded them; in `backward`, a
                criterion that returned a detached number or a generator that ran under `torch.no_grad`.
        """
        check_loss_scale(loss_scale)
        if self.vocab is not None:
            refuse_sharded(self.head)
            match = match_split(self.head, per_token)
            return _linear_loss(match, hidden, target, loss_scale, self.chunk_tokens, self.vocab)
        # A graph of torch.compile cannot contain chunks, whose number depends on the targets. It can contain
        # linear_cross_entropy, which is a single operator there
        one_device = self.devices is None and self.chunk_size is None
        if torch.compiler.is_compiling() and one_device and isinstance(hidden, Tensor) and not per_token:
            compiled_match = match_formula(self.head["generator"], self.head["criterion"])
            if isinstance(compiled_match, FormulaMatch):
                return _linear_loss(compiled_match, hidden, target, loss_scale, self.chunk_tokens, None)
        # FSDP2 gathers a unit's weights only around the unit's own forward
        arguments = (hidden, target, loss_scale, per_token)
        if is_fsdp_unit(self.head["generator"]):
            return inside_unit(self.head["generator"], self._loss, *arguments)  # type: ignore[no-any-return]
        return self._loss(*arguments)

    def _loss(
        self,
        hidden: OneOrScattered,
        target: OneOrScattered,
        loss_scale: float | Tensor,
        per_token: dict[str, OneOrScattered | None],
    ) -> TokenLoss:
        """Return the summed loss over all devices, on the first one."""
        refuse_sharded(self.head)
        check_replicable(self.head)
        criterion = self.head["criterion"]
        given = {name: value for name, value in per_token.items() if value is not None}
        shards = scattered(hidden, target, given, self.devices, self.chunk_size, ignored_target(criterion))
        match = match_inputs(self.head, shards[0])
        if isinstance(match, FormulaMatch):
            # Before shards are joined, because the errors name shapes and positions of the caller's batch
            check_width(shards, match.projection.weight.size(1))
            check_targets(shards, match.vocab_size)
            check_class_weight(criterion, match.vocab_size)
            # Time steps are cut from (B, T), which joining shards would flatten
            if self.chunk_size is None:
                shards = one_for_each_device(shards)
        devices = [shard.hidden.device for shard in shards]
        heads = self._heads_on(devices)
        shard_loss: Callable[..., TokenLoss] = _autograd_loss
        if isinstance(match, FormulaMatch):
            shard_loss = partial(_formula_loss, match)
            facts = LogitFacts(match.vocab_size, product_dtype(shards[0].hidden), True)
        else:
            # The probe checks the targets as soon as it knows the number of classes
            facts = logit_facts(self._facts, self.head, heads, shards)
        chunks = [_chunks(shard.counted, facts, self.chunk_tokens, self.chunk_size) for shard in shards]
        if self.devices is None and heads[0] is self.head:
            return shard_loss(self.head, shards[0], chunks[0], loss_scale)
        arguments = [(h, s, c, loss_scale) for h, s, c in zip(heads, shards, chunks, strict=True)]
        # One thread per device; the losses are added on the first one, and autograd sends the gradients back
        losses = parallel_apply([shard_loss] * len(shards), arguments, devices=devices)
        return sum((_moved(loss, devices[0]) for loss in losses[1:]), start=losses[0])

    def _heads_on(self, devices: list[torch.device]) -> list[nn.ModuleDict]:
        """Return generator and criterion on each device: replicas, or the originals where they are already there."""
        if len(devices) == 1 and all(p.device == devices[0] for p in self.head.parameters()):
            return [self.head]
        return replicate(self.head, devices)

    def explain(self, tokens: int = 4096) -> str:
        """Describe how one device computes the loss of so many tokens that are not ignored, and why."""
        generator = self.head["generator"]
        match = match_formula(generator, self.head["criterion"])
        device_type = next((p.device.type for p in generator.parameters()), "cpu")
        how = how_it_is_computed(match, self.head, device_type)
        if self.chunk_size is not None:
            return f"{how}; {self.chunk_size} time steps of the batch at a time"
        # The facts that the latest call found, if there was one
        facts = next(reversed(self._facts.values()), None)
        if isinstance(match, FormulaMatch):
            facts = facts_of(match)
        return f"{how}; {how_it_is_cut(tokens, self.chunk_tokens, facts, device_type)}"

    def extra_repr(self) -> str:
        """Return the settings for `print(module)`."""
        devices = None
        if self.devices is not None:
            devices = [str(d) for d in self.devices]
        return f"devices={devices}, chunk_tokens={self.chunk_tokens}, chunk_size={self.chunk_size}"


def _check_modules(generator: nn.Module, criterion: nn.Module) -> None:
    """Raise unless both are modules in the right order, not wrapped, and the criterion sums."""
    for name, module in (("generator", generator), ("criterion", criterion)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} is a {type(module).__name__}; it must be a torch.nn.Module")
        refuse_data_parallel(module, name)
    check_roles(generator, criterion)
    reduction = getattr(criterion, "reduction", "sum")
    if reduction != "sum":
        raise ValueError(f"the criterion has reduction={reduction!r}; the criterion must sum: reduction='sum'")


def _check_sizes(chunk_tokens: int | None, chunk_size: int | None) -> None:
    """Raise ValueError unless at most one of the two is given, and it is at least 1."""
    check_size(chunk_tokens, "chunk_tokens")
    check_size(chunk_size, "chunk_size")
    if chunk_tokens is not None and chunk_size is not None:
        raise ValueError(f"chunk_tokens={chunk_tokens} and chunk_size={chunk_size}: pass one of them")


def _check_split(devices: Sequence[Device] | None, chunk_size: int | None) -> None:
    """Raise ValueError for settings that a split vocabulary does not have."""
    if devices is not None or chunk_size is not None:
        raise ValueError(
            f"vocab is given with devices={devices} and chunk_size={chunk_size}; with a split vocabulary each rank has "
            "one device, and chunks are cut by chunk_tokens"
        )


def _chunks(counted: Tensor, facts: LogitFacts, chunk_tokens: int | None, chunk_size: int | None) -> list[Chunk]:
    """Return the chunks of a shard, given the mask of its tokens that are not ignored."""
    if chunk_size is not None:
        return cut_time(counted, chunk_size)
    most = chunk_tokens or rows_per_chunk(facts.vocab_size, facts.dtype, counted.device.type)
    return cut_rows(counted.flatten(), most)


def _linear_loss(
    match: FormulaMatch,
    hidden: Any,
    target: Any,
    loss_scale: float | Tensor,
    chunk_tokens: int | None,
    vocab: VocabShard | None,
) -> TokenLoss:
    """Return the loss by `linear_cross_entropy`, for `torch.compile` and for a split vocabulary."""
    return linear_cross_entropy(
        hidden,
        match.projection.weight,
        target,
        bias=match.projection.bias,
        ignore_index=match.ignore_index,
        label_smoothing=match.label_smoothing,
        smoothing_convention=match.smoothing_convention,
        class_weight=match.class_weight,
        loss_scale=loss_scale,
        chunk_tokens=chunk_tokens,
        vocab=vocab,
    )


def _formula_loss(
    match: FormulaMatch, head: nn.ModuleDict, shard: Shard, chunks: list[Chunk], loss_scale: float | Tensor
) -> TokenLoss:
    """Return one device's loss, its gradient in closed form, given the original pair's match and a replica of it."""
    here = match.of_replica(head)
    weight_VD = here.projection.weight
    bias_V = here.projection.bias
    (hidden_ND,) = rows_of(shard)
    ignored = None
    # Chunks contain ignored rows only while a CUDA graph is recorded
    if recording(hidden_ND.device):
        ignored = here.ignore_index
    # Under autocast the products are narrower than the leaves, which receive gradients of their own dtype
    projection = Projection(weight_VD, bias_V, product_dtype(hidden_ND))
    chunk_loss = LinearFormula(projection, shard.target.flatten(), here.soft_target, ignored=ignored)
    leaves = LinearLeaves(hidden_ND, weight_VD, bias_V)
    return differentiable_loss(chunk_loss, chunks, leaves, loss_scale)


def _autograd_loss(head: nn.ModuleDict, shard: Shard, chunks: list[Chunk], loss_scale: float | Tensor) -> TokenLoss:
    """Return one device's loss, its gradient by autograd, chunk by chunk."""
    # A tied parameter is listed once, and its gradient is the sum over all of its uses
    params = tuple(head.parameters())
    names = tuple(shard.per_token)
    target_N = shard.target.flatten()

    def per_chunk(leaves: tuple[Tensor, ...], rows: tuple[Tensor, ...], chunk: Chunk) -> TokenLoss:
        # A copy of the head whose parameters are the leaves of this chunk's graph
        bound = bind(head, {id(p): leaf for p, leaf in zip(params, leaves, strict=True)})
        # As many dimensions as hidden had: the generator may expect (batch, time, D)
        shape = (*(1,) * (shard.target.dim() - 1), len(rows[0]))
        logits_KV = project(bound["generator"], names, shape, rows)
        return criterion_loss(bound["criterion"], logits_KV, target_N[chunk])

    empty = TokenLoss.zero(shard.hidden.dtype, shard.hidden.device, hasattr(head["criterion"], "token_loss"))
    chunk_loss = AutogradChunkLoss(per_chunk, params)
    return differentiable_sum(chunk_loss, chunks, rows_of(shard), params, empty, loss_scale)


def _moved(loss: TokenLoss, device: torch.device) -> TokenLoss:
    """Return the loss on that device."""
    moved: TokenLoss = map_tensors(lambda t: t.to(device), loss)
    return moved
