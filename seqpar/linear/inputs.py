"""Check the arguments of a loss over a projection, on every rank, and prepare its chunks.

Shape suffixes: N rows (batch x time), D hidden, V this rank's classes; `vocab_size` is always that of the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import check_loss_scale
from seqpar.core.chunks import Chunk, check_size, cut_rows, recording, rows_per_chunk
from seqpar.core.tensor_checks import check_floating, check_integer_target, check_number, is_dtensor
from seqpar.core.token_loss import mark_same_on, wide
from seqpar.core.transforms import refuse_transforms
from seqpar.distributed.collectives import copy_to_group, group_sum, world_size
from seqpar.distributed.vocab_parallel import VocabShard, local_copy, local_rows
from seqpar.linear.chunk_loss import StoredLoss, scored_chunks
from seqpar.linear.leaves import LinearLeaves, product_dtype
from seqpar.linear.projection import Projection
from seqpar.rows.conventions import Convention
from seqpar.rows.scores import ClassWeights, RowFunction
from seqpar.rows.smoothing import CrossEntropyOfScores, SoftTarget, check_smoothing, class_weights, soft_target
from seqpar.rows.target_checks import check_ignore_index, check_range


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
    class_weight = inputs.class_weight
    if class_weight is not None:
        class_weight = local_copy(class_weight, "class_weight")
    token_weight = inputs.token_weight
    if token_weight is not None:
        token_weight = local_copy(token_weight, "token_weight")
    hidden = local_copy(inputs.hidden, "hidden")
    target = local_copy(inputs.target, "target")
    return Inputs(hidden, weight, target, bias, class_weight, token_weight), vocab


class Planned(NamedTuple):
    """The rows of a projection, cut into chunks."""

    leaves: LinearLeaves
    chunks: Sequence[Chunk]
    projection: Projection
    target_N: Tensor
    split: VocabShard | None
    """The classes that this rank has; None if it has all."""
    ignored: int | None
    """The target of rows that a chunk contains but that do not count; None if no chunk contains such rows."""


class Checked(NamedTuple):
    """What follows from arguments that have been checked."""

    shard: VocabShard
    q: SoftTarget
    """The target distribution; its excluded class is counted from this rank's first."""
    class_weight: Tensor | None
    """Those of this rank's classes."""


def planned(
    inputs: Inputs,
    settings: Settings,
    shard: VocabShard,
    dtype: torch.dtype | None = None,
    chunks: Sequence[Chunk] | None = None,
) -> Planned:
    """Return the projection, the tensors with one row per token, and the chunks of rows.

    Args:
        dtype: that of the matrix products; None is autocast's if it is on, else hidden's.
        chunks: None cuts those rows that are not ignored.
    """
    hidden = inputs.hidden
    target_N = inputs.target.flatten().long()
    dtype = dtype or product_dtype(hidden)
    softcap = None if settings.softcap is None else float(settings.softcap)
    projection = Projection(inputs.weight, inputs.bias, dtype, softcap, float(settings.temperature))
    # A group of one rank has all classes and needs no sums over ranks
    split = shard if world_size(shard.group) > 1 else None
    if chunks is None:
        # Every rank must cut the same chunks, also where ranks have different numbers of classes
        most = settings.chunk_tokens or rows_per_chunk(shard.largest_even_part, dtype, hidden.device.type)
        chunks = cut_rows(target_N != settings.ignore_index, most)
    # Chunks contain ignored rows only while a CUDA graph is recorded
    ignored = settings.ignore_index if recording(hidden.device) else None
    # Each rank's hidden gradient covers its own classes only; the backward of this copy sums them over the group
    hidden = copy_to_group(hidden, shard.group)
    if split is not None:
        mark_same_on(hidden, world_size(shard.group))
    hidden_ND = hidden.flatten(0, -2)
    token_weight_N = None if inputs.token_weight is None else inputs.token_weight.flatten()
    leaves = LinearLeaves(hidden_ND, inputs.weight, inputs.bias, token_weight_N)
    return Planned(leaves, chunks, projection, target_N, split, ignored)


def plan(
    inputs: Inputs, settings: Settings, given: Checked, chunks: Sequence[Chunk] | None = None
) -> tuple[LinearLeaves, Sequence[Chunk], StoredLoss]:
    """Return the tensors with one row per token, the chunks of rows, and the function that computes a chunk's loss.

    Args:
        chunks: None cuts those rows that are not ignored.
    """
    leaves, chunks, projection, target_N, split, ignored = planned(inputs, settings, given.shard, chunks=chunks)
    weights, gold_weight_N = _weights_of_classes(given, target_N, split, wide(projection.weight_VD.dtype))
    if gold_weight_N is not None:
        leaves = leaves._replace(per_token=(gold_weight_N,))
    function = RowFunction(weights=weights, split=split)
    loss = CrossEntropyOfScores(given.q, weights)
    return leaves, chunks, scored_chunks(projection, function, loss, target_N, ignored)


