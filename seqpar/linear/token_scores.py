"""Compute log-probabilities and entropies of tokens under a projection in chunks; recompute the logits in backward.

Shape suffixes: N rows (batch x time), D hidden, V vocabulary (this rank's classes, if it is split), J given classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.core.checks import refuse_second_derivative, refuse_transforms
from seqpar.core.chunked_gradient import ChunkTensors, sum_over_chunks
from seqpar.core.chunks import ACCELERATOR_BUDGET, Chunk, cover, cut_rows
from seqpar.core.graphs import outside_graphs
from seqpar.core.stored_gradients import Gradients
from seqpar.core.structures import each
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.inputs import Inputs, Settings
from seqpar.linear.invariant_scores import INVARIANT_ROWS, InvariantScores
from seqpar.linear.projection import (
    ByLeaf,
    LinearGradients,
    LinearLeaves,
    LinearWanted,
    flatten,
    loss_and_gradients,
    slots_of,
)
from seqpar.linear.recomputed_scores import HiddenSlots, RecomputedScores, VocabTiles, worth_tiles
from seqpar.linear.score_inputs import ScoreCall, ScoreRequest, prepare_scores
from seqpar.rows.scores import RowFunction, Sums, Upstream, as_column


class TokenScores(NamedTuple):
    """The scores of tokens, in nats, float32 or wider. Where the target is ignored they are 0, and ids and ranks -1.

    Fields (all but the first are None unless asked for):
        log_prob: (target's shape) log p of the target.
        entropy: (target's shape).
        top_log_probs, top_ids: (target's shape, top_k) the most likely classes, in descending order, with no gradient.
        log_probs_at: (ids' shape) the log-probabilities of the classes `ids`.
        rank: (target's shape) the target's place among all classes, int64, with no gradient.

    Example:
        >>> hidden, weight, target = torch.randn(2, 6, 8), torch.randn(50, 8), torch.randint(50, (2, 6))
        >>> scores = seqpar.token_scores(hidden, weight, target, top_k=3)
        >>> scores.log_prob.shape, scores.top_ids.shape, scores.entropy
        (torch.Size([2, 6]), torch.Size([2, 6, 3]), None)
    """

    log_prob: Tensor
    """(target's shape) log p of the target, at most 0."""
    entropy: Tensor | None = None
    """(target's shape) -sum_k p_k log p_k, at least 0; None unless asked for."""
    top_log_probs: Tensor | None = None
    """(target's shape, top_k) the largest log-probabilities, descending, with no gradient; None unless asked for."""
    top_ids: Tensor | None = None
    """(target's shape, top_k) their classes; among equally likely ones, the lower first."""
    log_probs_at: Tensor | None = None
    """(ids' shape) the log-probabilities of the classes `ids`; None unless asked for."""
    rank: Tensor | None = None
    """(target's shape) how many classes are likelier than the target, or tie and are lower; None unless asked for."""


@outside_graphs
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
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
    """Return log p(target) of every token and, if asked, more scores, with one chunk's logits in memory at a time.

    Plain equivalent, except for tokens whose target is `ignore_index`:

        log_p = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
        log_prob = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        top_log_probs, top_ids = log_p.topk(top_k)
        log_probs_at = log_p.gather(-1, ids)
        rank = (log_p > log_prob.unsqueeze(-1)).sum(-1)  # where no two classes are equally likely

    For losses that are not sums of cross-entropies: policy ratios (PPO, GRPO), preferences (DPO), scores of whole
    sequences; `seqpar.objectives` has them. If each token's factor is known before backward,
    `linear_cross_entropy(..., token_weight=...)` needs one matrix product fewer.

    `log_prob`, `entropy` and `log_probs_at` may all be used in one loss, whose backward goes through the projection
    once and may be called again (`retain_graph=True`). Matrix products of rows x D x V:

        nothing requires a gradient            1
        hidden does, the projection does not   2: forward stores a hidden gradient (the size of hidden), because a
                                               token's does not depend on the others; with `entropy` 3, and none stored
        the projection does                    4, or 3 if hidden does not

    Args:
        hidden, weight, target, bias, ignore_index, softcap, chunk_tokens, vocab: as in `linear_cross_entropy`. A class
            whose bias is -inf has probability 0 and adds nothing to the entropy. A split vocabulary costs one
            all-gather per chunk, two more with `top_k` and one more with `rank`; both refer to the whole vocabulary.
        temperature: divides the logits, after softcap; a number above 0, or one for each token, with no gradient.
        entropy: also return the entropy of each token's distribution.
        top_k: also return this many of the largest log-probabilities, and their classes.
        ids: int64 classes (target's shape, J) whose log-probabilities are also returned.
        rank: also return the target's place in the order of `top_ids`: 0 if it is the prediction; among equally likely
            classes the lower one comes first, so that `top_ids[..., rank]` is the target.
        product_dtype: the dtype of the matrix products, such as torch.float32 for a float32 head over bfloat16 hidden
            states; hidden, weight and bias may then have any floating dtype. Plain equivalent: cast them all to it.
            None means autocast's dtype if autocast is on, else that of hidden.
        batch_invariant: compute scores that are the same to the last bit whatever else is in the batch, wherever the
            token is in it, and whatever the chunk size, the number of data ranks or the split of the vocabulary: every
            product has 64 rows, padded with zeros, and the same 1,024 classes. Holds for the same device and number of
            threads. Takes longer (`docs/post-training.md`), and a frozen projection saves no product.

    Returns:
        `TokenScores`, the same on every rank of a split vocabulary's group.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `linear_cross_entropy`.
        TypeError: a temperature that requires a gradient; ids that are not integers.
        ValueError: ids or a temperature of the wrong shape; top_k outside [1, vocab_size].
        IndexError: an id outside [0, vocab_size).
        RuntimeError: in backward with `create_graph=True`.

    Example:
        >>> hidden, weight, target = torch.randn(2, 6, 8), torch.randn(50, 8), torch.randint(50, (2, 6))
        >>> scores = seqpar.token_scores(hidden, weight, target, entropy=True)
        >>> log_p = (hidden @ weight.T).log_softmax(-1)
        >>> torch.allclose(scores.log_prob, log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), atol=1e-5)
        True
        >>> torch.allclose(scores.entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5)
        True
    """
    settings = Settings(ignore_index=ignore_index, softcap=softcap, chunk_tokens=chunk_tokens)
    request = ScoreRequest(
        temperature=temperature,
        entropy=entropy,
        top_k=top_k,
        ids=ids,
        product_dtype=product_dtype,
        batch_invariant=batch_invariant,
        rank=rank,
    )
    call = prepare_scores(Inputs(hidden, weight, target, bias), settings, request, vocab)
    hidden_ND, projection_weight, projection_bias, *_ = call.prepared.leaves
    tokens = _ScoredTokens(call, request)
    found = TokenScores(*_Scores.apply(tokens, torch.is_grad_enabled(), hidden_ND, projection_weight, projection_bias))
    return each(lambda t: t.reshape(*call.shape, *t.shape[1:]), found)


class _ScoredTokens:
    """The rows of one call, and the function that computes a chunk's scores."""

    def __init__(self, call: ScoreCall, request: ScoreRequest) -> None:
        prepared = call.prepared
        self.chunks = prepared.chunks
        self.vocab_size = call.vocab_size
        self.projection = prepared.projection
        self.request = request
        self.counted_N = call.counted_N
        # Where the target is ignored any class will do: such a row is in no chunk, or its results are set to 0
        picked_NP = prepared.target_N.where(self.counted_N, 0).unsqueeze(1)
        if call.ids_NJ is not None:
            picked_NP = torch.cat([picked_NP, call.ids_NJ.where(self.counted_N.unsqueeze(1), 0)], 1)
        self.picked_NP = picked_NP
        self.in_every_row = prepared.ignored is not None
        function = RowFunction(request.entropy, top_k=request.top_k or 0, rank=request.rank, split=prepared.split)
        projection = prepared.projection.ask_for(function)
        counted_N = self.counted_N if self.in_every_row else None
        self.formula = RecomputedScores(projection, picked_NP, call.temperature_N, counted_N)
        self.invariant_formula = None
        if request.batch_invariant:
            self.invariant_formula = InvariantScores(self.formula, prepared.split)

    def scores(self, hidden_ND: Tensor, kept: HiddenSlots | None) -> tuple[TokenScores, Sums]:
        """Return the scores of all rows (0, and classes -1, where the target is ignored) and what backward needs."""
        scores = self._scores_of_ignored()
        sums = self._sums_of_ignored()
        chunks = self.chunks
        if self.invariant_formula is not None:
            chunks = cut_rows(self.counted_N, INVARIANT_ROWS)
        for chunk in chunks:
            if self.invariant_formula is not None:
                of_chunk = self.invariant_formula.sums(hidden_ND[chunk], chunk)
            else:
                of_chunk = self.formula.sums(hidden_ND[chunk], chunk, kept)
            _write_rows(scores, chunk, self._of_sums(of_chunk))
            # Backward needs neither the picked logits nor the top ones
            _write_rows(sums, chunk, of_chunk._replace(picked_NP=of_chunk.picked_NP[:, :0], top_NT=None))
        # Backward needs the formula, but not its buffers or the padded weight
        self.projection.buffers.clear()
        self.invariant_formula = None
        if self.in_every_row:
            for score, ignored in zip(scores, self._scores_of_ignored(), strict=True):
                if score is not None and ignored is not None:
                    score.copy_(score.where(as_column(self.counted_N, score), ignored))
        return scores, sums

    def _of_sums(self, sums: Sums) -> TokenScores:
        """Return the scores of some rows."""
        function = self.projection.function
        found = function.scores(sums)
        top_log_probs = None if sums.top_NT is None else function.log_probs(sums, sums.top_NT)
        return TokenScores(
            found.log_prob, found.entropy, top_log_probs, sums.top_ids_NT, found.log_probs_at, sums.rank_N
        )

    def _scores_of_ignored(self) -> TokenScores:
        """Return the scores of all rows as if all targets were ignored."""
        rows = len(self.counted_N)
        top_k = self.request.top_k
        zero_N = self.counted_N.new_zeros(rows, dtype=wide(self.projection.weight_VD.dtype))
        return TokenScores(
            zero_N,
            entropy=zero_N.clone() if self.request.entropy else None,
            top_log_probs=None if top_k is None else zero_N.new_zeros((rows, top_k)),
            top_ids=None if top_k is None else torch.full((rows, top_k), -1, device=zero_N.device),
            log_probs_at=None if self.request.ids is None else zero_N.new_zeros((rows, self.picked_NP.size(1) - 1)),
            rank=torch.full((rows,), -1, device=zero_N.device) if self.request.rank else None,
        )

    def _sums_of_ignored(self) -> Sums:
        """Return the sums of all rows as if all targets were ignored, with no picked classes."""
        zero_N = self.counted_N.new_zeros(len(self.counted_N), dtype=wide(self.projection.weight_VD.dtype))
        # Batch-invariant sums come from tiles and do not tell this rank's share; backward does without it
        whole = self.projection.function.split is None or self.request.batch_invariant
        return Sums(
            zero_N.clone(),
            zero_N.clone(),
            zero_N.new_zeros((len(zero_N), 0)),
            mean_N=zero_N.clone() if self.request.entropy else None,
            share_N=None if whole else zero_N.clone(),
        )

    def upstream(self, log_prob: Tensor | None, entropy: Tensor | None, log_probs_at: Tensor | None) -> Upstream:
        """Return the gradients that arrive in backward; None for a score that was not used, 0 in ignored rows."""
        if log_prob is None:
            log_prob = self.counted_N.new_zeros(len(self.counted_N), dtype=wide(self.projection.weight_VD.dtype))
        if log_probs_at is not None and not log_probs_at.size(1):
            log_probs_at = None
        upstream = Upstream(log_prob, entropy=entropy, log_probs_at=log_probs_at)
        return upstream.times(1.0, self.counted_N if self.in_every_row else None)

    def gradients(self, leaves: LinearLeaves, sums: Sums, upstream: Upstream, wanted: LinearWanted) -> LinearGradients:
        """Return the gradients of all leaves, recomputing the product: tile by tile, or on a CPU chunk by chunk."""
        if worth_tiles(leaves.hidden.device.type):
            which: Chunk = slice(None)
            if not cover(self.chunks, len(leaves.hidden)):
                which = self.counted_N.nonzero().squeeze(1)
            tiles = VocabTiles(self.formula, self.vocab_size, ACCELERATOR_BUDGET)
            return tiles.gradients(leaves, which, sums.select(which), upstream.select(which), wanted)
        nothing = TokenLoss.zero(leaves.hidden.dtype, leaves.hidden.device, tells=False)

        def chunk_gradient(rows: ChunkTensors, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
            hidden_KD = rows[0]
            assert hidden_KD is not None
            assert gradients is not None
            self.formula.store_gradients(hidden_KD, chunk, sums, upstream, slots_of(gradients))
            return nothing

        walk = partial(sum_over_chunks, chunk_gradient)
        _, found = loss_and_gradients(walk, self.chunks, flatten(leaves, self.chunks), wanted)
        self.projection.buffers.clear()
        return found


class _Scores(torch.autograd.Function):
    """The autograd node, which saves no logits. Its outputs are the fields of `TokenScores`, one row per token."""

    @staticmethod
    def forward(
        ctx: Any, tokens: _ScoredTokens, grad_is_enabled: bool, hidden_ND: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        kept = None
        projection_is_frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
        again = tokens.request.entropy or tokens.request.batch_invariant
        if grad_is_enabled and hidden_ND.requires_grad and projection_is_frozen and not again:
            kept = tokens.formula.slots(hidden_ND)
        found, sums = tokens.scores(hidden_ND.detach(), kept)
        ctx.tokens = tokens
        ctx.sums = sums
        ctx.is_kept = kept is not None
        ctx.hidden_dtype = hidden_ND.dtype
        if kept is None:
            ctx.save_for_backward(hidden_ND, weight, bias)
        else:
            ctx.save_for_backward(weight, kept.log_prob.rows, kept.slope_NP)
        constants = (found.top_log_probs, found.top_ids, found.rank)
        ctx.mark_non_differentiable(*(t for t in constants if t is not None))
        # So that an unused score's gradient arrives as None, not as zeros that would cost time
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms(upstream)
        refuse_second_derivative("token_scores", "log_softmax on the plain logits")
        tokens: _ScoredTokens = ctx.tokens
        arriving = TokenScores(*upstream)  # type: ignore[arg-type]
        factors = tokens.upstream(arriving.log_prob, arriving.entropy, arriving.log_probs_at)
        if ctx.is_kept:
            hidden_grad_ND = tokens.formula.hidden_gradient(factors, *ctx.saved_tensors)
            # Where the target is ignored, the upstream factor may be anything, even nan
            hidden_grad_ND.masked_fill_(~tokens.counted_N.unsqueeze(1), 0)
            return None, None, hidden_grad_ND.to(ctx.hidden_dtype), None, None
        hidden_ND, weight, bias = ctx.saved_tensors
        # The first two arguments are not tensors
        _, _, *needs_gradient = ctx.needs_input_grad
        leaves = ByLeaf(hidden_ND, weight, bias)
        found = tokens.gradients(leaves, ctx.sums, factors, ByLeaf(*needs_gradient))
        return None, None, found.hidden, found.weight, found.bias


def _write_rows(into: Iterable[Tensor | None], chunk: Chunk, rows: Iterable[Tensor | None]) -> None:
    """Write a chunk's rows into the tensors of all rows; None stays None."""
    for whole, own in zip(into, rows, strict=True):
        if whole is not None and own is not None:
            whole[chunk] = own
