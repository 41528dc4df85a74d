"""What generator and criterion are asked for, and how the first call finds out whether they keep to it.

A generator treats every token alone; a criterion adds up. A few kept rows are taken, and nothing of the caller's is
changed: the modules are structural copies with detached parameters and copied buffers, and the random state is forked.

- By gradient, where gradients are wanted: the scores of one row have no gradient in another. That is exact in every
  dtype, in every mode and with dropout, for what is multiplied by 0 is 0.
- By value: the same rows side by side, one below the other in the opposite order, and half of them alone, have the same
  scores. This finds what has no gradient (a detached mean, a position added), if it is large: a generator may compute
  in bfloat16 inside whatever the dtype of its scores, so half of bfloat16's digits must agree, no more. A generator
  that is random is asked again in evaluation mode.

Neither finds a mixture whose share is 0 on the first call and is learnt later, nor one of rows far apart.

Shape suffixes: N all rows, K probed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss

from seqpar.core.chunks import recording
from seqpar.core.token_loss import TokenLoss
from seqpar.losses.criteria import LabelSmoothing, ignored_target

PROBE_ROWS = 4
"""Two sequences of two time steps."""

ROUNDING = torch.finfo(torch.bfloat16).eps ** 0.5
"""Half of bfloat16's digits: a larger difference between the same rows' scores is not rounding."""

REPEATS = 16
"""How often the same rows are asked for, before a generator whose scores differ is held not to be random."""

NOT_ADDITIVE = 0.01
"""A criterion's sum may be so far from that of its parts; one in bfloat16 may be four of its roundings away."""

Project = Callable[[tuple[int, ...], Sequence[Tensor]], Tensor]
"""(leading shape, rows of hidden and of each per-token tensor) -> the logits (K, V) of the rows in that shape."""


