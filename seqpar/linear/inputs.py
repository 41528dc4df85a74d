"""What a loss over a projection is given: checked once, at the edge, on every rank; and how it is cut.

Shape suffixes: N rows (batch x time), D hidden, V this rank's part of the vocabulary; `vocab_size` is always the global
one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import check_loss_scale
from seqpar.core.chunks import Chunk, check_size, cut_rows, recording, rows_per_chunk
from seqpar.core.tensor_checks import check_floating, check_integer_target, check_number, is_dtensor
from seqpar.distributed.collectives import copy_to_group, world_size
from seqpar.distributed.vocab_parallel import VocabShard, local_copy, local_rows
from seqpar.linear.formula import LinearFormula, LinearLeaves, Projection, product_dtype
from seqpar.losses.softmax_loss import Convention, SoftTarget, check_smoothing, soft_target
from seqpar.losses.target_checks import check_ignore_index, check_range


class Inputs(NamedTuple):
    """The tensors, as the caller gave them."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None


class Settings(NamedTuple):
    """The numbers, in which the ranks of a group must agree."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing_convention: Convention = "torch"
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None


def local_parts(inputs: Inputs, vocab: VocabShard | None) -> tuple[Inputs, VocabShard | None]:
    """What this rank holds, where weight is a DTensor, which says itself how the vocabulary is split."""
    if not is_dtensor(inputs.weight):
        return inputs, vocab
    if vocab is not None:
        raise TypeError("weight is a DTensor, which says itself how it is split; leave vocab out")
    weight, bias, vocab = local_rows(inputs.weight, inputs.bias)
    hidden, target = local_copy(inputs.hidden, "hidden"), local_copy(inputs.target, "target")
    class_weight, token_weight = inputs.class_weight, inputs.token_weight
    class_weight = None if class_weight is None else local_copy(class_weight, "class_weight")
    token_weight = None if token_weight is None else local_copy(token_weight, "token_weight")
    return Inputs(hidden, weight, target, bias, class_weight, token_weight), vocab


def plan(
    inputs: Inputs, settings: Settings, shard: VocabShard, q: SoftTarget
) -> tuple[LinearLeaves, list[Chunk], LinearFormula]:
    """Return the tensors by rows, how the rows are cut into chunks, and the loss of a chunk."""
    hidden, target_N, dtype = inputs.hidden, inputs.target.flatten().long(), product_dtype(inputs.hidden)
    softcap = None if settings.softcap is None else float(settings.softcap)
    projection = Projection(inputs.weight, inputs.bias, dtype, softcap, float(settings.temperature))
    # Alone, the softmax here is the whole one; in a group, `shard` makes it so
    part = shard if world_size(shard.group) > 1 else None
    most = settings.chunk_tokens or rows_per_chunk(shard.largest_even_part, dtype, hidden.device.type)
    chunks = cut_rows(target_N != settings.ignore_index, most)
    ignored = settings.ignore_index if recording(hidden.device) else None
    formula = LinearFormula(projection, target_N, q, part, ignored)
    hidden_ND = copy_to_group(hidden, shard.group).flatten(0, -2)
    token_weight_N = None if inputs.token_weight is None else inputs.token_weight.flatten()
    return LinearLeaves(hidden_ND, inputs.weight, inputs.bias, token_weight_N), chunks, formula


def checked(
    inputs: Inputs, settings: Settings, vocab: VocabShard | None, loss_scale: float | Tensor = 1.0, of: str = ""
) -> tuple[VocabShard, SoftTarget]:
    """The shard, and the soft target as this rank's classes see it; or what is wrong, on every rank of the group.

    `of` is what the names of hidden, weight and bias begin with in the caller's arguments.
    """
    if vocab is not None and not isinstance(vocab, VocabShard):
        raise TypeError(f"vocab is a {type(vocab).__name__}; it must be a seqpar.VocabShard, or None")
    wrong: Exception | None = None
    try:
        found = _valid(inputs, settings, vocab, loss_scale, of)
    except (TypeError, ValueError, IndexError) as error:
        wrong = error
    if wrong is not None:
        if vocab is not None:
            _tell(wrong, vocab)
        raise wrong
    if vocab is not None:
        vocab.check(len(inputs.weight), _facts(inputs, settings, vocab), inputs.hidden)
    return found


def _valid(
    inputs: Inputs, settings: Settings, vocab: VocabShard | None, loss_scale: float | Tensor, of: str
) -> tuple[VocabShard, SoftTarget]:
    _check_settings(settings)
    check_loss_scale(loss_scale)
    _check_kinds(inputs, of)
    _check_sizes(inputs, of)
    _check_places(inputs, of)
    rows = inputs.weight.size(0)
    if vocab is None and not rows:
        raise ValueError(f"{of}weight has shape {tuple(inputs.weight.shape)}; it must have at least one class")
    shard = vocab or VocabShard(None, 0, rows)
    if shard.start + rows > shard.vocab_size:
        raise ValueError(
            f"weight has {rows} rows from class {shard.start} on, beyond the vocabulary [0, {shard.vocab_size})"
        )
    weight_V = _own_part(inputs.class_weight, rows, shard)
    q = soft_target(
        float(settings.label_smoothing), settings.smoothing_convention, settings.ignore_index, shard.vocab_size
    )
    target = inputs.target.long()  # -100 is 156 to bytes
    check_range(target, target != settings.ignore_index, shard.vocab_size)
    excluded = None if q.excluded is None else q.excluded - shard.start
    if excluded is not None and not 0 <= excluded < rows:
        excluded = None
    return shard, q._replace(excluded=excluded, weight_V=weight_V, z_loss=float(settings.z_loss))


NOTHING_WRONG = {"what is wrong": "nothing"}


def _tell(wrong: Exception, vocab: VocabShard) -> None:
    """Raises RuntimeError unless the other ranks have the same fault; they would wait for this one."""
    try:
        vocab.meet({"what is wrong": f"{type(wrong).__name__}: {wrong}"})
    except RuntimeError as disagreement:
        raise disagreement from wrong


def _facts(inputs: Inputs, settings: Settings, vocab: VocabShard) -> dict[str, object]:
    """What the ranks of a group must have alike: otherwise they would wait for each other, or add up nonsense."""
    hidden, weight, target = inputs.hidden, inputs.weight, inputs.target
    flat_N = target.flatten().long()
    return {
        **NOTHING_WRONG,
        "the vocabulary's size": vocab.vocab_size,
        "the width of hidden and weight": (hidden.shape[-1:], weight.shape[1:]),
        "the dtype": (hidden.dtype, weight.dtype),
        "the number of tokens": hidden.shape[:-1],
        "bias": "none" if inputs.bias is None else "given",
        "class_weight": "none" if inputs.class_weight is None else "given",
        "token_weight": "none" if inputs.token_weight is None else "given",
        "whether hidden needs a gradient": hidden.requires_grad and torch.is_grad_enabled(),
        **settings._asdict(),
        # Other targets would be other chunks; a checksum finds it for the price of one number
        "the targets": int((flat_N * torch.arange(1, len(flat_N) + 1, device=flat_N.device)).sum()),
    }


def _check_settings(settings: Settings) -> None:
    check_ignore_index(settings.ignore_index)
    check_size(settings.chunk_tokens, "chunk_tokens")
    check_number(settings.label_smoothing, "label_smoothing", at_least=0, below=1)
    check_smoothing(settings.label_smoothing, settings.smoothing_convention)
    check_number(settings.z_loss, "z_loss", at_least=0)
    if settings.softcap is not None:
        check_number(settings.softcap, "softcap", above=0)
    check_number(settings.temperature, "temperature", above=0)


def _check_kinds(inputs: Inputs, of: str) -> None:
    check_floating(inputs.hidden, f"{of}hidden")
    check_floating(inputs.weight, f"{of}weight")
    check_integer_target(inputs.target)
    optional = {f"{of}bias": inputs.bias, "class_weight": inputs.class_weight, "token_weight": inputs.token_weight}
    for name, tensor in optional.items():
        if tensor is not None:
            check_floating(tensor, name)


def _check_sizes(inputs: Inputs, of: str) -> None:
    hidden, weight, target, bias, _, token_weight = inputs
    if hidden.dim() < 2 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"{of}hidden has shape {tuple(hidden.shape)} and target {tuple(target.shape)}; target must have hidden's "
            "leading shape: (N, D) with (N,), or (batch, time, D) with (batch, time)"
        )
    if weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            f"{of}hidden has shape {tuple(hidden.shape)} and {of}weight {tuple(weight.shape)}; {of}weight must be "
            f"(V, D) with {of}hidden's last size D, the layout of nn.Linear.weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{of}bias has shape {tuple(bias.shape)} and {of}weight {tuple(weight.shape)}; {of}bias must be (V,)"
        )
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(
            f"token_weight has shape {tuple(token_weight.shape)} and target {tuple(target.shape)}; it needs one number "
            "for each token"
        )


def _check_places(inputs: Inputs, of: str) -> None:
    """Raise ValueError for another device than hidden's, TypeError for another dtype, but for autocast."""
    hidden, autocast = inputs.hidden, torch.is_autocast_enabled(inputs.hidden.device.type)
    for name, tensor in inputs._asdict().items():
        if tensor is None:
            continue
        shown = f"{of}{name}" if name in ("weight", "bias") else name
        if tensor.device != hidden.device:
            raise ValueError(
                f"{of}hidden is on {hidden.device} and {shown} on {tensor.device}; move them to one device"
            )
        if name in ("weight", "bias") and tensor.dtype != hidden.dtype and not autocast:
            raise TypeError(
                f"{of}hidden has dtype {hidden.dtype} and {shown} {tensor.dtype}; cast one, or use autocast"
            )


def _own_part(class_weight: Tensor | None, rows: int, shard: VocabShard) -> Tensor | None:
    """This rank's class weights; the whole vocabulary's are cut."""
    if class_weight is None or class_weight.shape == (rows,):
        return class_weight
    if class_weight.shape != (shard.vocab_size,):
        sizes = f"({rows},)" if rows == shard.vocab_size else f"({rows},), this rank's part, or ({shard.vocab_size},)"
        raise ValueError(f"class_weight has shape {tuple(class_weight.shape)}; it must be {sizes}")
    return class_weight[shard.start : shard.start + rows]