def _weights_of_classes(
    given: Checked, target_N: Tensor, split: VocabShard | None, dtype: torch.dtype
) -> tuple[ClassWeights | None, Tensor | None]:
    """Return the weights of this rank's classes with their sum over all ranks, and that of each target's class."""
    weight_V = given.class_weight
    if weight_V is None:
        return class_weights(given.q, None), None
    weight_V = weight_V.detach().to(dtype)
    weights = class_weights(given.q, weight_V)
    # An ignored target need not be a class; while a CUDA graph is recorded, neither need another
    index_N, here_N = given.shard.locate(target_N, len(weight_V))
    gold_weight_N = weight_V.new_zeros(len(target_N))
    if len(weight_V):
        gold_weight_N = weight_V[index_N].where(here_N, gold_weight_N)
    if split is not None:
        gold_weight_N = group_sum(gold_weight_N, split.group)
        if weights is not None and isinstance(weights.total, Tensor):
            weights = weights._replace(total=group_sum(weights.total, split.group))
    return weights, gold_weight_N


def checked(
    inputs: Inputs,
    settings: Settings,
    vocab: VocabShard | None,
    loss_scale: float | Tensor = 1.0,
    *,
    any_dtype: bool = False,
    further: Callable[[VocabShard], Mapping[str, object]] = lambda shard: {},
) -> Checked:
    """Return the shard, the soft target and the weights of this rank's classes, after checking all arguments.

    An invalid argument raises an error on every rank of the group.

    Args:
        any_dtype: whether weight and bias may have another dtype than hidden without autocast.
        further: checks the caller's further arguments, given the shard, and returns those that must be the same on all
            ranks, by name.
    """
    refuse_transforms(inputs)
    if vocab is not None and not isinstance(vocab, VocabShard):
        raise TypeError(f"vocab is a {type(vocab).__name__}; it must be a seqpar.VocabShard, or None")
    try:
        found = _checked_on_this_rank(inputs, settings, vocab, loss_scale, any_dtype)
        facts = further(found.shard)
    except (TypeError, ValueError, IndexError) as wrong:
        if vocab is not None:
            _send_error_to_group(wrong, vocab)
        raise
    if vocab is not None:
        rows = len(inputs.weight)
        vocab.check(rows, {**_facts(inputs, settings, vocab), **facts}, inputs.hidden)
        if inputs.token_weight is not None:
            vocab.check(rows, {}, inputs.token_weight.unsqueeze(-1), "token_weight")
    return found


def _checked_on_this_rank(
    inputs: Inputs, settings: Settings, vocab: VocabShard | None, loss_scale: float | Tensor, any_dtype: bool
) -> Checked:
    """Return what follows from the arguments; raise for arguments invalid on this rank."""
    _check_settings(settings)
    check_loss_scale(loss_scale)
    check_tensors(inputs, any_dtype=any_dtype)
    rows = inputs.weight.size(0)
    if vocab is None and not rows:
        raise ValueError(f"weight has shape {tuple(inputs.weight.shape)}; it must have at least one class")
    shard = vocab or VocabShard(None, 0, rows)
    if shard.start + rows > shard.vocab_size:
        raise ValueError(
            f"weight has {rows} rows from class {shard.start} on, beyond the vocabulary [0, {shard.vocab_size})"
        )
    weight_V = _local_class_weight(inputs.class_weight, rows, shard)
    q = soft_target(
        float(settings.label_smoothing), settings.smoothing_convention, settings.ignore_index, shard.vocab_size
    )
    # In the target's own dtype -100 may be another number, such as 156 in uint8
    target = inputs.target.long()
    check_range(target, target != settings.ignore_index, shard.vocab_size)
    # Counted from this rank's first class; only one rank has the excluded class
    excluded = None if q.excluded is None else q.excluded - shard.start
    if excluded is not None and not 0 <= excluded < rows:
        excluded = None
    return Checked(shard, q._replace(excluded=excluded, z_loss=float(settings.z_loss)), weight_V)


def check_tensors(inputs: Inputs, prefix: str = "", any_dtype: bool = False) -> None:
    """Raise unless the tensors' kinds, shapes, devices and dtypes fit each other.

    Args:
        prefix: the beginning of the names of hidden, weight and bias among the caller's arguments.
        any_dtype: as in `checked`.
    """
    _check_kinds(inputs, prefix)
    _check_shapes(inputs, prefix)
    _check_devices_and_dtypes(inputs, prefix, any_dtype)


NOTHING_WRONG = {"what is wrong": "nothing"}


def _send_error_to_group(wrong: Exception, vocab: VocabShard) -> None:
    """Let the other ranks, which would otherwise wait for this one, raise; raise RuntimeError if theirs differ."""
    try:
        vocab.meet({"what is wrong": f"{type(wrong).__name__}: {wrong}"})
    except RuntimeError as disagreement:
        raise disagreement from wrong


