"""Attention and its masks (Vaswani et al. 2017, section 3.2).

Shapes: B sentences, R rows (sentences x beams; R = B outside beam search), T target time, S source time,
D model width, H heads, K width of a head, A sentences x heads.

Masks are boolean, True = may attend, with four dims that broadcast to (B, H, queries, keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def padding_mask(tokens: Tensor, pad: int) -> Tensor:
    """Return `tokens != pad`, shaped for attention: (B, S) token ids -> (B, 1, 1, S) boolean, True = a real token.

    In a sentence of only padding the first position counts as real: a softmax over no keys is nan in some kernels, and
    with exactly one key the result does not depend on how long the padding is.
    """
    real_BS = tokens != pad
    empty_B1 = ~real_BS.any(1, keepdim=True)
    # :1 rather than 0, since the batch may have no time steps at all
    real_BS[:, :1].logical_or_(empty_B1)
    return real_BS[:, None, None, :]


def subsequent_mask(size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the causal mask (section 3.2.3): (1, 1, size, size) boolean, True where the key is not after the query.

    `padding_mask(tgt, pad) & subsequent_mask(tgt.size(1))` is the decoder mask of the Annotated Transformer.
    """
    return torch.ones(1, 1, size, size, dtype=torch.bool, device=device).tril()


def check_mask(name: str, mask: Tensor | None) -> None:
    """Raise for a mask that would be misread: an additive one, or (B, 1, S), whose B would broadcast over the heads."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} is {mask.dtype}, not torch.bool: pass a boolean mask, True = may attend")
    if mask.dim() != 4:
        raise ValueError(
            f"{name} has {mask.dim()} dims, shape {tuple(mask.shape)}, not 4: "
            "unsqueeze it to broadcast to (batch, heads, queries, keys)"
        )


def added_scores(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Convert a boolean mask to a term added to the attention scores, in the dtype of `like`: 0 where True.

    A stack of layers converts its mask once; None and a mask that is already converted are returned unchanged.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    # Not -inf, which gives nan in a row without any key; representable in bfloat16, since autocast may convert to it
    lowest = max(torch.finfo(like.dtype).min, torch.finfo(torch.bfloat16).min)
    kind = like.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        # Half of the lowest float16, so that adding it to the scores does not give -inf either
        lowest = torch.finfo(torch.float16).min / 2
    # A CPU scalar is passed to another device as an argument of the kernel, without a copy
    return ~mask * torch.tensor(lowest, dtype=like.dtype, device="cpu")


@dataclass(frozen=True)
class KeyValues:
    """Hold the keys and values of an attention, each (B, H, S, K)."""

    keys: Tensor
    values: Tensor

    def contiguous(self) -> KeyValues:
        """Return a copy in which each head's keys are contiguous in memory."""
        return KeyValues(self.keys.contiguous(), self.values.contiguous())

    def select(self, rows: Tensor) -> KeyValues:
        """Return the given rows, in the given order: rows (N,) -> keys and values (N, H, S, K)."""
        return KeyValues(self.keys.index_select(0, rows), self.values.index_select(0, rows))


SHORT = 128
"""Up to this many keys, attention on the CPU is computed by matrix products. The backward of torch's fused kernel has a
high cost per sentence there, in bfloat16 ten times that of the products; its forward takes 1.2 to 1.8 times as long as
the products if a few queries, such as the beams of a search, attend to up to 90 keys. With more keys the attention
weights, which the kernel never stores, would become too large."""


