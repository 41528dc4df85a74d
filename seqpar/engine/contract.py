"""Check, in the first call, that the generator and the criterion meet the engine's requirements.

Chunking is exact only if a token's scores depend on that token alone, and if the criterion is a sum over tokens. Both
are checked on a few rows that are not ignored. The caller's modules do not change: the checks run on structural copies
with detached parameters and copied buffers, and with a forked random state.

- By gradient, if gradients are wanted: d scores_i / d hidden_j must be 0 for i != j. This is exact in every dtype, in
  every mode and with dropout, because a term that does not depend on hidden_j contributes exactly 0.
- By value: the same rows in one block, in the opposite order, and half of them alone, must have the same scores. This
  also finds mixing that has no gradient (a detached mean, an added position), if it is large: a generator may compute
  in bfloat16 internally, whatever the dtype of its scores, so only half of bfloat16's digits must agree. A generator
  whose scores are random is checked again in evaluation mode.

Neither check finds mixing whose weight is 0 in the first call and is learnt later, nor mixing of distant rows only.
Hooks, modules, flags and functions that change later are noticed, and the checks repeated; other numbers are not.

Shape suffixes: N all rows, K probed rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss

from seqpar.core.chunks import recording
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.module_calls import extra_in_call
from seqpar.rows.criteria import LabelSmoothing, ignored_target

PROBE_ROWS = 4
"""Two sequences of two time steps."""

ROUNDING = torch.finfo(torch.bfloat16).eps ** 0.5
"""Half of bfloat16's digits: a larger relative difference between scores of the same rows is not rounding."""

REPEATS = 16
"""How often the same rows must give the same scores before the generator counts as deterministic."""

NOT_ADDITIVE = 0.01
"""The relative difference allowed between a criterion's sum over some rows and the sum over their halves. In low
precision four roundings are allowed if that is more."""

Project = Callable[[tuple[int, ...], Sequence[Tensor]], Tensor]
"""(leading shape, rows of hidden and of each per-token tensor) -> the logits (K, V) of the rows in that shape."""


def project(generator: nn.Module, names: Sequence[str], shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
    """Return the generator's logits (K, V) of some rows, given to it in the leading shape `shape`.

    Raises:
        ValueError: the generator does not return a (..., V) tensor.
    """
    # (K, ...) -> (*shape, ...), and back to (K, V) at the end
    hidden, *extra = (t.reshape(*shape, *t.shape[1:]) for t in rows)
    logits = generator(hidden, **dict(zip(names, extra, strict=True)))
    if not isinstance(logits, Tensor) or logits.shape[:-1] != hidden.shape[:-1]:
        returned = f"a {type(logits).__name__}"
        if isinstance(logits, Tensor):
            returned = f"shape {tuple(logits.shape)}"
        named = zip(("hidden", *names), (hidden, *extra), strict=True)
        given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in named)
        raise ValueError(f"the generator returned {returned} for {given}; it must return (..., V) scores")
    return logits.flatten(0, -2)


def check_roles(generator: nn.Module, criterion: nn.Module) -> None:
    """Raise TypeError if the types show that the two were passed in the wrong order."""
    if isinstance(generator, (LabelSmoothing, _Loss)):
        raise TypeError(f"generator is a {type(generator).__name__}, a criterion; the order is (generator, criterion)")
    if isinstance(criterion, (nn.Linear, nn.Sequential, nn.Embedding)):
        raise TypeError(f"criterion is a {type(criterion).__name__}, a generator; the order is (generator, criterion)")


def first_scores(
    generator: nn.Module,
    scores: Project,
    shape: tuple[int, ...],
    rows: Sequence[Tensor],
    names: Sequence[str],
    target_shape: Sequence[int],
) -> Tensor:
    """Return `scores(shape, rows)`; rephrase an error of torch's as one about an argument, where that is the cause.

    It is the cause if the generator takes zeros of another dtype or size in its place.

    Raises:
        TypeError: hidden has another dtype than all of the generator's parameters.
        ValueError: hidden has another width, or a per-token tensor has target's shape where it needs one more
            dimension.
    """

    def takes(other: Sequence[Tensor]) -> bool:
        # An index beyond the zeros, or an assertion of the generator's own, says no as well
        with contextlib.suppress(Exception):
            scores(shape, other)
            return True
        return False

    try:
        return scores(shape, rows)
    except (RuntimeError, IndexError) as error:
        cause = _hidden_at_fault(generator, takes, rows) or _column_at_fault(takes, rows, names, target_shape)
        if cause is None:
            raise
        kind, words = cause
        raise kind(f"{words} ({str(error).splitlines()[0]})") from error


