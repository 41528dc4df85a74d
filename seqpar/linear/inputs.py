"""Check the arguments of a loss over a projection, on every rank, and prepare its chunks.

Shape suffixes: N rows (batch x time), D hidden, V this rank's classes; `vocab_size` is always that of the whole
vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.checks import (
    check_floating,
    check_integer,
    check_loss_scale,
    check_number,
    check_one_device,
    check_plain_products,
    check_range,
    check_shapes,
    check_size,
    check_target,
    check_type,
    is_dtensor,
    refuse_transforms,
)
from seqpar.core.chunked_gradient import sum_over_chunks
from seqpar.core.chunks import Chunk, cut_rows, even_slices, rows_per_chunk
from seqpar.core.device_facts import LateNumber, is_capturing, why_no_kernel
from seqpar.core.device_sum import Job
from seqpar.core.token_loss import mark_same_on
from seqpar.distributed.collectives import copy_to_group, group_sum, world_size
from seqpar.distributed.vocab_parallel import VocabShard, local_copy, local_rows
from seqpar.kernels.row_kernel import width_for_kernel
from seqpar.kernels.row_loss import count_targets
from seqpar.linear.chunk_loss import ProductLoss, ScoreLoss, chunk_loss
from seqpar.linear.fused_loss import FusedLoss
from seqpar.linear.projection import ByLeaf, LinearLeaves, Projection, flatten, product_dtype
from seqpar.rows.conventions import Convention
from seqpar.rows.scores import ClassWeights, RowFunction
from seqpar.rows.smoothing import CrossEntropyOfScores, SoftTarget, check_smoothing, class_weights, soft_target


class Inputs(NamedTuple):
    """The tensors that the caller passed."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None


class Settings(NamedTuple):
    """The numbers that the caller passed; they must be the same on all ranks of a group."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing_convention: Convention = "torch"
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None


def local_tensors(inputs: Inputs, vocab: VocabShard | None) -> tuple[Inputs, VocabShard | None]:
    """Return this rank's tensors and its shard if the weight is a DTensor, else the arguments unchanged."""
    if not is_dtensor(inputs.weight):
        return inputs, vocab
    if vocab is not None:
        raise TypeError("weight is a DTensor and vocab is given; omit vocab: the weight already defines the split")
    weight, bias, vocab = local_rows(inputs.weight, inputs.bias)
    whole = ("hidden", "target", "class_weight", "token_weight")
    copies = {name: local_copy(getattr(inputs, name), name) for name in whole}
    return inputs._replace(weight=weight, bias=bias, **copies), vocab  # type: ignore[arg-type]


class PreparedCall(NamedTuple):
    """The rows of a projection, cut into chunks."""

    leaves: LinearLeaves
    chunks: Sequence[Chunk]
    projection: Projection
    target_N: Tensor
    split: VocabShard | None
    """The classes that this rank has; None if it has all."""
    ignored: int | None
    """The target of rows that a chunk contains but that do not count; None if no chunk contains such rows."""

    def job(self, loss: ProductLoss, per_token: tuple[Tensor, ...] = ()) -> Job:
        """Return the job that sums this loss over the rows, given the per-token tensors that the loss takes."""
        leaves = flatten(self.leaves._replace(per_token=per_token), self.chunks)
        walk = partial(sum_over_chunks, partial(chunk_loss, loss, self.target_N, self.ignored))
        return walk, self.chunks, leaves


class Checked(NamedTuple):
    """What follows from arguments that have been checked."""

    shard: VocabShard
    q: SoftTarget
    """The target distribution; its excluded class is counted from this rank's first."""
    class_weight: Tensor | None
    """The weights of this rank's classes."""
    on_its_way: LateNumber | None = None
    """How many targets are not ignored, negative if one of those is no class; None if they were checked right away."""


