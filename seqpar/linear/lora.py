"""Compute the scores of tokens under a projection with a low-rank adapter, W + s B A, without materialising that sum.

    hidden @ (W + s B A).T = [hidden, s hidden A.T] @ [W, B].T            (LoRA, arXiv:2106.09685, section 4.1)

Shape suffixes: N rows (batch x time), D hidden, R rank of the adapter, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.core.checks import check_floating, check_like, check_number, check_shapes
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.invariant_scores import INVARIANT_ROWS, INVARIANT_WIDTH
from seqpar.linear.token_scores import TokenScores, token_scores


def lora_scores(
    hidden: Tensor,
    base_weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    target: Tensor,
    *,
    adapter_hidden: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    top_k: int | None = None,
    ids: Tensor | None = None,
    rank: bool = False,
    product_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """Return the scores of every token under a projection and its low-rank adapter, with one chunk's logits at a time.

    Plain equivalent, without dropout:

        token_scores(hidden, base_weight + scaling * lora_B @ lora_A, target, ...)

    One (V, D + R) copy of the base weight and the adapter's B is made, and in backward its gradient.

    Args:
        hidden: (N, D) or (batch, time, D).
        base_weight: (V, D), usually frozen. Its gradient is computed only if it needs one.
        lora_A, lora_B: the adapter, (R, D) and (V, R). They may have a wider dtype than `hidden`, as PEFT's do: the
            product with A is computed in A's dtype and then rounded to that of `hidden`; B is rounded to
            `base_weight`'s.
        scaling: the adapter's factor; `lora_alpha / r` in PEFT.
        adapter_hidden: what A multiplies, if it is not `hidden`: `dropout(hidden)`, of hidden's shape.
        vocab: with a split vocabulary, this rank has its own rows of base_weight, lora_B and bias, and all of lora_A.
        target, bias, ignore_index, temperature, softcap, entropy, top_k, ids, rank, product_dtype, batch_invariant,
            chunk_tokens: as in `token_scores`.

    Returns:
        `TokenScores`, with gradients for hidden, adapter_hidden, lora_A, lora_B and the bias.

    Raises:
        TypeError, ValueError: an adapter whose shapes do not fit; otherwise as in `token_scores`.
    """
    if adapter_hidden is None:
        adapter_hidden = hidden
    adapter = {"lora_A": lora_A, "lora_B": lora_B, "base_weight": base_weight}
    for name, tensor in {"hidden": hidden, "adapter_hidden": adapter_hidden, **adapter}.items():
        check_floating(tensor, name)
    check_number(scaling, "scaling")
    fits = lora_A.dim() == lora_B.dim() == base_weight.dim() == 2
    fits = fits and (*lora_B.shape, lora_A.size(1)) == (len(base_weight), len(lora_A), base_weight.size(1))
    check_shapes(fits, "(R, D), (V, R) and (V, D), the layouts of PEFT's lora_A.weight and lora_B.weight", **adapter)
    check_like(adapter_hidden, "adapter_hidden", hidden=hidden)
    low_rank = _low_rank(adapter_hidden, lora_A, scaling, batch_invariant is True).to(hidden.dtype)
    return token_scores(
        torch.cat([hidden, low_rank], -1),
        torch.cat([base_weight, lora_B.to(base_weight.dtype)], -1),
        target,
        bias=bias,
        ignore_index=ignore_index,
        temperature=temperature,
        softcap=softcap,
        entropy=entropy,
        top_k=top_k,
        ids=ids,
        rank=rank,
        product_dtype=product_dtype,
        batch_invariant=batch_invariant,
        vocab=vocab,
        chunk_tokens=chunk_tokens,
    )


def _low_rank(adapter_hidden: Tensor, lora_A: Tensor, scaling: float, batch_invariant: bool) -> Tensor:
    """Return `adapter_rows`; if batch-invariant, from products of one shape, padded with zeros."""
    if not batch_invariant:
        return adapter_rows(adapter_hidden, lora_A, scaling)
    rows_ND = adapter_hidden.flatten(0, -2)
    rows, width, rank = len(rows_ND), lora_A.size(1), len(lora_A)
    rows_ND = F.pad(rows_ND, (0, -width % INVARIANT_WIDTH, 0, -rows % INVARIANT_ROWS))
    lora_A = F.pad(lora_A, (0, -width % INVARIANT_WIDTH, 0, -rank % INVARIANT_WIDTH))
    found_NR = torch.cat([adapter_rows(block, lora_A, scaling) for block in rows_ND.split(INVARIANT_ROWS)])
    return found_NR[:rows, :rank].reshape(*adapter_hidden.shape[:-1], rank)


def adapter_rows(adapter_hidden: Tensor, lora_A: Tensor, scaling: float) -> Tensor:
    """Return s hidden A.T (..., R), which times B.T is the adapter's part of the logits."""
    return F.linear(adapter_hidden.to(lora_A.dtype), lora_A) * scaling