Cause = tuple[type[Exception], str]
"""The error to raise, and its words."""


def _hidden_at_fault(
    generator: nn.Module, takes: Callable[[Sequence[Tensor]], bool], rows: Sequence[Tensor]
) -> Cause | None:
    """Return what is wrong with hidden: its width, its dtype, or nothing that another one would mend."""
    hidden, *extra = rows
    width = hidden.size(-1)
    parameters = [p for p in generator.parameters() if p.is_floating_point()]
    # Autocast casts hidden itself
    dtypes = {hidden.dtype, *(p.dtype for p in parameters)}
    if torch.is_autocast_enabled(hidden.device.type):
        dtypes = {hidden.dtype}
    sizes = sorted({size for p in parameters for size in p.shape} - {width})
    for dtype in dtypes - {hidden.dtype}:
        if takes([hidden.to(dtype), *extra]):
            return TypeError, (
                f"hidden has dtype {hidden.dtype} and the generator's parameters {dtype}; cast one, or use autocast"
            )
    for dtype, size in itertools.product(dtypes, sizes):
        if takes([hidden.new_zeros(len(hidden), size, dtype=dtype), *extra]):
            return ValueError, f"the generator does not take hidden's last size {width}; it takes {size}"
    return None


def _column_at_fault(
    takes: Callable[[Sequence[Tensor]], bool],
    rows: Sequence[Tensor],
    names: Sequence[str],
    target_shape: Sequence[int],
) -> Cause | None:
    """Return which per-token tensors are taken for one number a token and are (batch, source) instead, if any are.

    A source as long as the target is not noticed by its shape.
    """
    of_target = [i for i, t in enumerate(rows) if i and t.dim() == 1]
    for some in (*([i] for i in of_target), of_target):
        longer = [t.new_zeros(len(t), target_shape[-1]) if i in some else t for i, t in enumerate(rows)]
        if some and takes(longer):
            called = " and ".join(names[i - 1] for i in some)
            shape = tuple(target_shape)
            return ValueError, (
                f"{called} of shape {shape} has one number for each token, and the generator takes a row for each; for "
                f"a source of {shape[-1]} positions pass {names[some[0] - 1]}.unsqueeze(1).expand(-1, {shape[-1]}, -1)"
            )
    return None


def counts_itself(criterion: nn.Module) -> bool:
    """Return whether `token_loss` computes all that a call of the criterion does, and counts besides.

    It does not if a subclass has changed `forward` alone, nor if a hook, or a forward set on the instance, may change
    the result.
    """
    if not hasattr(criterion, "token_loss") or extra_in_call(criterion):
        return False
    for owner in type(criterion).__mro__:
        if "token_loss" in vars(owner):
            return True
        if "forward" in vars(owner):
            return False
    return True  # an attribute of the instance


def criterion_loss(criterion: nn.Module, logits: Tensor, target: Tensor) -> TokenLoss:
    """Return the criterion's loss of logits (K, V) and targets (K,), with the counts that it computes.

    Raises:
        TypeError: it does not return a tensor, or its `token_loss` does not return a `TokenLoss`.
    """
    if counts_itself(criterion):
        return _checked_token_loss(criterion.token_loss(logits, target))  # type: ignore[operator]
    total = criterion(logits, target)
    if not isinstance(total, Tensor):
        raise TypeError(f"the criterion returned a {type(total).__name__}; it must return a tensor, the summed loss")
    # Chunks contain ignored rows only while a CUDA graph is recorded
    ignored = None
    if recording(target.device):
        ignored = ignored_target(criterion)
    if ignored is None:
        return TokenLoss(total, torch.full((), len(target), device=target.device))
    return TokenLoss(total, (target != ignored).sum())


