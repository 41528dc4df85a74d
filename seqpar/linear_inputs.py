"""What a loss over a projection is given: checked once, at the edge, on every rank; and how it is cut.

Shape suffixes: N rows (batch x time), D hidden, V this rank's part of the vocabulary; `vocab_size` is always the global
one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.chunks import Chunk, check_size, cut_rows, recording, rows_per_chunk
from seqpar.collectives import copy_to_group, world_size
from seqpar.criteria import Convention, SoftTarget, check_range, check_smoothing, check_target, soft_target
from seqpar.linear_formula import LinearFormula, Projection, product_dtype
from seqpar.sharded import is_dtensor
from seqpar.vocab_parallel import VocabShard, local_copy, local_rows


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
    smoothing: Convention = "torch"
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
) -> tuple[Tensor, list[Chunk], LinearFormula]:
    """The rows, how they are cut, and what is computed of each chunk."""
    hidden, target_N, dtype = inputs.hidden, inputs.target.flatten().long(), product_dtype(inputs.hidden)
    projection = Projection(inputs.weight, inputs.bias, dtype, settings.softcap, settings.temperature)
    # Alone, the softmax here is the whole one; in a group, `shard` makes it so
    part = shard if world_size(shard.group) > 1 else None
    most = settings.chunk_tokens or rows_per_chunk(shard.largest_even_part, dtype, hidden.device.type)
    chunks = cut_rows(target_N != settings.ignore_index, most)
    ignored = settings.ignore_index if recording(hidden.device) else None
    formula = LinearFormula(projection, target_N, q, part, ignored)
    return copy_to_group(hidden, shard.group).flatten(0, -2), chunks, formula


def checked(inputs: Inputs, settings: Settings, vocab: VocabShard | None) -> tuple[VocabShard, SoftTarget]:
    """The shard, and the soft target as this rank's classes see it; or what is wrong, on every rank of the group."""
    wrong: Exception | None = None
    try:
        _check_settings(settings)
        _check_tensors(inputs)
        rows = inputs.weight.size(0)
        shard = vocab or VocabShard(None, 0, rows)
        if shard.start + rows > shard.vocab_size:
            raise ValueError(
                f"weight has {rows} rows from class {shard.start} on, beyond the vocabulary [0, {shard.vocab_size})"
            )
        weight_V = _own_part(inputs.class_weight, rows, shard)
        q = soft_target(settings.label_smoothing, settings.smoothing, settings.ignore_index, shard.vocab_size)
        check_range(inputs.target, inputs.target != settings.ignore_index, shard.vocab_size)
    except (TypeError, ValueError, IndexError) as error:
        wrong = error
    if vocab is not None:
        try:
            vocab.check(len(inputs.weight), _facts(inputs, settings, vocab, wrong))
        except RuntimeError as disagreement:
            raise (wrong if world_size(vocab.group) == 1 and wrong else disagreement) from wrong
    if wrong is not None:
        raise wrong
    excluded = None if q.excluded is None else q.excluded - shard.start
    if excluded is not None and not 0 <= excluded < rows:
        excluded = None
    return shard, q._replace(excluded=excluded, weight_V=weight_V, z_loss=float(settings.z_loss))


def _facts(inputs: Inputs, settings: Settings, vocab: VocabShard, wrong: Exception | None) -> dict[str, object]:
    """What the ranks of a group must have alike: otherwise they would wait for each other, or add up nonsense."""
    hidden, weight, target = inputs.hidden, inputs.weight, inputs.target
    facts: dict[str, object] = {
        "the vocabulary's size": vocab.vocab_size,
        "the width of hidden and weight": (hidden.shape[-1:], weight.shape[1:]),
        "the dtype": (hidden.dtype, weight.dtype),
        "the number of tokens": hidden.shape[:-1],
        "bias": "none" if inputs.bias is None else "given",
        "class_weight": "none" if inputs.class_weight is None else "given",
        "token_weight": "none" if inputs.token_weight is None else "given",
        "whether hidden needs a gradient": hidden.requires_grad and torch.is_grad_enabled(),
        **settings._asdict(),
        "what is wrong": "nothing" if wrong is None else f"{type(wrong).__name__}: {wrong}",
    }
    if not target.is_floating_point() and not target.is_complex():
        # Other targets would be other chunks; a checksum finds it for the price of one number
        flat_N = target.flatten().long()
        facts["the targets"] = int((flat_N * torch.arange(1, len(flat_N) + 1, device=flat_N.device)).sum())
    return facts


def _check_settings(settings: Settings) -> None:
    z_loss, softcap, temperature = settings.z_loss, settings.softcap, settings.temperature
    check_size(settings.chunk_tokens, "chunk_tokens")
    check_smoothing(settings.label_smoothing, settings.smoothing, ("label_smoothing", "smoothing"))
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"z_loss is {z_loss}; it must be a finite number of at least 0")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap is {softcap}; it must be a finite number above 0, or None to leave logits alone")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}; it must be a finite number above 0")


def _check_tensors(inputs: Inputs) -> None:
    hidden, weight, target, bias, class_weight, token_weight = inputs
    check_target(hidden, target)
    if weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; weight must be (V, D) with "
            "hidden's last size D, the layout of nn.Linear.weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias must be (V,)")
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(
            f"token_weight has shape {tuple(token_weight.shape)} and target {tuple(target.shape)}; it needs one number "
            "for each token"
        )
    if token_weight is not None and not token_weight.is_floating_point():
        raise TypeError(f"token_weight has dtype {token_weight.dtype}; it must be a floating dtype")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden has dtype {hidden.dtype}; it must be a floating dtype")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    others = {"target": target, "weight": weight, "bias": bias}
    for name, tensor in {**others, "class_weight": class_weight, "token_weight": token_weight}.items():
        if tensor is None:
            continue
        if tensor.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device} and {name} on {tensor.device}; move them to one device")
        if name in ("weight", "bias") and tensor.dtype != hidden.dtype and not autocast:
            raise TypeError(f"hidden has dtype {hidden.dtype} and {name} {tensor.dtype}; cast one, or use autocast")


def _own_part(class_weight: Tensor | None, rows: int, shard: VocabShard) -> Tensor | None:
    """This rank's class weights; the whole vocabulary's are cut."""
    if class_weight is None or class_weight.shape == (rows,):
        return class_weight
    if class_weight.shape != (shard.vocab_size,):
        sizes = f"({rows},)" if rows == shard.vocab_size else f"({rows},), this rank's part, or ({shard.vocab_size},)"
        raise ValueError(f"class_weight has shape {tuple(class_weight.shape)}; it must be {sizes}")
    return class_weight[shard.start : shard.start + rows]