def prepare(
    inputs: Inputs,
    settings: Settings,
    given: Checked,
    dtype: torch.dtype | None = None,
) -> PreparedCall:
    """Return the projection, the tensors with one row per token, and the chunks of rows.

    Args:
        dtype: the dtype of the matrix products; None means autocast's if autocast is on, else hidden's.
    """
    call = _describe_call(inputs, settings, given, dtype)
    return call._replace(chunks=_cut_chunks(inputs, settings, given, call.projection))


def _describe_call(
    inputs: Inputs, settings: Settings, given: Checked, dtype: torch.dtype | None = None
) -> PreparedCall:
    """Return what `prepare` does, but without chunks, so as not to wait for a number on its way from the device."""
    hidden = inputs.hidden
    shard = given.shard
    target_N = inputs.target.flatten().long()
    dtype = dtype or product_dtype(hidden)
    softcap = None if settings.softcap is None else float(settings.softcap)
    projection = Projection(inputs.weight, inputs.bias, dtype, softcap, float(settings.temperature))
    # A group of one rank has all classes and needs no sums over ranks
    split = None
    if shard.group is not None and world_size(shard.group) > 1:
        split = shard
    # Chunks contain ignored rows only while a CUDA graph is captured
    ignored = settings.ignore_index if is_capturing(hidden.device) else None
    if split is not None:
        # Each rank's hidden gradient covers its own classes only; the backward of this copy sums them over the group
        hidden = copy_to_group(hidden, shard.group)
        mark_same_on(hidden, world_size(shard.group))
    hidden_ND = hidden.flatten(0, -2)
    token_weight_N = None if inputs.token_weight is None else inputs.token_weight.flatten()
    leaves = ByLeaf(hidden_ND, inputs.weight, inputs.bias, token_weight_N)
    return PreparedCall(leaves, (), projection, target_N, split, ignored)


def _cut_chunks(inputs: Inputs, settings: Settings, given: Checked, projection: Projection) -> Sequence[Chunk]:
    """Return the rows whose target is not ignored, in chunks; raise IndexError if one of these is not a class."""
    # Every rank must cut the same chunks, even where ranks have different numbers of classes
    classes = given.shard.largest_even_part
    kind = inputs.hidden.device.type
    width = width_for_kernel(inputs.hidden.size(-1), kind) if projection.has_kernels else None
    most = settings.chunk_tokens or rows_per_chunk(classes, projection.weight_VD.dtype, kind, width)
    count = None
    if given.on_its_way is not None:
        count = given.on_its_way.read()
        if count == inputs.target.numel():
            return even_slices(count, most)
    target = inputs.target.long()
    counted = target != settings.ignore_index
    if count is not None and count < 0:
        check_range(target, counted, given.shard.vocab_size)
    return cut_rows(counted.flatten(), most, count)


def cross_entropy_job(inputs: Inputs, settings: Settings, given: Checked, chunks: Sequence[Chunk] | None = None) -> Job:
    """Return the job that sums a cross-entropy.

    Args:
        chunks: None cuts the rows that are not ignored.
    """
    call = _describe_call(inputs, settings, given)
    projection = call.projection
    fused = None
    if call.split is None and projection.has_kernels:
        # Before waiting for the number of rows: from then until the first product the device has nothing to do
        fused = _fuse(given, call, settings.ignore_index)
    if chunks is None:
        chunks = _cut_chunks(inputs, settings, given, projection)
    if fused is not None:
        return fused, chunks, flatten(call.leaves, chunks)
    call = call._replace(chunks=chunks)
    weights, gold_weight_N = weights_of_classes(given, call.target_N, call.split, projection.wide)
    projection.ask_for(RowFunction(weights=weights, correct=True, split=call.split))
    loss = ScoreLoss(projection, CrossEntropyOfScores(given.q, weights))
    return call.job(loss, () if gold_weight_N is None else (gold_weight_N,))


def _fuse(given: Checked, call: PreparedCall, ignore_index: int) -> FusedLoss:
    """Return the walk that computes a chunk's loss and gradient in one kernel."""
    projection = call.projection
    weight_V = given.class_weight
    if weight_V is not None:
        weight_V = weight_V.detach().to(projection.wide).contiguous()
    weights = class_weights(given.q, weight_V)
    count = None if given.on_its_way is None else given.on_its_way.on_device
    of_all = None if weights is None else weights.total
    in_chunks = call.ignored is not None
    return FusedLoss(projection, given.q, weight_V, of_all, call.target_N, count, ignore_index, in_chunks)