def _checked_token_loss(loss: object) -> TokenLoss:
    """Return what a criterion's `token_loss` returned; raise TypeError unless it is a TokenLoss of tensors."""
    if not isinstance(loss, TokenLoss):
        raise TypeError(f"the criterion's token_loss returned a {type(loss).__name__}; it must return a TokenLoss")
    for name, value in loss._asdict().items():
        if not isinstance(value, Tensor) and (value is not None or name in ("total", "tokens")):
            kind = type(value).__name__
            raise TypeError(f"the criterion's token_loss returned a TokenLoss whose {name} is a {kind}, no tensor")
    return loss


def probe_index(kept_N: Tensor) -> Tensor:
    """Return `PROBE_ROWS` rows that are not ignored, spread over the batch.

    Some are repeated if there are fewer; if every row is ignored, the result is empty.
    """
    indices_K = kept_N.nonzero().squeeze(1)
    if not len(indices_K):
        return indices_K
    return indices_K[torch.arange(PROBE_ROWS, device=indices_K.device) * len(indices_K) // PROBE_ROWS]


def refuse_mixing(generator: nn.Module, scores: Project, rows: Sequence[Tensor], lead: int, wanted: bool) -> None:
    """Raise ValueError if a row's scores depend on other rows, or on its position among them.

    Args:
        generator: the module that `scores` calls; it may be set to evaluation mode.
        rows: `PROBE_ROWS` rows of hidden and of each per-token tensor.
        lead: the number of leading dimensions that the generator expects.
        wanted: whether gradients are wanted.
    """
    mixed = ""
    if wanted:
        mixed = _mixed_by_gradient(scores, rows, lead)
    if not mixed:
        mixed = _mixed_by_value(generator, scores, rows, lead)
    if not mixed:
        return
    # The usual culprit, in training mode or without running statistics
    norms = [module for module in generator.modules() if isinstance(module, _BatchNorm)]
    names = sorted({type(norm).__name__ for norm in norms if norm.training or norm.running_mean is None})
    reason = ""
    if names:
        reason = f" ({', '.join(names)} takes statistics over the batch)"
    raise ValueError(
        f"the generator mixes rows: {mixed}{reason}. It is called on a few tokens at a time, so a token's scores must "
        "depend on that token alone; compute anything that mixes tokens before the engine, and pass the result as "
        "hidden or as a per-token keyword"
    )


def _mixed_by_gradient(scores: Project, rows: Sequence[Tensor], lead: int) -> str:
    """Return which other rows the scores of the first and the last row have a gradient in, in words; "" for none.

    With two or more leading dimensions the four rows are two sequences of two time steps: row k is sequence k // 2 at
    time k % 2. So seen from either corner, a row at distance 1 is another time step, at distance 2 another sequence.
    """
    shape: tuple[int, ...] = (PROBE_ROWS,)
    if lead > 1:
        shape = (*(1,) * (lead - 2), 2, PROBE_ROWS // 2)
    distances: set[int] = set()
    for own in (0, PROBE_ROWS - 1):
        with torch.enable_grad(), graph_of_its_own():
            hidden = rows[0].detach().requires_grad_()
            # A copy, because a generator may change its input in place, and autograd forbids that for a leaf
            logits_KV = scores(shape, (hidden.clone(), *rows[1:]))
            if not logits_KV.requires_grad:
                return ""
            # A random weighting of the row's scores: with equal weights a softmax would have the gradient 0
            upstream = torch.zeros_like(logits_KV)
            upstream[own] = torch.rand_like(logits_KV[own]) + 1
            (grad,) = torch.autograd.grad(logits_KV, hidden, upstream)
            # For each row k, the largest entry of d (weighted scores of row `own`) / d hidden_k
            size_K = grad.flatten(1).abs().amax(1)
            # Anything above the rounding of the row's own gradient comes from mixing; a nan is no evidence of it
            least = torch.finfo(grad.dtype).eps * size_K[own]
            has_gradient_K = (size_K > least) & size_K.isfinite()
            distances |= {abs(own - k) for k in has_gradient_K.nonzero().flatten().tolist()}
    distances.discard(0)
    if not distances:
        return ""
    if lead == 1:
        return "a row's scores have a gradient in other rows"
    names = {1: "other time steps", 2: "other sequences", 3: "other time steps of other sequences"}
    others = " and in ".join(names[distance] for distance in sorted(distances))
    return f"a token's scores have a gradient in {others}"


def _mixed_by_value(generator: nn.Module, scores: Project, rows: Sequence[Tensor], lead: int) -> str:
    """Return how much the scores of the same rows change with other rows and their order, in words; "" if not."""
    ones = (1,) * (lead - 1)
    count = len(rows[0])
    # In the opposite order, and as so many sequences of one time step
    backwards: tuple[int, ...] = (count,)
    if lead > 1:
        backwards = (*(1,) * (lead - 2), count, 1)
    with torch.no_grad():
        for _ in range(2):
            logits_KV = scores((*ones, count), rows)
            half_KV = scores((*ones, count // 2), [t[: count // 2] for t in rows])
            backwards_KV = scores(backwards, [t.flip(0) for t in rows]).flip(0)
            different = max(_difference(logits_KV[: count // 2], half_KV), _difference(logits_KV, backwards_KV))
            if different <= ROUNDING:
                return ""
            repeats = (scores((*ones, count), rows) for _ in range(REPEATS))
            if all(_difference(logits_KV, again_KV) <= ROUNDING for again_KV in repeats):
                return (
                    f"a token's scores change with the other tokens and their order, by {different:.2g} of the largest"
                )
            # The scores are random, for example by dropout: check the generator without that
            generator.eval()
    return ""


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest number, over numbers that are finite in both."""
    a = a.float()
    b = b.float()
    # A masked class has -inf in every row, and -inf - -inf is nan
    finite = a.isfinite() & b.isfinite()
    largest = float(a.where(finite, 0).abs().max())
    if not largest:
        return 0.0
    return float((a - b).where(finite, 0).abs().max()) / largest


def check_additive(criterion: nn.Module, logits: Tensor, target: Tensor) -> bool:
    """Check that the criterion is a sum over rows; return False if these rows cannot show it.

    That is so if the loss is 0 or not finite. A criterion with random losses cannot be checked and passes.

    Raises:
        ValueError: the loss of the rows twice is not twice the loss, or those of two halves do not add up to it.
    """

    def total(logits_KV: Tensor, target_K: Tensor) -> Tensor:
        return criterion_loss(criterion, logits_KV, target_K).total.sum()

    # For any sum over rows: f(x, x) = 2 f(x) and f(x) = f(first half) + f(second half). A mean fails the first, a term
    # for pairs of rows the second
    half = len(target) // 2
    once = total(logits, target)
    twice = float(total(logits.repeat(2, 1), target.repeat(2)))
    halves = float(total(logits[:half], target[:half])) + float(total(logits[half:], target[half:]))
    whole = float(once)
    # 0 = 2 x 0 holds for a mean as well
    if whole == 0 or not math.isfinite(whole):
        return False
    rounding = max(NOT_ADDITIVE, *(4 * torch.finfo(t.dtype).eps for t in (logits, once) if t.is_floating_point()))
    wrong = _what_does_not_add_up(whole, twice, halves, rounding, len(target))
    # Random, for example by sampled classes: no two sums of it can be compared. In bfloat16 two may be equal by chance
    if wrong and all(float(total(logits, target)) == whole for _ in range(REPEATS)):
        raise ValueError(wrong)
    return True


def _what_does_not_add_up(whole: float, twice: float, halves: float, rounding: float, rows: int) -> str:
    """Return what is wrong with the losses of some rows, of these rows twice, and of their halves; empty if nothing."""
    # The most likely mistake has a message of its own
    if abs(twice - whole) <= rounding * abs(whole):
        return (
            f"the criterion gives {whole:.6g} for {rows} rows and {twice:.6g} for the same rows twice, so it "
            "takes a mean; the criterion must sum (reduction='sum'): divide once, by the tokens of the step"
        )
    # Floats added in different orders: a difference up to `rounding` is no evidence
    for which, found, wanted in ((" twice", twice, 2 * whole), ("", whole, halves)):
        if abs(found - wanted) > rounding * (abs(found) + abs(wanted)):
            return (
                f"the criterion gives {found:.6g} for {rows} rows{which} and {wanted:.6g} as the sum over their "
                "two halves, so it does not add up; it must return a sum of one term per row"
            )
    return ""