def _facts(inputs: Inputs, settings: Settings, vocab: VocabShard) -> dict[str, object]:
    """Return everything that must be the same on all ranks of a group, by its name in the error message.

    Ranks that differ in any of it would wait for each other, or add up sums of different things.
    """
    hidden = inputs.hidden
    weight = inputs.weight
    target_N = inputs.target.flatten().long()
    return {
        **NOTHING_WRONG,
        "the vocabulary's size": vocab.vocab_size,
        "the width of hidden and weight": (hidden.shape[-1:], weight.shape[1:]),
        "the dtype": (hidden.dtype, weight.dtype),
        "the number of tokens": hidden.shape[:-1],
        "bias": _presence(inputs.bias),
        "class_weight": _presence(inputs.class_weight),
        "token_weight": _presence(inputs.token_weight),
        "whether hidden needs a gradient": hidden.requires_grad and torch.is_grad_enabled(),
        **settings._asdict(),
        # Different targets would give different chunks; a checksum of them costs one number
        "the targets": int((target_N * torch.arange(1, len(target_N) + 1, device=target_N.device)).sum()),
    }


def _presence(tensor: Tensor | None) -> str:
    """Return whether an optional tensor was given, in words."""
    return "none" if tensor is None else "given"


def _check_settings(settings: Settings) -> None:
    """Raise unless all numbers are in their ranges."""
    check_ignore_index(settings.ignore_index)
    check_size(settings.chunk_tokens, "chunk_tokens")
    check_number(settings.label_smoothing, "label_smoothing", at_least=0, below=1)
    check_smoothing(settings.label_smoothing, settings.smoothing_convention)
    check_number(settings.z_loss, "z_loss", at_least=0)
    if settings.softcap is not None:
        check_number(settings.softcap, "softcap", above=0)
    check_number(settings.temperature, "temperature", above=0)


def _check_kinds(inputs: Inputs, prefix: str) -> None:
    """Raise TypeError unless the target has class indices and all other tensors have a floating dtype."""
    check_floating(inputs.hidden, f"{prefix}hidden")
    check_floating(inputs.weight, f"{prefix}weight")
    check_integer_target(inputs.target)
    optional = {f"{prefix}bias": inputs.bias, "class_weight": inputs.class_weight, "token_weight": inputs.token_weight}
    for name, tensor in optional.items():
        if tensor is not None:
            check_floating(tensor, name)


def _check_shapes(inputs: Inputs, prefix: str) -> None:
    """Raise ValueError unless the shapes fit each other."""
    hidden, weight, target, bias, _, token_weight = inputs
    if hidden.dim() < 2 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"{prefix}hidden has shape {tuple(hidden.shape)} and target {tuple(target.shape)}; target must have "
            "hidden's leading shape: (N, D) with (N,), or (batch, time, D) with (batch, time)"
        )
    if weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            f"{prefix}hidden has shape {tuple(hidden.shape)} and {prefix}weight {tuple(weight.shape)}; "
            f"{prefix}weight must be (V, D) with {prefix}hidden's last size D, the layout of nn.Linear.weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias has shape {tuple(bias.shape)} and {prefix}weight {tuple(weight.shape)}; "
            f"{prefix}bias must be (V,)"
        )
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(
            f"token_weight has shape {tuple(token_weight.shape)} and target {tuple(target.shape)}; it must have "
            "one number for each token"
        )


def _check_devices_and_dtypes(inputs: Inputs, prefix: str, any_dtype: bool) -> None:
    """Raise ValueError for a device other than hidden's, TypeError for another dtype unless something casts it."""
    hidden = inputs.hidden
    is_cast = any_dtype or torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in inputs._asdict().items():
        if tensor is None:
            continue
        shown = f"{prefix}{name}" if name in ("weight", "bias") else name
        if tensor.device != hidden.device:
            raise ValueError(
                f"{prefix}hidden is on {hidden.device} and {shown} on {tensor.device}; move them to one device"
            )
        if name in ("weight", "bias") and tensor.dtype != hidden.dtype and not is_cast:
            raise TypeError(
                f"{prefix}hidden has dtype {hidden.dtype} and {shown} {tensor.dtype}; cast one, or use autocast"
            )


def _local_class_weight(class_weight: Tensor | None, rows: int, shard: VocabShard) -> Tensor | None:
    """Return the weights of this rank's classes, given those or the weights of the whole vocabulary."""
    if class_weight is None or class_weight.shape == (rows,):
        return class_weight
    if class_weight.shape != (shard.vocab_size,):
        allowed = f"({rows},)"
        if rows != shard.vocab_size:
            allowed += f" for this rank's classes, or ({shard.vocab_size},) for all"
        raise ValueError(f"class_weight has shape {tuple(class_weight.shape)}; it must be {allowed}")
    return class_weight[shard.start : shard.start + rows]