def attend(query_BHQK: Tensor, lookup: KeyValues, mask: Tensor | None, causal: bool) -> Tensor:
    """Compute softmax(Q K^T / sqrt(d_k)) V (equation 1): query (B, H, Q, K) -> (B, H, Q, K).

    This is `F.scaled_dot_product_attention`, which also defines the mask; where its kernel is slow, matrix products
    compute the same result. The output of a query that may not attend to any key is undefined.

    Raises:
        ValueError: for a mask together with `causal`: on some devices that function ignores or refuses one of the two.
    """
    if causal and mask is not None:
        raise ValueError("attention got a mask and causal=True: give only the mask, combined with subsequent_mask")
    batch, heads, queries, width = query_BHQK.shape
    keys = lookup.keys.size(2)
    # An exported graph must hold for any number of keys
    if query_BHQK.device.type != "cpu" or torch.compiler.is_exporting() or keys > SHORT or not batch:
        return F.scaled_dot_product_attention(query_BHQK, lookup.keys, lookup.values, attn_mask=mask, is_causal=causal)
    # Sentences and heads become one batch: softmax(Q K^T / sqrt(d_k)) V is a product, a softmax and another product
    query_AQK, keys_ASK, values_ASK = (x.flatten(0, 1) for x in (query_BHQK, lookup.keys, lookup.values))
    # One call scales and multiplies; with beta 0 its first argument is ignored
    ignored = query_AQK.new_zeros(1, 1, 1)
    scores_AQS = torch.baddbmm(ignored, query_AQK, keys_ASK.mT, beta=0, alpha=width**-0.5)
    if causal:
        mask = subsequent_mask(keys, scores_AQS.device)
    added = added_scores(mask, scores_AQS)
    if added is not None:
        scores_BHQS = scores_AQS.view(batch, heads, queries, keys)
        added = added.to(scores_BHQS.dtype)
        if scores_BHQS.requires_grad:
            scores_BHQS = scores_BHQS + added
        else:
            scores_BHQS.add_(added)
        scores_AQS = scores_BHQS.flatten(0, 1)
    return torch.bmm(scores_AQS.softmax(-1), values_ASK).view(batch, heads, queries, width)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention: Concat(head_1 ... head_h) W^O (section 3.2.2, equation 1).

    One matrix projects the queries of all heads, another their keys and values. Queries and the states that they attend
    to are separate arguments, so that one class serves self-attention, attention to the memory and cached decoding.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def keys_values(self, states: Tensor) -> KeyValues:
        """Project the states that are attended to: (B, S, D) -> two (B, H, S, K)."""
        keys_BSD, values_BSD = self.key_value(states).chunk(2, dim=-1)
        return KeyValues(self._split(keys_BSD), self._split(values_BSD))

    def forward(self, x: Tensor, lookup: KeyValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend from x (R, T, D) to `lookup`; returns (R, T, D).

        R may be a multiple of the B rows of `lookup`: the beams of a sentence are then further queries to the same
        keys, which need not be copied for each beam. The mask has one query row, or one per time step of each beam.
        """
        rows, time, _ = x.shape
        sentences = lookup.keys.size(0)
        beams = rows // max(1, sentences)
        query_RTD = self.query(x)
        width = query_RTD.size(-1)  # of all heads here: d_model, unless heads are split over ranks
        query_BQD = query_RTD.view(sentences, beams * time, width)
        mixed_BHQK = attend(self._split(query_BQD), lookup, mask, causal)
        # Concat(head_1 ... head_h): put the heads of each query side by side again, (B, Q, H, K) -> (R, T, D)
        mixed: Tensor = self.output(mixed_BHQK.transpose(1, 2).reshape(rows, time, width))
        return mixed

    def log_weights(self, x: Tensor, lookup: KeyValues, mask: Tensor | None = None) -> Tensor:
        """Compute log softmax(Q K^T / sqrt(d_k)), which `forward` does not return: x (B, T, D) -> (B, H, T, S)."""
        query_BHTK = self._split(self.query(x))
        scores_BHTS: Tensor = query_BHTK @ lookup.keys.mT / query_BHTK.size(-1) ** 0.5
        added = added_scores(mask, scores_BHTS)
        if added is not None:
            scores_BHTS = scores_BHTS + added.to(scores_BHTS.dtype)
        return scores_BHTS.log_softmax(-1)

    def _split(self, states: Tensor) -> Tensor:
        """Split the width into heads: (B, S, D) -> (B, H, S, K)."""
        batch, time, d_model = states.shape
        return states.view(batch, time, self.heads, d_model // self.heads).transpose(1, 2)


@contextmanager
def log_weights_of(attention: Attention) -> Iterator[list[Tensor]]:
    """Within the block, collect the `log_weights` of each call of an attention.

    They are computed during the call, while the weights of a sharded layer are gathered.
    """
    found: list[Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, given: found.append(attention.log_weights(*given[:3])))
    try:
        yield found
    finally:
        hook.remove()
