"""Compute any loss that is a function of each token's own scores, storing its gradient as cross-entropy does.

Shape suffixes: N rows (batch x time), K rows of a block, D hidden, V vocabulary (this rank's classes, if it is split),
J given classes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from seqpar.core.checks import check_floating, check_shapes, refuse_transforms, refuse_unknown_leaves
from seqpar.core.chunked_gradient import differentiable_sum
from seqpar.core.device_facts import is_capturing, is_on_host
from seqpar.core.effects import keep_random_states
from seqpar.core.graphs import graph_of_its_own, outside_graphs
from seqpar.core.row_independence import (
    Answer,
    Precision,
    ask,
    ask_alone,
    change_in_company,
    difference,
    ends_of_rows,
    largest_difference,
    precision_of,
)
from seqpar.core.structures import each
from seqpar.core.surroundings import (
    ONE_CHUNKS,
    Asked,
    Surroundings,
    ask_about_function,
    code_of,
    refuse_graphs_left,
    surroundings_of_function,
)
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.chunk_loss import ScoreLoss
from seqpar.linear.inputs import Inputs, Settings
from seqpar.linear.score_inputs import ScoreRequest, prepare_scores
from seqpar.rows.scores import RowFunction, Scores, Upstream
from seqpar.rows.smoothing import RowLosses

Loss = Callable[..., Tensor]
"""(scores, **per-token tensors) -> one number for each row."""

FEW = 4
"""How many rows are used to test whether calls change anything around the function."""

_asked = Asked()
_asking = threading.RLock()

PASSED = "and is not an argument of it; pass it as a per-token keyword of target's shape, or detach it"


@outside_graphs
def scored_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss: Loss,
    *,
    bias: Tensor | None = None,
    ids: Tensor | None = None,
    entropy: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
    loss_scale: float | Tensor = 1.0,
    **per_token: Tensor,
) -> TokenLoss:
    """Return the sum of `loss(scores, **per_token)` over all tokens, with one chunk's logits in memory at a time.

    Plain equivalent:

        logits = F.linear(hidden, weight, bias).flatten(0, -2)[target.flatten() != ignore_index] / temperature
        log_p = logits.log_softmax(-1)
        scores.log_prob = log_p.gather(-1, target)
        scores.lse = logits.logsumexp(-1)
        scores.entropy = -(log_p.exp() * log_p).sum(-1)
        scores.log_probs_at = log_p.gather(-1, ids)
        loss(scores, **per_token).sum()

    Because a token's loss depends only on its own scores, its gradient is computed while its logits are in memory:
    three matrix products of rows x D x V, or two under a frozen projection; `token_scores`, for losses that join
    tokens, needs four.

    Args:
        hidden, weight, target, bias, softcap, ignore_index, vocab, chunk_tokens, loss_scale: as in
            `linear_cross_entropy`.
        loss: a differentiable function of a chunk's scores and per-token tensors that returns one number for each row.
            `scores` has the fields `log_prob` and `lse` (rows,) and, if asked for, `entropy` (rows,) and
            `log_probs_at` (rows, J), in float32 or wider; `seqpar.rows.scores.Scores` describes them. It is called once
            for each chunk, and must neither mix rows nor use other tensors that need a gradient. Counters that it
            keeps elsewhere add up all rows; anything it sets there holds one chunk's value. (Whatever the initial trial
            calls on some rows change is restored.)
        ids: int64 classes (target's shape, J) whose log-probabilities the loss takes.
        entropy: whether the loss takes the entropy of each token's distribution.
        temperature: divides the logits, after softcap; a number above 0, or one for each token, with no gradient.
        per_token: further tensors for the loss, whose first dimensions are target's shape. They are chunked with the
            rows and get a gradient if they require one.

    Returns:
        `TokenLoss`: `total` is the differentiable sum, in float32 or wider; `nll` and `correct` are those of the
        targets at this temperature. With a split vocabulary it is the same on every rank.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `linear_cross_entropy` and `token_scores`.
        TypeError: a `loss` that is not a function, or does not return a floating tensor; a per-token argument that is
            not a tensor.
        ValueError: a loss that mixes rows, returns a shape other than (rows,), depends on what its calls change, or
            leaves a tensor with a graph elsewhere; a per-token tensor of the wrong shape.
        RuntimeError: a loss that uses a tensor that needs a gradient and is not a per-token argument, or whose result
            has no gradient at all.

    Example:
        >>> hidden, weight, target = torch.randn(2, 6, 8), torch.randn(50, 8), torch.randint(50, (2, 6))
        >>> def surrogate(scores, old, advantage):  # clipped, with an entropy bonus
        ...     ratio = (scores.log_prob - old).exp()
        ...     clipped = ratio.clamp(0.8, 1.2)
        ...     return -torch.minimum(ratio * advantage, clipped * advantage) - 0.01 * scores.entropy
        >>> old, advantage = torch.randn(2, 6) - 5, torch.randn(2, 6)
        >>> loss = seqpar.scored_loss(hidden, weight, target, surrogate, entropy=True, old=old, advantage=advantage)
        >>> scores = seqpar.token_scores(hidden, weight, target, entropy=True)
        >>> torch.allclose(loss.total, surrogate(scores, old, advantage).sum())
        True
    """
    call = prepare_scores(
        Inputs(hidden, weight, target, bias),
        Settings(ignore_index=ignore_index, softcap=softcap, chunk_tokens=chunk_tokens),
        ScoreRequest(temperature=temperature, entropy=entropy, ids=ids),
        vocab,
        loss_scale,
        per_token=per_token,
        loss=loss,
    )
    tensors = tuple(call.per_token.values())
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    prepared = call.prepared
    prepared.projection.ask_for(RowFunction(entropy, correct=True, split=prepared.split))
    own_loss = _LossByAutograd(loss, list(per_token), tensors, wanted)
    score_loss = ScoreLoss(prepared.projection, own_loss, call.ids_NJ, call.temperature_N)
    return differentiable_sum(*prepared.job(score_loss, tensors), loss_scale)


class _LossByAutograd:
    """A function of scores, differentiated by autograd on vectors with one number per row.

    Args:
        function: the caller's loss.
        names: the names of the per-token tensors.
        per_token: these tensors, for all rows.
        wanted: which of them want a gradient.
    """

    def __init__(
        self, function: Loss, names: Sequence[str], per_token: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        self.function = function
        self.code = code_of(function)
        self.names = names
        self.per_token = per_token
        self.wanted = wanted
        self.is_checked = False

    def __call__(self, scores: Scores, per_token: Sequence[Tensor], wanted: bool) -> RowLosses:
        """Return the loss of each row; if `wanted`, with its derivatives."""
        scores = each(lambda t: t.detach().requires_grad_(wanted), scores)
        rows = self._leaves(per_token, wanted)
        leaves = [t for t in (*scores, *rows) if t is not None and t.requires_grad]
        asked = (self.code, *self.names, scores.log_prob.dtype, wanted, *self.wanted)
        is_known = _asked.changes(asked) is not None
        # A graph that begins and ends here is not part of the caller's. If several devices' threads get here, one runs
        # the check and the others wait, because the check restores whatever has changed in the meantime
        with torch.set_grad_enabled(wanted), graph_of_its_own(), contextlib.nullcontext() if is_known else _asking:
            loss_K = self._call(scores, rows)
            # In every chunk, because what a function uses may depend on its rows
            refuse_unknown_leaves(loss_K, leaves, "loss used", PASSED)
            # While a CUDA graph is being captured, no number can be read
            if not self.is_checked and len(loss_K) and not is_capturing(loss_K.device):
                self._refuse_detached(loss_K, leaves)
                self._ask(asked, loss_K, scores, rows)
                self.is_checked = True
            total = loss_K.sum()
        if not wanted:
            return RowLosses(loss_K, Upstream())
        grads: dict[int, Tensor | None] = {}
        if loss_K.requires_grad:
            found = torch.autograd.grad(total, leaves, allow_unused=True)
            grads = {id(leaf): grad for leaf, grad in zip(leaves, found, strict=True)}
        upstream = Upstream(**{name: grads.get(id(t)) for name, t in scores._asdict().items() if t is not None})
        of_rows = [grads.get(id(t)) for t in rows]
        zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(rows, of_rows, strict=True))
        return RowLosses(loss_K.detach(), upstream, tuple(zeros))

    def _call(self, scores: Scores, rows: Sequence[Tensor]) -> Tensor:
        """Return the function's result in the dtype of the scores, after checking it."""
        loss_K = self.function(scores, **dict(zip(self.names, rows, strict=True)))
        check_floating(loss_K, "what loss returned")
        refuse_transforms((loss_K,))
        wanted = f"({len(scores.log_prob)},): one number for each row, without a sum or a mean"
        check_shapes(loss_K.shape == scores.log_prob.shape, wanted, **{"what loss returned": loss_K})
        return loss_K.to(scores.log_prob.dtype)

    def _leaves(self, per_token: Sequence[Tensor], wanted: bool) -> list[Tensor]:
        """Return the rows of the per-token tensors as leaves; if `wanted`, those that want a gradient require one."""
        return [t.detach().requires_grad_(wanted and w) for t, w in zip(per_token, self.wanted, strict=True)]

    def _refuse_detached(self, loss_K: Tensor, leaves: list[Tensor]) -> None:
        """Raise if the loss has no gradient although there is something to differentiate."""
        if leaves and not loss_K.requires_grad and bool((loss_K != 0).any()):
            raise RuntimeError(
                "the result of loss does not require grad, though hidden or a parameter does: it returned a detached "
                "tensor (.detach(), torch.no_grad())"
            )

    def _ask(self, asked: object, loss_K: Tensor, scores: Scores, rows: list[Tensor]) -> None:
        """Raise if the loss mixes rows or, on the first check, depends on what its calls change around it.

        Whatever the calls of the first check change is restored. A function that counts something is not checked
        again, because it would count more rows than there are.
        """
        changes = _asked.changes(asked)
        if changes is None:
            around = surroundings_of_function("loss", self.function)
            try:
                self._refuse_mixing(loss_K, scores, rows)
                changes = self._changes_around(around, scores, rows)
                refuse_graphs_left(around, ONE_CHUNKS)
            finally:
                around.put_back(keeps_made=True)
            _asked.add(asked, changes)
        elif not changes:
            # Other rows may reveal what the first did not; gradients would take longer than a chunk's loss
            with torch.no_grad():
                self._refuse_mixing(loss_K, scores, rows)

    def _changes_around(self, around: Surroundings, scores: Scores, rows: list[Tensor]) -> bool:
        """Return whether calls change anything around the function; raise ValueError if its results depend on that."""
        few = torch.arange(min(FEW, len(scores.log_prob)), device=scores.log_prob.device)
        few_scores, few_rows = _rows(scores, rows, few)
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in (*_given(few_scores).values(), *few_rows)]

        def call() -> Answer:
            with keep_random_states(scores.log_prob.device, around.generators):
                return ask(partial(self._of_tensors, few_scores), tensors, scores.log_prob.dtype)

        rounding = call().precision.rounding
        return bool(ask_about_function("loss", call, difference, rounding, is_on_host(scores.log_prob), around))

    def _of_tensors(self, like: Scores, tensors: Sequence[Tensor]) -> Tensor:
        """Return the losses of scores with the fields of `like`, followed in `tensors` by the per-token tensors."""
        given = _given(like)
        scores = like._replace(**dict(zip(given, tensors, strict=False)))
        return self._call(scores, tensors[len(given) :])

    def _refuse_mixing(self, loss_K: Tensor, scores: Scores, rows: list[Tensor]) -> None:
        """Raise if the loss mixes rows, as far as these scores show it; under no_grad, as far as its values do.

        The per-token tensors paired with them come from rows of the whole batch: the first chunk may have no padding.
        """
        # Determined here, because the loss of other rows may have no graph
        precision = precision_of(loss_K, loss_K.dtype)
        if len(loss_K) == 1:
            scores = each(_two_rows, scores)
        count = len(scores.log_prob)
        if count != len(loss_K) or any(len(t) > count for t in self.per_token):
            rows = self._leaves(_varied_rows(self.per_token, count), torch.is_grad_enabled())
            loss_K = self._call(scores, rows)
        mixed = self._row_mixing(loss_K, scores, rows, precision)
        if mixed:
            raise ValueError(
                f"loss mixes rows: {mixed}. It is called on some rows at a time, so a row's loss must depend on that "
                "row alone; compute anything that joins tokens beforehand, and pass it as a per-token keyword, or use "
                "token_scores"
            )

    def _row_mixing(self, loss_K: Tensor, scores: Scores, rows: list[Tensor], precision: Precision) -> str:
        """Return how the loss of a row depends on other rows, in words; "" if it does not."""
        leaves = [t for t in (*scores, *rows) if t is not None and t.requires_grad]
        grads: tuple[Tensor, ...] = ()
        if loss_K.requires_grad and torch.is_grad_enabled():
            grads = _gradients(loss_K, leaves, torch.ones_like(loss_K))
            if _is_joined(loss_K, leaves, grads):
                return "a row's loss has a gradient in other rows"
        # What affects only some rows, such as those above the median, affects the largest or the smallest
        some = torch.stack([loss_K.argmax(), loss_K.argmin()])
        together = Answer(loss_K.detach()[some], tuple(g[some] for g in grads), precision)
        loss_of_rows = partial(self._of_tensors, scores)
        with keep_random_states(loss_K.device, []):
            alone = ask_alone(loss_of_rows, [t[some] for t in (*_given(scores).values(), *rows)])
            change = change_in_company(together, alone)
            # Rolled, not flipped: a loss that uses the opposite row's weight would look the same from both ends
            turned_K = torch.arange(len(loss_K), device=loss_K.device).roll(1)
            turned = self._call(*_rows(scores, rows, turned_K))
            change = change._replace(value=max(change.value, largest_difference(loss_K[turned_K], turned)))
            # A random loss has different values in every call
            if change.is_rounding or largest_difference(loss_K, self._call(scores, rows)) > change.rounding:
                return ""
        return str(change)


