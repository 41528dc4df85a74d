"""List the cases that are measured, and every way to compute the scores of tokens, by its name in the tables.

Shape suffixes: B batch, T time, N rows (B*T), D hidden, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import seqpar
from benchmarks.loss.problems import Inputs, Problem
from seqpar.rows.scores import Scores as RowScores

# Before Hugging Face's libraries are imported: nothing here needs the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Scores = tuple[Tensor, Tensor | None]
"""log p(target) of each row, and the entropy if it is wanted."""
TILE_CLASSES = 32_768
"""Classes of a tile in TRL's trainers."""


class Case(NamedTuple):
    """Say which scores are computed and where a gradient goes.

    Args:
        gradients: of "hidden and projection", of "hidden" alone, or of "nothing".
        entropy: whether the entropy is computed, and has a part in the loss.
    """

    gradients: str
    entropy: bool

    def __str__(self) -> str:
        scores = "log-probability"
        if self.entropy:
            scores = "log-probability and entropy"
        return f"gradients of {self.gradients}; {scores}"

    @property
    def products(self) -> dict[str, int]:
        """Return how many matrix products of each kind a way makes that keeps no logits.

        They are computed again in backward. With a frozen projection forward can make the gradients of both scores.
        """
        if self.gradients == "hidden and projection":
            return {"logits": 2, "hidden gradient": 1, "weight gradient": 1}
        if self.gradients == "hidden":
            return {"logits": 1, "hidden gradient": 1 + self.entropy}
        return {"logits": 1}


CASES = [
    Case(gradients, entropy)
    for gradients in ("hidden and projection", "hidden", "nothing")
    for entropy in (False, True)
]


class Way(NamedTuple):
    """Describe a way to compute scores.

    Args:
        prepare: makes the function that computes them, of the inputs and of whether the entropy is wanted.
        compiles: whether its first call compiles.
        kept: whether it keeps all logits for backward.
        with_entropy: whether it is measured in cases with entropy.
        only: the one dtype in which it is measured.
        products: the dtype of its matrix products, if it is not that of the inputs.
        joined: whether it returns one number, a loss of the scores, and is measured where all gradients are wanted.
    """

    prepare: Callable[[Inputs, bool], Callable[[], Scores]]
    compiles: bool = False
    kept: bool = False
    with_entropy: bool = True
    only: torch.dtype | None = None
    products: torch.dtype | None = None
    joined: bool = False

    def measured(self, case: Case, problem: Problem) -> bool:
        """Return whether it is measured in that case of that problem."""
        if self.joined and case.gradients != "hidden and projection":
            return False
        return (self.with_entropy or not case.entropy) and self.only in (None, problem.dtype)


def ours(**options: Any) -> Callable[[Inputs, bool], Callable[[], Scores]]:
    """Use `seqpar.token_scores`."""

    def prepare(x: Inputs, entropy: bool) -> Callable[[], Scores]:
        def scores() -> Scores:
            found = seqpar.token_scores(x.hidden, x.weight, x.target, entropy=entropy, **options)
            return found.log_prob, found.entropy

        return scores

    return prepare


def scored_loss(x: Inputs, entropy: bool) -> Callable[[], Scores]:
    """Use `seqpar.scored_loss` for -log p, less a hundredth of the entropy where that is wanted."""

    def loss(scores: RowScores) -> Tensor:
        if not entropy:
            return -scores.log_prob
        return -scores.log_prob - 0.01 * scores.entropy

    return lambda: (seqpar.scored_loss(x.hidden, x.weight, x.target, loss, entropy=entropy).total, None)


def trl_full(x: Inputs, entropy: bool) -> Callable[[], Scores]:
    """Use TRL's functions of logits, on the logits of sentences."""
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    hidden_BTD, target_BT = x.sentences()

    def scores() -> Scores:
        logits_BTV = F.linear(hidden_BTD, x.weight)
        if not entropy:
            return selective_log_softmax(logits_BTV, target_BT).flatten(), None
        log_prob, entropies = selective_log_softmax_and_entropy(logits_BTV, target_BT)
        return log_prob.flatten(), entropies.flatten()

    return scores


def trl_tiles(x: Inputs, entropy: bool) -> Callable[[], Scores]:
    """Use the function to which TRL's `add_fused_lm_head` hands hidden states, as its trainers set it."""
    from trl.kernels import ChunkedLogProbFunction

    wanted = ("log_probs", "entropy") if entropy else ("log_probs",)

    def scores() -> Scores:
        found = ChunkedLogProbFunction.apply(x.hidden, x.weight, None, x.target, 1.0, TILE_CLASSES, None, 1.0, wanted)
        return found[0], found[1]

    return scores


def _by_hand(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, entropy: bool) -> Scores:
    """Compute log p = z_y - logsumexp(z) and H = logsumexp(z) - sum_k p_k z_k in float32 or wider."""
    logits_NV = F.linear(hidden_ND, weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logsumexp_N = logits_NV.logsumexp(-1)
    log_prob_N = logits_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1) - logsumexp_N
    if not entropy:
        return log_prob_N, None
    return log_prob_N, logsumexp_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)


def by_hand(x: Inputs, entropy: bool) -> Callable[[], Scores]:
    """Use `logsumexp` of all logits."""
    return lambda: _by_hand(x.hidden, x.weight, x.target, entropy)


def compiled(x: Inputs, entropy: bool) -> Callable[[], Scores]:
    """Use `torch.compile` of the same."""
    function = torch.compile(_by_hand, dynamic=False)
    return lambda: function(x.hidden, x.weight, x.target, entropy)


OURS = "token_scores"
SCORED = "scored_loss"
FLOAT32 = "token_scores, product_dtype=float32"
INVARIANT = "token_scores, batch_invariant"
TRL_FULL = "TRL, functions of logits"
TRL_TILES = "TRL, tiles"
BY_HAND = "logsumexp"
COMPILED = "logsumexp, torch.compile"
WAYS = {
    OURS: Way(ours()),
    INVARIANT: Way(ours(batch_invariant=True), with_entropy=False),
    FLOAT32: Way(ours(product_dtype=torch.float32), with_entropy=False, only=torch.bfloat16, products=torch.float32),
    SCORED: Way(scored_loss, joined=True),
    TRL_FULL: Way(trl_full, kept=True),
    TRL_TILES: Way(trl_tiles),
    BY_HAND: Way(by_hand, kept=True),
    COMPILED: Way(compiled, compiles=True, kept=True),
}
