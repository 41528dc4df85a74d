"""A projection onto the vocabulary and its cross-entropy in chunks, every gradient by formula.

Shape suffixes: N rows (batch x time), K kept rows of one chunk, D hidden, V vocabulary (this rank's part of it, where
it is split; `vocab_size` is always the global one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqpar.chunked_gradient import ByFormula, Gradients, chunked_gradient
from seqpar.chunks import Chunk, check_size, cut_rows, rows_per_chunk
from seqpar.collectives import copy_to_group, world_size
from seqpar.criteria import (
    Convention,
    SoftTarget,
    check_range,
    check_smoothing,
    check_target,
    logits_gradient_,
    row_losses,
    soft_target,
    softmax_and_sums,
)
from seqpar.token_loss import TokenLoss, wide
from seqpar.vocab_parallel import VocabShard, local_copy, local_rows

CACHE = 2**23
"""Bytes of logits, for each CPU thread, that the softmax's dozen passes go over together: few enough to be read from a
cache, enough that the calls themselves cost little (measured from 2^18 to a whole chunk)."""


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
    class_weight: Tensor | None = None,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> TokenLoss:
    """The summed cross-entropy of `hidden @ weight.T + bias`, while one chunk's logits exist at a time.

    Plain equivalent, with its gradients, to the last digits of float64:

        logits = F.linear(hidden, weight, bias).flatten(0, -2)
        F.cross_entropy(logits, target.flatten(), class_weight, label_smoothing=label_smoothing, reduction="sum")

    The loss of a row with target y, logits z and p = softmax(z) is
    `sum_k w_k q_k (-log p_k) + z_loss * logsumexp(z)^2`; rows whose target is `ignore_index` are never projected.

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
        class_weight: (V,), w: each class's term of the sum times its weight, in "harvard" the whole KL term
            `q_k (log q_k - log p_k)`. For "torch" these are the weights of `torch.nn.CrossEntropyLoss`. Not
            differentiated.
        chunk_tokens: the most rows whose logits exist at once; None chooses by bytes.
        vocab: which classes `weight` holds, where the vocabulary is split over ranks. Then hidden and target are the
            same on every rank of the group; weight and bias are this rank's rows, and class_weight is this rank's
            part, or all of it. Per chunk two all-reduces, per call one small all-gather, per backward one all-reduce
            of the hidden gradient.

    Returns:
        `TokenLoss`, the same on every rank of the group: `total` in float32 or wider; `nll` without smoothing, weights
        and z-loss; `correct` by the lowest of the most likely classes. `total` can be differentiated once.

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
    inputs = _Inputs(hidden, weight, target, bias, class_weight)
    settings = _Settings(ignore_index, label_smoothing, smoothing, z_loss, softcap, chunk_tokens)
    shard, q = _checked(inputs, settings, vocab)
    hidden_ND, target_N = copy_to_group(hidden, shard.group).flatten(0, -2), target.flatten().long()
    most = chunk_tokens or rows_per_chunk(shard.largest_even_part, _product_dtype(hidden), hidden.device.type)
    # Alone, the softmax here is the whole one; in a group, `shard` makes it so
    part = shard if world_size(shard.group) > 1 else None
    return walk_by_formula(
        hidden_ND, weight, bias, target_N, cut_rows(target_N != ignore_index, most), q, softcap=softcap, part=part
    )


def walk_by_formula(
    hidden_ND: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_N: Tensor,
    chunks: Sequence[Chunk],
    q: SoftTarget,
    *,
    softcap: float | None = None,
    part: VocabShard | None = None,
) -> TokenLoss:
    """`linear_cross_entropy` of what has been checked, over these chunks."""
    dtype = _product_dtype(hidden_ND)
    if q.weight_V is not None:
        q = q._replace(weight_V=q.weight_V.detach().to(wide(dtype)))
    formula = _Formula(weight.detach().to(dtype), bias, target_N, q, softcap, part)
    return chunked_gradient(
        ByFormula(formula),
        chunks,
        [hidden_ND],
        [weight] if bias is None else [weight, bias],
        TokenLoss.zero(dtype, hidden_ND.device, tells=True),
    )


class _Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None


class _Settings(NamedTuple):
    ignore_index: int
    label_smoothing: float
    smoothing: Convention
    z_loss: float
    softcap: float | None
    chunk_tokens: int | None


def _checked(inputs: _Inputs, settings: _Settings, vocab: VocabShard | None) -> tuple[VocabShard, SoftTarget]:
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


