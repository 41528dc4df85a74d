"""Describe in words how the engine computes a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.chunks import rows_per_chunk
from seqpar.core.device_facts import FACTS, why_no_kernel
from seqpar.core.token_loss import wide
from seqpar.engine.formula_match import REPLACED, Asked, FormulaMatch, NoFormula, match_formula, was_replaced
from seqpar.engine.situation import LogitFacts
from seqpar.kernels.row_kernel import width_for_kernel
from seqpar.linear.projection import product_dtype


class LatestCall(NamedTuple):
    """What the engine remembers of its latest call."""

    tokens: Tensor
    """How many tokens were not ignored; the device may still be computing the number."""
    dtype: torch.dtype
    """The dtype of the logits of a pair with a closed form, which depends on autocast."""


def explanation(
    head: nn.ModuleDict,
    formulas: Mapping[Asked, bool],
    facts: LogitFacts | None,
    latest: LatestCall | None,
    tokens: int,
    chunk_tokens: int | None,
    chunk_size: int | None,
) -> str:
    """Return what `LossCompute.explain` says.

    Args:
        formulas: whether calls so far have given the loss of the closed form.
        facts: what the latest call found about the logits of a pair without a closed form; None if there was no such
            call.
        latest: the latest call, of any pair.
    """
    match = match_formula(head["generator"], head["criterion"])
    if isinstance(match, FormulaMatch) and was_replaced(head["criterion"], formulas):
        match = REPLACED
    device_type = next((p.device.type for p in head["generator"].parameters()), "cpu")
    how = how_it_is_computed(match, head, device_type)
    if facts is not None and not facts.is_linear and isinstance(match, NoFormula):
        how = f"{how}, and again in backward, as the gradient depends on the factor of the loss"
    if chunk_size is not None:
        return f"{how}; {chunk_size} time steps of the batch at a time"
    width = None
    if isinstance(match, FormulaMatch):
        dtype = product_dtype(match.projection.weight) if latest is None else latest.dtype
        facts = LogitFacts(match.vocab_size, dtype, criterion_is_checked=True)
        width = width_for_kernel(match.projection.weight.size(1), device_type)
    return f"{how}; {how_it_is_cut(tokens, chunk_tokens, facts, device_type, width)}"


def how_it_is_computed(match: FormulaMatch | NoFormula, head: nn.ModuleDict, device_type: str) -> str:
    """Return whether the gradient has a closed form, and whether a kernel computes it, in words."""
    if isinstance(match, NoFormula):
        return f"by autograd, chunk by chunk ({match.reason})"
    how = f"by formula ({type(head['generator']).__name__}, {type(head['criterion']).__name__})"
    if not why_no_kernel(device_type):
        return f"{how}, the loss and its gradient in one Triton kernel"
    if not FACTS[device_type].is_host:
        return f"{how}, the softmax and its gradient in torch operations ({why_no_kernel(device_type)})"
    return how


def how_it_is_cut(
    tokens: int, chunk_tokens: int | None, facts: LogitFacts | None, device_type: str, width: int | None
) -> str:
    """Return the number of chunks of `rows` tokens, and the memory of one chunk's logits, in words.

    Args:
        width: as in `rows_per_chunk`; logits that a kernel overwrites stay in their own dtype.
    """
    if facts is None:
        return "the size of a chunk will be known after the first call"
    # A loss of no tokens has no chunk
    rows = min(max(1, tokens), chunk_tokens or rows_per_chunk(facts.vocab_size, facts.dtype, device_type, width))
    size = rows * facts.vocab_size * (wide(facts.dtype) if width is None else facts.dtype).itemsize
    chunks = -(-tokens // rows)
    word = "chunk" if chunks == 1 else "chunks"
    return (
        f"{tokens:,} tokens in {chunks:,} {word} of at most {rows:,}, whose logits "
        f"({facts.vocab_size:,} each) take {size / 2**20:,.1f} MiB"
    )