def project(generator: nn.Module, names: Sequence[str], shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
    """The generator on some rows, in blocks of that leading shape; logits (K, V).

    Raises:
        ValueError: what comes back is no (..., V) tensor.
    """
    hidden, *extra = (t.reshape(*shape, *t.shape[1:]) for t in rows)
    logits = generator(hidden, **dict(zip(names, extra, strict=True)))
    if not isinstance(logits, Tensor) or logits.shape[:-1] != hidden.shape[:-1]:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(f"the generator made {got} of hidden {tuple(hidden.shape)}; it must return (..., V) scores")
    return logits.flatten(0, -2)


def check_roles(generator: nn.Module, criterion: nn.Module) -> None:
    """Raises TypeError where the two are known to stand in each other's place."""
    if isinstance(generator, (LabelSmoothing, _Loss)):
        raise TypeError(f"generator is a {type(generator).__name__}, a criterion; the order is (generator, criterion)")
    if isinstance(criterion, (nn.Linear, nn.Sequential, nn.Embedding)):
        raise TypeError(f"criterion is a {type(criterion).__name__}, a generator; the order is (generator, criterion)")


def first_scores(generator: nn.Module, scores: Project, shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
    """`scores(shape, rows)`, with torch's errors about dtypes and sizes told of hidden.

    Raises:
        TypeError: hidden has another dtype than all of the generator's parameters. ValueError: another width.
    """
    try:
        return scores(shape, rows)
    except RuntimeError as error:
        hidden, dtypes = rows[0], {p.dtype for p in generator.parameters() if p.is_floating_point()}
        if dtypes and hidden.dtype not in dtypes and not torch.is_autocast_enabled(hidden.device.type):
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise TypeError(
                f"hidden has dtype {hidden.dtype} and the generator's parameters {names}; cast one, or use autocast"
            ) from error
        if "cannot be multiplied" in str(error) or "size" in str(error):
            raise ValueError(
                f"the generator does not take hidden's last size {hidden.size(-1)}: {str(error).splitlines()[0]}"
            ) from error
        raise


def criterion_loss(criterion: Any, logits: Tensor, target: Tensor) -> TokenLoss:
    """What the criterion makes of logits (K, V) and targets (K,), with its counts where it has them.

    Raises:
        TypeError: it returns no tensor, or its `token_loss` no `TokenLoss`.
    """
    if hasattr(criterion, "token_loss"):
        loss = criterion.token_loss(logits, target)
        if not isinstance(loss, TokenLoss):
            raise TypeError(f"the criterion's token_loss returned a {type(loss).__name__}; it must return a TokenLoss")
        for name, value in loss._asdict().items():
            if not isinstance(value, Tensor) and (value is not None or name in ("total", "tokens")):
                kind = type(value).__name__
                raise TypeError(f"the criterion's token_loss returned a TokenLoss whose {name} is a {kind}, no tensor")
        return loss
    total = criterion(logits, target)
    if not isinstance(total, Tensor):
        raise TypeError(f"the criterion returned a {type(total).__name__}; it must return a tensor, the summed loss")
    ignored = ignored_target(criterion) if recording(target.device) else None
    count = torch.full((), len(target), device=target.device) if ignored is None else (target != ignored).sum()
    return TokenLoss(total, count)


def probe_index(kept_N: Tensor) -> Tensor:
    """`PROBE_ROWS` kept rows spread over the batch, some twice where they are fewer; none where none is kept."""
    indices_K = kept_N.nonzero().squeeze(1)
    spread = torch.arange(PROBE_ROWS, device=indices_K.device) * len(indices_K) // PROBE_ROWS
    return indices_K[spread] if len(indices_K) else indices_K


def refuse_mixing(generator: nn.Module, scores: Project, rows: Sequence[Tensor], lead: int, wanted: bool) -> None:
    """Raises ValueError if a row's scores depend on other rows, or on where it stands among them.

    Args:
        generator: what `scores` calls; it may be set to evaluation mode.
        rows: `PROBE_ROWS` rows of hidden and of each per-token tensor.
        lead: how many leading dimensions the blocks have.
        wanted: whether gradients are.
    """
    mixed = _mixed_by_gradient(scores, rows, lead) if wanted else ""
    mixed = mixed or _mixed_by_value(generator, scores, rows, lead)
    if not mixed:
        return
    norms = [part for part in generator.modules() if isinstance(part, _BatchNorm)]
    names = sorted({type(part).__name__ for part in norms if part.training or part.running_mean is None})
    why = f" ({', '.join(names)} takes statistics over the batch)" if names else ""
    raise ValueError(
        f"the generator mixes rows: {mixed}{why}. It is called on a few tokens at a time, so each must stand alone; "
        "compute what mixes before the engine, and pass its result as hidden or as a per-token keyword"
    )


def _mixed_by_gradient(scores: Project, rows: Sequence[Tensor], lead: int) -> str:
    """What the scores of the first row, and of the last, have a gradient in besides themselves; empty for nothing."""
    shape = (PROBE_ROWS,) if lead == 1 else (*(1,) * (lead - 2), 2, PROBE_ROWS // 2)
    apart: set[int] = set()
    for own in (0, PROBE_ROWS - 1):
        with torch.enable_grad():
            hidden = rows[0].detach().requires_grad_()
            # A copy of the leaf, for a generator may change its input in place
            logits_KV = scores(shape, (hidden.clone(), *rows[1:]))
            if not logits_KV.requires_grad:
                return ""
            upstream = torch.zeros_like(logits_KV)
            upstream[own] = torch.rand_like(logits_KV[own]) + 1
            (grad,) = torch.autograd.grad(logits_KV, hidden, upstream)
            size_K = grad.flatten(1).abs().amax(1)
            least = torch.finfo(grad.dtype).eps * size_K[own]
            apart |= {abs(own - k) for k in ((size_K > least) & size_K.isfinite()).nonzero().flatten().tolist()}
    if lead == 1:
        return "a row's scores have a gradient in other rows" if apart - {0} else ""
    names = {1: "other time steps", 2: "other sequences", 3: "other time steps of other sequences"}
    where = " and in ".join(name for distance, name in names.items() if distance in apart)
    return f"a token's scores have a gradient in {where}" if where else ""


def _mixed_by_value(generator: nn.Module, scores: Project, rows: Sequence[Tensor], lead: int) -> str:
    """How much the scores of the same rows differ with their company and order; empty where they do not."""
    ones, count = (1,) * (lead - 1), len(rows[0])
    backwards = (*(1,) * (lead - 2), count, 1) if lead > 1 else (count,)
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
                return f"the same tokens' scores change with their company and order, by {different:.2g} of the largest"
            generator.eval()  # it is random, such as dropout: without that it can be asked
    return ""


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of what is finite in both, as a share of the largest number."""
    a, b = a.float(), b.float()
    finite = a.isfinite() & b.isfinite()
    largest = float(a.where(finite, 0).abs().max())
    return float((a - b).where(finite, 0).abs().max()) / largest if largest else 0.0


def check_additive(criterion: nn.Module, logits: Tensor, target: Tensor) -> bool:
    """Whether these rows could tell if the criterion adds up: not where its loss is 0 or not finite.

    One that is random cannot be asked at all, and is believed.

    Raises:
        ValueError: the rows twice, or their two halves, do not give the sums that they should.
    """

    def total(logits_KV: Tensor, target_K: Tensor) -> Tensor:
        return criterion_loss(criterion, logits_KV, target_K).total.sum()

    half = len(target) // 2
    once, again = total(logits, target), total(logits, target)
    twice = float(total(logits.repeat(2, 1), target.repeat(2)))
    parts = float(total(logits[:half], target[:half])) + float(total(logits[half:], target[half:]))
    whole = float(once)
    if whole == 0 or whole != whole or abs(whole) == float("inf"):
        return False
    if whole != float(again):
        return True
    rounding = max(NOT_ADDITIVE, *(4 * torch.finfo(t.dtype).eps for t in (logits, once) if t.is_floating_point()))
    if abs(twice - whole) <= rounding * abs(whole):
        raise ValueError(
            f"the criterion gives {whole:.6g} for {len(target)} rows and {twice:.6g} for the same rows twice, so it "
            "takes a mean; the criterion must sum (reduction='sum'), the one division is by the step's tokens"
        )
    for what, found, wanted in (("twice", twice, 2 * whole), ("in two halves", whole, parts)):
        if abs(found - wanted) > rounding * (abs(found) + abs(wanted)):
            raise ValueError(
                f"the criterion gives {found:.6g} for {len(target)} rows {what} and {wanted:.6g} as the sum of the "
                "parts, so it does not add up; it must return a sum over rows, each of which stands alone"
            )
    return True