class _Formula:
    """One chunk: logits, loss and all gradients, in buffers that every chunk uses again."""

    def __init__(
        self,
        weight_VD: Tensor,
        bias: Tensor | None,
        target_N: Tensor,
        q: SoftTarget,
        softcap: float | None,
        part: VocabShard | None,
    ) -> None:
        self.weight_VD, self.target_N = weight_VD, target_N
        self.bias_V = None if bias is None else bias.detach().to(weight_VD.dtype)
        self.q, self.softcap, self.part = q, softcap, part
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, rows: tuple[Tensor, ...], chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        weight_VD, target_K = self.weight_VD, self.target_N[chunk]
        with torch.autocast(weight_VD.device.type, enabled=False):  # what it would cast has been
            hidden_KD = rows[0].to(weight_VD.dtype)
            product_KV = self._product(hidden_KD)
            size = self._block_rows(len(target_K))
            blocks = zip(product_KV.split(size), target_K.split(size), strict=True)
            losses, grads = zip(*(self._block(*block, gradients) for block in blocks), strict=True)
            if gradients is not None:  # product_KV has become the logits' gradient
                gradients.write_product(0, chunk, product_KV, weight_VD)
                gradients.add_product(0, product_KV.t(), hidden_KD)
                if grads[0] is not None:
                    gradients.add(1, torch.stack(grads).sum(0))
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def _block_rows(self, rows: int) -> int:
        """How many rows go through the softmax together: on the CPU what its cache holds, so that the passes are fast.

        A split vocabulary takes the chunk at once, for its all-reduces are per block.
        """
        if self.part is not None or self.weight_VD.device.type != "cpu":
            return rows
        bytes_a_row = len(self.weight_VD) * wide(self.weight_VD.dtype).itemsize
        return max(1, min(rows, CACHE * torch.get_num_threads() // bytes_a_row))

    def _block(
        self, product_KV: Tensor, target_K: Tensor, gradients: Gradients | None
    ) -> tuple[TokenLoss, Tensor | None]:
        """Some rows' loss; where gradients are wanted, theirs takes the product's place, and the bias's is returned."""
        logits_KV, tanh_KV, out = self._capped(product_KV)
        p_KV, sums = softmax_and_sums(logits_KV, target_K, self.q, self.part, out)
        nll = (sums.lse_N - sums.gold_N).sum()
        count = torch.full((), len(target_K), device=target_K.device)
        loss = TokenLoss(row_losses(sums, self.q).sum(), count, nll, sums.correct_N.sum())
        if gradients is None:
            return loss, None
        grad_KV = logits_gradient_(p_KV, target_K, sums, self.q, self.part)
        if tanh_KV is not None:
            grad_KV *= tanh_KV.square_().neg_().add_(1)
        if grad_KV is not product_KV:
            product_KV.copy_(grad_KV)
        return loss, grad_KV.sum(0) if self.bias_V is not None and gradients.wanted[1] else None

    def _product(self, hidden_KD: Tensor) -> Tensor:
        out = self._buffer("product", len(hidden_KD), hidden_KD.dtype)
        if self.bias_V is None:
            return torch.mm(hidden_KD, self.weight_VD.t(), out=out)
        return torch.addmm(self.bias_V, hidden_KD, self.weight_VD.t(), out=out)

    def _capped(self, product_KV: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The logits, the tanh they came through, and the memory of their softmax (None lets torch allocate it)."""
        dtype, rows = wide(product_KV.dtype), len(product_KV)
        # On the CPU torch's softmax may write over its input; elsewhere that is not promised, and memory is cached
        in_place = product_KV.device.type == "cpu"
        if self.softcap is None:
            if product_KV.dtype == dtype:
                return product_KV, None, product_KV if in_place else None
            return product_KV, None, self._buffer("wide", rows, dtype) if in_place else None
        tanh_KV = product_KV
        if product_KV.dtype != dtype:
            tanh_KV = self._buffer("tanh", rows, dtype).copy_(product_KV)
        tanh_KV.div_(self.softcap).tanh_()
        logits_KV = torch.mul(tanh_KV, self.softcap, out=self._buffer("wide", rows, dtype))
        return logits_KV, tanh_KV, logits_KV if in_place else None

    def _buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        held = self.buffers.get(name)
        if held is None or len(held) < rows:
            # Chunks are even but for one row, which the first one may lack
            held = self.weight_VD.new_empty((rows + 1, len(self.weight_VD)), dtype=dtype)
            self.buffers[name] = held
        return held[:rows]


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's, where it is on and would cast; else hidden's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _facts(inputs: _Inputs, settings: _Settings, vocab: VocabShard, wrong: Exception | None) -> dict[str, object]:
    """What the ranks of a group must have alike: otherwise they would wait for each other, or add up nonsense."""
    hidden, weight, target = inputs.hidden, inputs.weight, inputs.target
    facts: dict[str, object] = {
        "the vocabulary's size": vocab.vocab_size,
        "the width of hidden and weight": (hidden.shape[-1:], weight.shape[1:]),
        "the dtype": (hidden.dtype, weight.dtype),
        "the number of tokens": hidden.shape[:-1],
        "bias": "none" if inputs.bias is None else "given",
        "class_weight": "none" if inputs.class_weight is None else "given",
        "whether hidden needs a gradient": hidden.requires_grad and torch.is_grad_enabled(),
        **settings._asdict(),
        "what is wrong": "nothing" if wrong is None else f"{type(wrong).__name__}: {wrong}",
    }
    if not target.is_floating_point() and not target.is_complex():
        # Other targets would be other chunks; a checksum finds it for the price of one number
        flat_N = target.flatten().long()
        facts["the targets"] = int((flat_N * torch.arange(1, len(flat_N) + 1, device=flat_N.device)).sum())
    return facts


def _check_settings(settings: _Settings) -> None:
    z_loss, softcap = settings.z_loss, settings.softcap
    check_size(settings.chunk_tokens, "chunk_tokens")
    check_smoothing(settings.label_smoothing, settings.smoothing, ("label_smoothing", "smoothing"))
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"z_loss is {z_loss}; it must be a finite number of at least 0")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap is {softcap}; it must be a finite number above 0, or None to leave logits alone")


def _check_tensors(inputs: _Inputs) -> None:
    hidden, weight, target, bias, class_weight = inputs
    check_target(hidden, target)
    if weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; weight must be (V, D) with "
            "hidden's last size D, the layout of nn.Linear.weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias must be (V,)")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden has dtype {hidden.dtype}; it must be a floating dtype")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in (("target", target), ("weight", weight), ("bias", bias), ("class_weight", class_weight)):
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
