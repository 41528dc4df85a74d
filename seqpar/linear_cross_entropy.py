"""A projection onto the vocabulary and its cross-entropy in chunks, every gradient by formula.

Shape suffixes: N rows (batch x time), K kept rows of one chunk, D hidden, V vocabulary (this rank's part of it, where
it is split; `vocab_size` is always the global one).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqpar.chunks import Chunk, check_size, cut_rows, rows_per_chunk
from seqpar.collectives import copy_to_group, world_size
from seqpar.criteria import Convention, SoftTarget, check_range, check_smoothing, check_target, soft_target
from seqpar.linear_formula import LinearFormula, Projection, product_dtype, walk_by_formula
from seqpar.token_loss import TokenLoss
from seqpar.vocab_parallel import VocabShard, local_copy, local_rows


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: Convention = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> TokenLoss:
    """The summed cross-entropy of `hidden @ weight.T + bias`, while one chunk's logits exist at a time.

    Plain equivalent, with its gradients, to the last digits of float64:

        logits = F.linear(hidden, weight, bias).flatten(0, -2)
        F.cross_entropy(logits, target.flatten(), class_weight, label_smoothing=label_smoothing, reduction="sum")

    The loss of a row with target y, logits z, p = softmax(z) and token weight a is
    `a * (sum_k w_k q_k (-log p_k) + z_loss * logsumexp(z)^2)`; rows whose target is `ignore_index` are never projected.

    Args:
        hidden: (rows, D) or (batch, time, D).
        weight: (V, D), `nn.Linear`'s and `nn.Embedding`'s layout, so it may be tied to an embedding. A DTensor split
            by rows on a mesh of one axis gives `vocab` by itself.
        target: whole numbers of hidden's leading shape, in [0, vocab_size) or `ignore_index`.
        bias: (V,).
        label_smoothing, smoothing: how much of q is taken from the target, in [0, 1), and the convention by which it
            is shared out, as `seqpar.LabelSmoothing` defines "torch", "fairseq" and "harvard".
        z_loss: factor of the squared log-partition, which keeps logits near 0 (PaLM, Chowdhery et al. 2022,
            section 5, with 1e-4).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, 2024, section 2); None leaves them.
        temperature: what logits are then divided by; above 0.
        class_weight: (V,), w: each class's term of the sum times its weight, in "harvard" the whole KL term
            `q_k (log q_k - log p_k)`. For "torch" these are the weights of `torch.nn.CrossEntropyLoss`. Not
            differentiated.
        token_weight: target's shape, a: each token's loss times its weight (an advantage, the weight of its sequence),
            of either sign. `tokens`, `nll` and `correct` count every token once. Differentiated where it needs it.
        loss_scale: what `total` will be multiplied by before `backward`, a number or a tensor of one. For float16,
            where the gradients kept would be too small: `scaler.get_scale() / tokens` with a GradScaler. They are
            kept so many times as large, and divided again; any factor gives the right gradient.
        chunk_tokens: the most rows whose logits exist at once; None chooses by bytes.
        vocab: which classes `weight` holds, where the vocabulary is split over ranks. Then hidden and target are the
            same on every rank of the group; weight and bias are this rank's rows, and class_weight is this rank's
            part, or all of it. Per chunk two all-reduces, per call one small all-gather, per backward one all-reduce
            of the hidden gradient.

    Returns:
        `TokenLoss`, the same on every rank of the group: `total` in float32 or wider; `nll` without smoothing, weights
        and z-loss, at this temperature; `correct` by the lowest of the most likely classes. `total` can be
        differentiated once.

    Under autocast the products are in autocast's dtype, as `F.linear`'s are.

    Raises:
        TypeError: a float target; tensors of different dtypes; a DTensor of another layout.
        ValueError: shapes or devices that disagree; a number out of its range; a shard beyond the vocabulary.
        IndexError: a target outside [0, vocab_size) that is not ignored (with value and position), on every rank.
        RuntimeError: ranks that disagree on sizes, settings, targets or the validity of their inputs, on every rank.
    """
    if isinstance(weight, DTensor):
        if vocab is not None:
            raise TypeError("weight is a DTensor, which says itself how it is split; leave vocab out")
        weight, bias, vocab = local_rows(weight, bias)
        class_weight = None if class_weight is None else local_copy(class_weight, "class_weight")
        hidden, target = local_copy(hidden, "hidden"), local_copy(target, "target")
        token_weight = None if token_weight is None else local_copy(token_weight, "token_weight")
    inputs = Inputs(hidden, weight, target, bias, class_weight, token_weight)
    settings = Settings(ignore_index, label_smoothing, smoothing, z_loss, softcap, temperature, chunk_tokens)
    shard, q = checked(inputs, settings, vocab)
    hidden_ND, chunks, formula = plan(inputs, settings, shard, q)
    weight_N = None if token_weight is None else token_weight.flatten()
    return walk_by_formula(hidden_ND, weight, bias, chunks, formula, weight_N, loss_scale)


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
    return copy_to_group(hidden, shard.group).flatten(0, -2), chunks, LinearFormula(projection, target_N, q, part)


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
