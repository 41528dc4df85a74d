"""Compute scores whose bits depend neither on the batch nor on how the vocabulary is split over ranks.

Matrix products of the same shape round each row in the same way, and a row's sums depend on how they are divided into
parts. So 64 rows at a time are multiplied with 1,024 classes at a time, always the same ones: a tile begins at every
multiple of 1,024, whichever rank multiplies it. The tiles' sums are combined like those of the parts in
`rows/scores.py`, in class order.

A tile belongs to the rank that has its first class. If a shard begins inside a tile, its rows in that tile are sent to
the rank that owns the tile, once per call.

Shape suffixes: K rows, D hidden, V this rank's classes, P picked classes, T tiles, C numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqpar.core.chunks import Chunk
from seqpar.core.token_loss import wide
from seqpar.distributed.collectives import gather_numbers, group_gather, rank_in
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.projection import OwnSums, Projection
from seqpar.linear.recomputed_scores import RecomputedScores, join
from seqpar.rows.scores import Sums

INVARIANT_ROWS = 64
"""The number of rows in every product."""

INVARIANT_CLASSES = 1024
"""The number of classes in every product but the last: enough that many products take no longer than one."""

INVARIANT_WIDTH = 16
"""The width of a product is padded with zeros to a multiple of this. With other widths (5, 7, 33) MKL's rounding of a
row was found to depend on the row's position; with multiples of 4 it never did."""


class InvariantScores:
    """The scores of a few rows, from products of fixed rows and classes.

    With a split vocabulary all ranks create it together, with one small collective, and a second one unless every shard
    begins at a tile.

    Args:
        formula: the same scores from products of any shape.
        split: the classes that this rank has; None if it has all.
    """

    def __init__(self, formula: RecomputedScores, split: VocabShard | None) -> None:
        self.formula = formula
        projection = formula.projection
        linear = _Linear(projection.weight_VD, projection.bias_V)
        spans = [_Span(0, len(linear.weight_VD))]
        if split is not None:
            spans = [_Span(*span) for span in gather_numbers([split.start, split.start + spans[0].end], split.group)]
        self.all_tiles = _Tiles(None if split is None else split.group, 0, max(s.end for s in spans), tuple(spans))
        starts = self.all_tiles.own()
        if any(span.head for span in spans):
            linear = _whole_tiles(linear, self.all_tiles)
        width = linear.weight_VD.size(1)
        # Rows in a different memory layout, such as a view's, might be rounded differently
        weight_VD = linear.weight_VD.new_zeros((len(linear.weight_VD), width + -width % INVARIANT_WIDTH))
        weight_VD[:, :width] = linear.weight_VD
        self.tiles: dict[int, Projection] = {}
        buffers: dict[int, dict[str, Tensor]] = {}
        for start in starts:
            here = slice(start - starts[0], start - starts[0] + INVARIANT_CLASSES)
            bias_V = None if linear.bias_V is None else linear.bias_V[here]
            tile = Projection(weight_VD[here], bias_V, weight_VD.dtype, projection.softcap, projection.temperature)
            if not projection.function.rank:
                # The last tile may have fewer classes
                tile.buffers = buffers.setdefault(len(tile.weight_VD), {})
            shard = VocabShard(None, start, self.all_tiles.vocab_size)
            self.tiles[start] = tile.ask_for(projection.function._replace(split=shard))
        self.width = weight_VD.size(1)

    def sums(self, hidden_KD: Tensor, chunk: Chunk) -> Sums:
        """Return the sums of at most INVARIANT_ROWS rows, without `share_N`."""
        formula = self.formula
        given_KD = formula.prepare_hidden(hidden_KD, chunk)
        rows, width = given_KD.shape
        hidden_KD = given_KD.new_zeros((INVARIANT_ROWS, self.width))
        hidden_KD[:rows, :width] = given_KD
        missing = INVARIANT_ROWS - rows
        picked_KP = pad(formula.picked_NP[chunk], (0, 0, 0, missing))
        temperature_K = None
        if formula.temperature_N is not None:
            temperature_K = pad(formula.temperature_N[chunk], (0, missing), value=1.0)
        with torch.autocast(hidden_KD.device.type, enabled=False):
            sums = self._sums(hidden_KD, picked_KP, temperature_K)
        return sums._replace(share_N=None).select(slice(0, rows))

    def _sums(self, hidden_KD: Tensor, picked_KP: Tensor, temperature_K: Tensor | None) -> Sums:
        """Return the sums of all tiles."""
        function = self.formula.projection.function
        # A rank may have no tile
        nothing = hidden_KD.new_zeros((0, 0), dtype=wide(hidden_KD.dtype))
        _, sums, here_KP = function._replace(split=self.all_tiles).own_sums_(nothing, picked_KP[:0])
        parts = [self._number(sums, 0)]
        here = [here_KP]
        own: dict[int, OwnSums] = {}
        for start, tile in self.tiles.items():
            own[start] = tile.own_sums(tile.product(hidden_KD), picked_KP, temperature_K, again=False)
            parts.append(self._number(own[start].sums, start))
            here.append(own[start].here_KP)
        here_TP = torch.cat([t for t in here if t is not None])
        sums = function._replace(split=self.all_tiles).over_parts(join(parts), picked_KP, here_TP)
        if not function.rank:
            return sums
        before_K = torch.zeros_like(picked_KP[:, 0])
        for start, tile in self.tiles.items():
            before_K += tile.before(own[start], picked_KP[:, 0], sums.picked_NP[:, 0], temperature_K)
        return sums._replace(rank_N=function.over_ranks(before_K))

    def _number(self, sums: Sums, start: int) -> Sums:
        """Return the sums with as many top classes as are wanted, numbered within the whole vocabulary."""
        if sums.top_NT is None or sums.top_ids_NT is None:
            return sums
        top_NT, top_ids_NT = self.formula.projection.function.filled_top(sums.top_NT, sums.top_ids_NT + start)
        return sums._replace(top_NT=top_NT, top_ids_NT=top_ids_NT)


