"""Vectors of tokens and of their positions, which the first layer reads (Vaswani et al. 2017, sections 3.4 and 3.5).

Shapes: B sentences, T time, D model width.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from models.dropout import Dropout
from models.presets import ARCHITECTURES, Positions, TransformerConfig

TABLE = 1_024
"""Positions that are computed once and then read from a table; those of a longer sequence are computed at each use."""


def sinusoidal_positions(start: int, stop: int, d_model: int, *, like: Tensor) -> Tensor:
    """Compute PE(pos, 2i) = sin(pos / 10000^(2i/d)) and PE(pos, 2i+1) = cos of the same: (stop - start, D).

    These are the positions of section 3.5, computed in float32 or wider, for sentences of any length.
    """
    # (T, D/2, 2) -> (T, D): sine and cosine of a frequency alternate
    return torch.stack(waves(start, stop, d_model, like=like, steps=d_model / 2), dim=-1).flatten(-2).to(like.dtype)


def positions_in_halves(start: int, stop: int, d_model: int, *, like: Tensor, steps: int) -> Tensor:
    """Compute PE(pos, i) = sin(pos / 10000^(i / steps)) and PE(pos, D/2 + i) = cos of the same: (stop - start, D).

    With D/2 steps the frequencies are those of `sinusoidal_positions`, as in Marian; tensor2tensor and fairseq use
    D/2 - 1, so that the lowest is 1 / 10000.
    """
    return torch.cat(waves(start, stop, d_model, like=like, steps=steps), dim=-1).to(like.dtype)


def waves(start: int, stop: int, d_model: int, *, like: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    """Compute sine and cosine of pos / 10000^(i / steps) for i below D/2: two (stop - start, D/2)."""
    wide = torch.promote_types(like.dtype, torch.float32)
    position = torch.arange(start, stop, device=like.device, dtype=wide)
    index = torch.arange(d_model // 2, device=like.device, dtype=wide)
    # 1 / 10000^(i / steps) = exp(-i ln(10000) / steps)
    angle = position[:, None] * torch.exp(index * (-math.log(10_000.0) / steps))
    return angle.sin(), angle.cos()


def _lookup(entries: int, d_model: int) -> nn.Embedding:
    """Return an embedding whose vectors are drawn later.

    `nn.Embedding(entries, d_model)` would draw them; on "meta" torch imports its compiler for that: three seconds.
    """
    made: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(entries, d_model), freeze=False)
    return made


def compute_positions(kind: Positions, start: int, stop: int, d_model: int, *, like: Tensor) -> Tensor:
    """Compute positions of a kind that is not learned: (stop - start, D)."""
    if kind == "pairs":
        return sinusoidal_positions(start, stop, d_model, like=like)
    if kind == "halves":
        return positions_in_halves(start, stop, d_model, like=like, steps=d_model // 2)
    # fairseq counts from the id of padding, which is 1 in these models, plus 1
    return positions_in_halves(start + 2, stop + 2, d_model, like=like, steps=d_model // 2 - 1)


@cache
@torch.inference_mode(False)
def positions_table(kind: Positions, d_model: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the first positions of a kind, (TABLE, D), shared by all models; do not write to them.

    They are not a module's buffer, on which checkpoints, replicas or ranks could disagree. They are computed on the
    CPU, since a copy from there is complete when it returns: any stream of the device may then read it.
    """
    return compute_positions(kind, 0, TABLE, d_model, like=torch.empty(0, dtype=dtype, device="cpu")).to(device)


class Embedding(nn.Module):
    """Token vectors times sqrt(D), plus positions, with dropout on the sum (sections 3.4, 3.5, 5.4).

    The configuration's architecture decides on the kind of positions, and whether the sum has a layer norm.
    """

    def __init__(self, vocab: int, config: TransformerConfig) -> None:
        super().__init__()
        how = ARCHITECTURES[config.architecture]
        self.lookup = _lookup(vocab, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.positions = how.positions
        if how.positions == "learned":
            self.learned = _lookup(config.max_positions, config.d_model)
        self.norm: nn.Module = nn.Identity()
        if how.norm:
            self.norm = nn.LayerNorm(config.d_model)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Embed ids (B, T), the first of them at position `start`: (B, T, D)."""
        vectors = self.lookup(tokens)
        d_model = vectors.size(-1)
        positions = self.positions_of(start, start + tokens.size(1), like=vectors)
        embedded: Tensor = self.dropout(self.norm(vectors * math.sqrt(d_model) + positions))
        return embedded

    def positions_of(self, start: int, stop: int, *, like: Tensor) -> Tensor:
        """Return what is added to the vectors of positions `start` to `stop`, (stop - start, D); do not write to it."""
        if self.positions != "learned":
            d_model = like.size(-1)
            # A graph that is compiled or exported, or made of fake tensors, must not share the table
            if stop > TABLE or torch.compiler.is_compiling() or type(like) is not Tensor:
                return compute_positions(self.positions, start, stop, d_model, like=like)
            return positions_table(self.positions, d_model, like.dtype, like.device)[start:stop]
        if stop > self.learned.num_embeddings:
            raise ValueError(
                f"a sentence has {stop} tokens, with its start and end symbols, but the model has learned "
                f"{self.learned.num_embeddings} positions: cut or split it"
            )
        learned: Tensor = self.learned.weight[start:stop]
        return learned