def weights_of_classes(
    given: Checked, target_N: Tensor, split: VocabShard | None, dtype: torch.dtype
) -> tuple[ClassWeights | None, Tensor | None]:
    """Return the weights of this rank's classes, with their sum over all ranks, and that of each target's class."""
    weight_V = given.class_weight
    if weight_V is None:
        return class_weights(given.q, None), None
    weight_V = weight_V.detach().to(dtype)
    weights = class_weights(given.q, weight_V)
    # An ignored target need not be a class; while a CUDA graph is being captured, no target need be one
    index_N, here_N = given.shard.locate(target_N, len(weight_V))
    gold_weight_N = weight_V.new_zeros(len(target_N))
    if len(weight_V):
        gold_weight_N = weight_V[index_N].where(here_N, gold_weight_N)
    if split is not None:
        gold_weight_N = group_sum(gold_weight_N, split.group)
        if weights is not None and isinstance(weights.total, Tensor):
            weights = weights._replace(total=group_sum(weights.total, split.group))
    return weights, gold_weight_N


def check_inputs(
    inputs: Inputs,
    settings: Settings,
    vocab: VocabShard | None,
    loss_scale: float | Tensor,
    *,
    any_dtype: bool = False,
) -> Checked:
    """Return the shard, the soft target and the weights of this rank's classes, after checking the arguments.

    Call this within `tell_errors`, and before `compare_ranks` if the vocabulary is split.

    Args:
        any_dtype: whether weight and bias may have a different dtype from hidden without autocast.
    """
    refuse_transforms(inputs)
    _check_settings(settings)
    check_loss_scale(loss_scale)
    check_tensors(inputs, any_dtype=any_dtype)
    return _describe(inputs, settings, vocab)


@contextlib.contextmanager
def tell_errors(vocab: VocabShard | None) -> Iterator[None]:
    """Make an invalid argument raise an error on every rank of the group."""
    check_type(vocab, "vocab", (VocabShard, NoneType), "a seqpar.VocabShard, or None")
    try:
        yield
    except (TypeError, ValueError, IndexError) as wrong:
        if vocab is not None:
            # The other ranks, which would otherwise wait, raise too: RuntimeError unless they have found the same error
            vocab.meet({"what is wrong": f"{type(wrong).__name__}: {wrong}"})
        raise


def _check_settings(settings: Settings) -> None:
    """Raise unless all numbers are in their ranges; settings that have passed are not checked again."""
    try:
        _numbers_are_right(*settings)
    except TypeError:
        # A list cannot be hashed; the uncached check refuses it with its own message
        _numbers_are_right.__wrapped__(*settings)


# Typed, because True == 1
@lru_cache(typed=True)
def _numbers_are_right(*numbers: object) -> None:
    """Raise unless all settings, given in order, are in their ranges."""
    settings = Settings(*numbers)  # type: ignore[arg-type]
    check_integer(settings.ignore_index, "ignore_index")
    check_size(settings.chunk_tokens, "chunk_tokens")
    check_smoothing(settings.label_smoothing, settings.smoothing_convention)
    check_number(settings.z_loss, "z_loss", at_least=0)
    if settings.softcap is not None:
        check_number(settings.softcap, "softcap", above=0)
    check_number(settings.temperature, "temperature", above=0)