def _two_rows(score: Tensor) -> Tensor:
    """Return one row's score and a second, different one, to show whether one row affects another."""
    return torch.cat([score, 1.25 * score]).detach().requires_grad_(score.requires_grad)


def _given(scores: Scores) -> dict[str, Tensor]:
    """Return the scores that are present, by name."""
    return {name: t for name, t in scores._asdict().items() if t is not None}


def _varied_rows(per_token: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return some of all rows: the smallest and the largest of each tensor, and others spread over the batch."""
    if not per_token:
        return []
    ends = ends_of_rows(per_token)
    spread_K = torch.arange(count, device=ends.device) * len(per_token[0]) // count
    place_K = torch.cat([ends, spread_K])[:count]
    return [t[place_K] for t in per_token]


def _rows(scores: Scores, rows: list[Tensor], which_K: Tensor) -> tuple[Scores, list[Tensor]]:
    """Return some rows."""
    return each(lambda t: t[which_K], scores), [t[which_K] for t in rows]


def _gradients(loss_K: Tensor, leaves: list[Tensor], upstream_K: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of a weighted sum of the losses in each leaf."""
    weighted = (loss_K * upstream_K).sum()
    found = torch.autograd.grad(weighted, leaves, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, found, strict=True))


def _is_joined(loss_K: Tensor, leaves: list[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether the loss of some rows has a gradient in others; a nan is not evidence of it.

    If not, weighting a row's loss only scales that row's gradient; scaling by a power of 2 does not round.
    """
    place_K = torch.arange(len(loss_K), device=loss_K.device)
    # A different weight for each of 17 neighbours
    weight_K = torch.exp2(((7 * place_K) % 17 - 8).to(loss_K.dtype))
    for weighted, grad in zip(_gradients(loss_K, leaves, weight_K), grads, strict=True):
        weight = weight_K.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1))
        if bool(((weighted - weight * grad).abs() > 8 * torch.finfo(grad.dtype).eps * (weight * grad).abs()).any()):
            return True
    return False
