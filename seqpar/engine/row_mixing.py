"""Test whether a generator mixes rows: whether a row's scores depend on another row.

It is tested by value, and by gradient: d scores_i / d hidden_j must be 0 for i != j, which is exact in every dtype, in
every mode and with dropout. Mixing of distant rows only is not found.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpar.core.checks import refuse_reentrant
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.row_independence import largest_difference, precision_of
from seqpar.core.surroundings import REPEATS
from seqpar.engine.trial import PROBE_ROWS, Trial


def ask_about_rows(trial: Trial) -> None:
    """Raise ValueError if a row's scores depend on other rows, by gradient or by value."""
    mixed = _mixing(trial)
    if not mixed and (masked := trial.with_other_masks()):
        # The caller's code may refuse such numbers
        with contextlib.suppress(Exception):
            mixed = _mixing(masked)
    if mixed:
        raise ValueError(
            f"the generator mixes rows: {mixed}{_usual_culprit(trial.head['generator'])}. It is called on a few "
            "tokens at a time, so a token's scores must depend only on that token; compute anything that mixes "
            "tokens before the engine, and pass the result as hidden or as a per-token keyword"
        )


def _mixing(trial: Trial) -> str:
    """Return how scores depend on other rows, in words; "" if they do not."""
    with trial.keep_state():
        mixed = _mixing_by_gradient(trial)
    with trial.keep_state():
        return mixed or _mixing_by_value(trial)


def _mixing_by_value(trial: Trial) -> str:
    """Return, in words, how much the scores of rows change with other rows and their order; "" if they do not."""
    copy = trial.copy()
    scores = functools.partial(trial.scores, copy)
    shape = trial.shape(PROBE_ROWS)
    # As sequences of one time step each
    others = (2 * PROBE_ROWS,) if trial.lead == 1 else (*(1,) * (trial.lead - 2), 2 * PROBE_ROWS, 1)
    rounding = _rounding_of_scores(trial, copy)
    with torch.no_grad():
        for _ in range(2):
            whole_KV = scores(shape, trial.rows)
            halves_KV = torch.cat([scores(trial.shape(len(half[0])), half) for half in _parts(trial.rows, 2)])
            twice_KV, turned_KV = scores(others, _beside_themselves(trial.rows)).chunk(2)
            same = [halves_KV, twice_KV, turned_KV.flip(0)]
            # Single rows, too, because two halves may have the same share of padding; but a generator need not take
            # one (a `squeeze`)
            with contextlib.suppress(Exception):
                same.append(torch.cat([scores(trial.shape(1), row) for row in _parts(trial.rows, PROBE_ROWS)]))
            different = max(largest_difference(logits_KV, whole_KV) for logits_KV in same)
            if different <= rounding:
                return ""
            if _repeats(lambda: scores(shape, trial.rows), whole_KV, rounding):
                return (
                    f"a token's scores change with the other tokens and their order, by {different:.2g} of the largest"
                )
            # The scores are random, for example because of dropout: test the generator without it
            copy.eval()
    return ""


def _mixing_by_gradient(trial: Trial) -> str:
    """Return, in words, in which other rows the scores of the first and the last row have a gradient; "" for none.

    With two or more leading dimensions the four rows are two sequences of two time steps: row k is sequence k // 2
    at time k % 2. Seen from either corner, a row at distance 1 is therefore another time step, and at distance 2
    another sequence.
    """
    if not trial.wanted:
        return ""
    scores = functools.partial(trial.scores, trial.copy())
    shape = (PROBE_ROWS,) if trial.lead == 1 else (*(1,) * (trial.lead - 2), 2, PROBE_ROWS // 2)
    distances: set[int] = set()
    for own in (0, PROBE_ROWS - 1):
        with torch.enable_grad(), graph_of_its_own():
            hidden = trial.rows[0].detach().requires_grad_()
            # A copy, because a generator may change its input in place, and autograd forbids that for a leaf
            logits_KV = scores(shape, (hidden.clone(), *trial.rows[1:]))
            if not logits_KV.requires_grad:
                return ""
            refuse_reentrant(logits_KV)
            # A random weighting of the row's scores: with equal weights a softmax would have the gradient 0
            upstream = torch.zeros_like(logits_KV)
            upstream[own] = torch.rand_like(logits_KV[own]) + 1
            weighted = (logits_KV * upstream).sum()
            found: tuple[Tensor | None, ...] = torch.autograd.grad(weighted, hidden, allow_unused=True)
        grad = found[0]
        if grad is None:
            return ""
        # For each row k, the largest entry of d (weighted scores of row `own`) / d hidden_k
        size_K = grad.flatten(1).abs().amax(1)
        # Anything above the rounding of the row's own gradient comes from mixing; a nan is not evidence of it
        least = torch.finfo(grad.dtype).eps * size_K[own]
        has_gradient_K = (size_K > least) & size_K.isfinite()
        distances |= {abs(own - k) for k in has_gradient_K.nonzero().flatten().tolist()}
    distances.discard(0)
    if not distances:
        return ""
    if trial.lead == 1:
        return "a row's scores have a gradient in other rows"
    names = {1: "other time steps", 2: "other sequences", 3: "other time steps of other sequences"}
    return f"a token's scores have a gradient in {' and in '.join(names[d] for d in sorted(distances))}"


def _rounding_of_scores(trial: Trial, copy: nn.ModuleDict) -> float:
    """Return by how much rounding may change the scores of the same rows beside other rows."""
    with torch.set_grad_enabled(trial.wanted), graph_of_its_own():
        hidden = trial.rows[0].clone().requires_grad_(trial.wanted)
        # A copy, because the generator may change it in place
        scores = trial.scores(copy, trial.shape(PROBE_ROWS), (hidden * 1, *trial.rows[1:]))
        # Without a graph, the generator may compute in bfloat16 inside
        return precision_of(scores, torch.bfloat16).rounding


def _usual_culprit(generator: nn.Module) -> str:
    """Return, in words, which batch normalisation takes statistics over the batch; "" if none does."""
    norms = [module for module in generator.modules() if isinstance(module, _BatchNorm)]
    names = sorted({type(norm).__name__ for norm in norms if norm.training or norm.running_mean is None})
    return f" ({', '.join(names)} takes statistics over the batch)" if names else ""


def _parts(rows: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """Return the rows cut into `count` parts of equal size."""
    return list(zip(*(t.chunk(count) for t in rows), strict=True))


def _beside_themselves(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows, followed by the same rows in the opposite order."""
    return [torch.cat([t, t.flip(0)]) for t in rows]


def _repeats(function: Callable[[], Tensor], first: Tensor, noise: float) -> bool:
    """Return whether the function gives the same result again and again, up to a relative difference of `noise`.

    In bfloat16 two random numbers may be equal by chance.
    """
    return all(largest_difference(function(), first) <= noise for _ in range(REPEATS))