def _describe(inputs: Inputs, settings: Settings, vocab: VocabShard | None) -> Checked:
    """Return what follows from the arguments; raise if a class lies outside the vocabulary."""
    rows = inputs.weight.size(0)
    if vocab is None and not rows:
        check_shapes(False, "of at least one class", weight=inputs.weight)
    shard = vocab or whole_vocabulary(rows)
    if shard.start + rows > shard.vocab_size:
        raise ValueError(
            f"weight has {rows} rows from class {shard.start} on, beyond the vocabulary [0, {shard.vocab_size})"
        )
    weight_V = inputs.class_weight
    if weight_V is not None:
        weight_V = _local_class_weight(weight_V, rows, shard)
    q = whole_soft_target(
        float(settings.label_smoothing), settings.smoothing_convention, settings.ignore_index, shard.vocab_size
    )
    # In the target's own dtype -100 may be another number, such as 156 in uint8
    target = inputs.target.long()
    count = None
    if vocab is None:
        count = count_late(target, rows, settings.ignore_index)
    if count is None:
        check_range(target, target != settings.ignore_index, shard.vocab_size)
    # Counted from this rank's first class; only one rank has the excluded class
    excluded = None if q.excluded is None else q.excluded - shard.start
    if excluded is not None and not 0 <= excluded < rows:
        excluded = None
    return Checked(shard, q._replace(excluded=excluded, z_loss=float(settings.z_loss)), weight_V, count)


# Typed, because True == 1
whole_soft_target = lru_cache(typed=True)(soft_target)
"""The target distribution over a vocabulary, computed once for each combination of settings and size."""

whole_vocabulary = lru_cache(partial(VocabShard, None, 0))
"""The shard that has all classes of a vocabulary of this size."""


def count_late(target: Tensor, vocab_size: int, ignore_index: int) -> LateNumber | None:
    """Return how many targets are not ignored, as `Checked.on_its_way`; None if no kernel can count them."""
    if why_no_kernel(target.device.type) or is_capturing(target.device):
        return None
    return LateNumber(count_targets(target.flatten().contiguous(), vocab_size, ignore_index))


def check_tensors(inputs: Inputs, prefix: str = "", any_dtype: bool = False) -> None:
    """Raise unless the tensors' kinds, shapes, devices and dtypes fit each other.

    Args:
        prefix: the beginning of the names of hidden, weight and bias among the caller's arguments.
        any_dtype: as in `check_inputs`.
    """
    hidden, weight, target, bias, class_weight, token_weight = inputs
    projection = {f"{prefix}weight": weight, f"{prefix}bias": bias}
    weights = {"class_weight": class_weight, "token_weight": token_weight}
    check_target(target, **{f"{prefix}hidden": hidden})
    check_floating(weight, f"{prefix}weight")
    for name, tensor in ({f"{prefix}bias": bias} | weights).items():
        if tensor is not None:
            check_floating(tensor, name)
    wanted = "(..., D) and (V, D), the layout of nn.Linear.weight"
    fits = weight.dim() == 2 and weight.size(1) == hidden.size(-1)
    check_shapes(fits, wanted, **{f"{prefix}hidden": hidden, f"{prefix}weight": weight})
    if bias is not None:
        both = {f"{prefix}bias": bias, f"{prefix}weight": weight}
        check_shapes(bias.shape == weight.shape[:1], "(V,) and (V, D)", **both)
    if token_weight is not None:
        check_shapes(token_weight.shape == target.shape, "the same", token_weight=token_weight, target=target)
    check_one_device(**{f"{prefix}hidden": hidden}, target=target, **projection, **weights)
    is_cast = any_dtype or torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in projection.items():
        if tensor is None:
            continue
        check_plain_products(tensor, name)
        if tensor.dtype != hidden.dtype and not is_cast:
            dtypes = f"{prefix}hidden has dtype {hidden.dtype} and {name} {tensor.dtype}"
            raise TypeError(f"{dtypes}; cast one, or use autocast")


def _local_class_weight(class_weight: Tensor, rows: int, shard: VocabShard) -> Tensor:
    """Return the weights of this rank's classes, given either those or the weights of the whole vocabulary."""
    if class_weight.shape == (rows,):
        return class_weight
    if class_weight.shape != (shard.vocab_size,):
        of_all = "" if rows == shard.vocab_size else f" for this rank's classes, or ({shard.vocab_size},) for all"
        check_shapes(False, f"({rows},){of_all}", class_weight=class_weight)
    return class_weight[shard.start : shard.start + rows]