class _Linear(NamedTuple):
    """Some rows of the weight, and their bias."""

    weight_VD: Tensor
    bias_V: Tensor | None


class _Span(NamedTuple):
    """A rank's classes, from `start` up to but not including `end`."""

    start: int
    end: int

    @property
    def head(self) -> int:
        """Return how many of these classes come before the first tile that begins here."""
        return min(self.end, _border(self.start)) - self.start

    @property
    def tiles(self) -> range:
        """Return the first class of each tile that begins here."""
        return range(_border(self.start), self.end, INVARIANT_CLASSES)


@dataclass(frozen=True)
class _Tiles(VocabShard):
    """All tiles of the vocabulary as the parts of a row; each rank has some of them.

    Args:
        spans: each rank's classes.
    """

    spans: tuple[_Span, ...]

    def own(self) -> range:
        """Return the first class of each tile of this rank."""
        return self.spans[rank_in(self.group)].tiles

    def rank(self) -> int:
        """Return an arbitrary part: this rank has several, and no part's share is used."""
        return 0

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every tile's numbers of the rows (T, C, K), in class order, given this rank's (C, T K)."""
        numbers_TCK = tensor.unflatten(-1, (len(self.own()), INVARIANT_ROWS)).movedim(-2, 0)
        most = max(len(span.tiles) for span in self.spans)
        # A collective needs the same number of tiles from every rank
        filled_TCK = torch.cat([numbers_TCK, numbers_TCK.new_zeros((most - len(numbers_TCK), *numbers_TCK.shape[1:]))])
        every_TCK = torch.cat(group_gather(filled_TCK, self.group))
        places = {start: rank * most + i for rank, span in enumerate(self.spans) for i, start in enumerate(span.tiles)}
        return every_TCK[torch.tensor([places[start] for start in sorted(places)], device=tensor.device)]


def _border(number: int) -> int:
    """Return the smallest multiple of INVARIANT_CLASSES that is at least this number."""
    return -(-number // INVARIANT_CLASSES) * INVARIANT_CLASSES


def _whole_tiles(linear: _Linear, tiles: _Tiles) -> _Linear:
    """Return the rows of this rank's tiles: its own after its head, then others' heads up to the last tile's end."""
    own = tiles.spans[rank_in(tiles.group)]
    lines_VC = linear.weight_VD
    if linear.bias_V is not None:
        lines_VC = torch.cat([lines_VC, linear.bias_V.unsqueeze(1)], 1)
    most = max(span.head for span in tiles.spans)
    head_VC = lines_VC[: own.head]
    heads = group_gather(pad(head_VC, (0, 0, 0, most - len(head_VC))), tiles.group)
    parts = [lines_VC[own.head :]]
    reached = own.end
    for span, head in sorted(zip(tiles.spans, heads, strict=True), key=lambda pair: pair[0]):
        if tiles.own() and span.start == reached < _border(own.end):
            parts.append(head[: span.head])
            reached += span.head
    lines_VC = torch.cat(parts)
    width = linear.weight_VD.size(1)
    return _Linear(lines_VC[:, :width], None if linear.bias_V is None else lines_VC[:, width])
