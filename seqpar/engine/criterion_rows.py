"""Test whether a criterion is a sum over rows, each with a loss of its own, and which targets it ignores.

What rarely acts is not found.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from seqpar.core.chunks import CPU_BUDGET
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.row_independence import (
    Answer,
    Change,
    ask,
    ask_alone,
    change_in_company,
    largest_difference,
    precision_of,
)
from seqpar.core.surroundings import REPEATS
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.pair import counts_itself, criterion_loss
from seqpar.engine.trial import PROBE_ROWS, Trial, in_float32
from seqpar.linear.projection import product_dtype
from seqpar.rows.criteria import ignored_target

MOST_COMPANY = 128
"""The most rows that a criterion is tested on together: enough that a hundredth, which it may leave out, is one row."""

COMPANY_BYTES = CPU_BUDGET
"""The most bytes of these rows' scores; with a large vocabulary there are fewer rows."""

BESIDE = "a loss that joins rows (CTC, contrastive, the hardest of a batch) is a second term beside the engine's"


def criterion_adds_up(trial: Trial, logits_KV: Tensor, common: set[int]) -> bool:
    """Raise ValueError unless the loss is a sum over rows; return False if these rows cannot show it."""
    why_not = _why_no_sum(trial, logits_KV, common)
    if why_not == "" and (masked := trial.with_other_masks()):
        # The caller's code may refuse such numbers
        with contextlib.suppress(Exception):
            why_not = _why_no_sum(masked, logits_KV, common) or ""
    if why_not:
        raise ValueError(why_not)
    return why_not is not None


def _why_no_sum(trial: Trial, logits_KV: Tensor, common: set[int]) -> str | None:
    """Return, in words, why the loss is not a sum over rows; "" if it is one, None if these rows cannot show it.

    They cannot if the loss is 0 or not finite. A criterion whose losses are random even in evaluation mode cannot be
    tested, and passes.
    """
    classes = usual_targets(trial, logits_KV, common)
    criterion, rows = _widen(trial.copy()["criterion"], _criterion_rows(trial, logits_KV, classes), trial.of_criterion)
    rows[0].requires_grad_(trial.wanted)
    own = len(rows[1]) - len(classes)
    least = product_dtype(rows[0])

    def total(rows: Sequence[Tensor]) -> Tensor:
        return _loss_of_rows(criterion, rows, trial.of_criterion).total.sum()

    # Once as it is and, if it is random, for example because of dropout, once more in evaluation mode
    for _ in range(2):
        alone = ask_alone(total, rows, least)
        # A mean over rows that are all padding is nan
        can_be_asked_K = alone.values.isfinite()
        can_be_asked_K[:own] = True
        place_K = can_be_asked_K.nonzero().squeeze(1)
        for company_K in _companies(own, place_K, rows[0]):
            some = [t[company_K] for t in rows]
            together = ask(total, some, least)
            if not together.values.isfinite() or not any(t.any() for t in (together.values, *together.gradients)):
                return None
            change = change_in_company(together, alone, company_K)
            if change.is_rounding:
                continue
            again = (ask(total, some, least) for _ in range(REPEATS))
            if all(change_in_company(together, other).is_rounding for other in again):
                return _not_a_sum(together, alone, company_K, change)
            break
        else:
            return ""
        criterion.eval()
    return ""


def _criterion_rows(trial: Trial, logits_KV: Tensor, classes: Sequence[int]) -> list[Tensor]:
    """Return different rows for the criterion, some of which have the same target: it may join just those.

    Those lie between two of the probed rows, and nearer to 0, so that they differ even in a batch of one token. The
    last rows have each of `classes` as target, because a criterion may count its padding.
    """
    nearer_1 = torch.linspace(0.9, 0.5, PROBE_ROWS - 1, device=logits_KV.device).to(logits_KV).unsqueeze(1)
    between_KV = (logits_KV[1:] + logits_KV[:-1]) / 2 * nearer_1
    class_M = torch.tensor(classes, dtype=trial.target_K.dtype, device=logits_KV.device)
    row_M = torch.arange(len(classes), device=logits_KV.device) % len(logits_KV)
    targets_K = [trial.target_K, trial.target_K[:1].expand(len(between_KV)), class_M]
    others = [torch.cat([t, t[: len(between_KV)], t[row_M]]) for t in trial.of_criterion.values()]
    return [torch.cat([logits_KV, between_KV, _likely_rows(logits_KV[row_M], class_M)]), torch.cat(targets_K), *others]


def usual_targets(trial: Trial, logits_KV: Tensor, common: set[int]) -> list[int]:
    """Return the targets in the vocabulary that may be padding: the first, the rows' own and the common ones.

    The one that the criterion says it ignores is left out, because rows with it are not computed.
    """
    seen = {*trial.target_K.tolist(), *common}
    # Scores may be wider than the vocabulary, as those of two dropout masks side by side
    usual = {*range(min(4, max(seen) + 1)), *seen} - {ignored_target(trial.head["criterion"])}
    return [target for target in sorted(usual) if 0 <= target < logits_KV.size(1)]


def _likely_rows(logits_MV: Tensor, class_M: Tensor) -> Tensor:
    """Return rows in which each target has the lowest score instead of its own, so that it has a loss.

    The two scores are swapped, so that a row of probabilities remains one.
    """
    class_M1 = class_M.long().unsqueeze(1)
    lowest_M1 = logits_MV.where(logits_MV.isfinite(), torch.inf).argmin(1, keepdim=True)
    swapped_MV = logits_MV.scatter(1, class_M1, logits_MV.gather(1, lowest_M1))
    return swapped_MV.scatter_(1, lowest_M1, logits_MV.gather(1, class_M1))


def ask_about_padding(trial: Trial, logits_KV: Tensor, common: set[int]) -> None:
    """Raise ValueError unless the criterion ignores the target that it says it does, and no other common one."""
    rows = [logits_KV, trial.target_K, *trial.of_criterion.values()]
    criterion, (logits_KV, *_) = _widen(trial.copy()["criterion"], rows, trial.of_criterion)
    named = ignored_target(criterion)

    def answer(class_M: Tensor) -> Answer:
        """Return loss and gradient of one row for each target, which has the lowest score in it."""
        row_M = torch.arange(len(class_M), device=class_M.device) % len(logits_KV)
        own = {name: t[row_M] for name, t in trial.of_criterion.items()}
        swapped_MV = _likely_rows(logits_KV[row_M], class_M)
        with torch.set_grad_enabled(trial.wanted), graph_of_its_own():
            return ask(
                lambda rows: criterion_loss(criterion, rows[0], class_M, own).total.sum(),
                [swapped_MV.requires_grad_(trial.wanted)],
            )

    def is_ignored(target: int) -> bool | None:
        """Return whether loss and gradient are 0; None if the loss is not finite."""
        values, gradients, _ = answer(torch.full_like(trial.target_K, target))
        if not values.isfinite():
            return None
        return not any(t.any() for t in (values, *gradients))

    if named is not None and 0 <= named < logits_KV.size(1) and is_ignored(named) is False:
        raise ValueError(
            f"the criterion's ignore_index is {named}, but its loss of target {named} is not 0; rows with that "
            "target are left out, so set the attribute to the target that it ignores, or to -100"
        )
    ignored: dict[int, bool | None] = dict.fromkeys(usual_targets(trial, logits_KV, common))
    class_M = torch.tensor([*ignored], dtype=torch.int64, device=trial.target_K.device)
    # All of them in one call first: a row with a gradient is not ignored
    for grad in answer(class_M).gradients if ignored else ():
        has_gradient_M = grad.isfinite().all(1) & grad.any(1)
        ignored.update(dict.fromkeys(class_M[has_gradient_M].tolist(), False))
    ignored.update({target: is_ignored(target) for target, is_so in ignored.items() if is_so is None})
    # If no target has a loss, none of them is padding
    silent = [target for target, is_so in ignored.items() if is_so and False in ignored.values()]
    silent = [target for target in silent if not _counts_none(trial, criterion, logits_KV, target)]
    if silent:
        says = "has no ignore_index"
        if named is not None:
            says = f"its ignore_index is {named}"
        raise ValueError(
            f"the criterion ignores target {silent[0]} but {says}: its loss and gradient are 0, and its rows would be "
            f"counted as tokens; set criterion.ignore_index = {silent[0]}"
        )


def ask_about_counts(trial: Trial, logits_KV: Tensor) -> None:
    """Raise ValueError unless what a criterion's `token_loss` returns adds up, and is the loss of its `forward`.

    One that does not take these rows cannot be tested, nor can one whose numbers are random.
    """
    criterion = trial.copy()["criterion"]
    if not counts_itself(criterion):
        return
    # Each row twice, because a count of different targets, for example, does not add up
    rows = [torch.cat([t, t]) for t in (logits_KV, trial.target_K, *trial.of_criterion.values())]

    def loss(some: slice = slice(None)) -> TokenLoss:
        return _loss_of_rows(criterion, [t[some] for t in rows], trial.of_criterion)

    try:
        whole, again = loss(), loss()
        parts = [loss(slice(row, row + 1)) for row in range(len(rows[0]))]
    except Exception:
        return
    rounding = precision_of(whole.total, product_dtype(logits_KV)).rounding
    if largest_difference(whole.total, again.total) > rounding:
        return
    for name in ("tokens", "nll", "correct"):
        together, alone = getattr(whole, name), [getattr(part, name) for part in parts]
        if together is not None and largest_difference(together, torch.stack(alone).sum(0)) > rounding:
            raise ValueError(
                f"the criterion's token_loss returns {name} {float(together):g} for {len(parts)} rows, and "
                f"{float(sum(alone)):g} as the sum over each of them alone; each of its numbers must be a sum over rows"
            )
    total = whole.total
    # Some criteria have no forward
    with contextlib.suppress(Exception):
        scores_MV, target_M, *columns = rows
        total = criterion(scores_MV, target_M, **dict(zip(trial.of_criterion, columns, strict=True)))
    # The forward of others returns the mean
    if all(largest_difference(total, each) > rounding for each in (whole.total, whole.total / whole.tokens)):
        raise ValueError(
            f"the criterion's token_loss gives {float(whole.total):g} for {len(parts)} rows and its forward "
            f"{float(total):g}; both must be the same loss, of which token_loss counts the tokens besides"
        )


def _counts_none(trial: Trial, criterion: nn.Module, logits_KV: Tensor, target: int) -> bool:
    """Return whether the criterion itself counts no tokens with this target."""
    loss = criterion_loss(criterion, logits_KV, torch.full_like(trial.target_K, target), trial.of_criterion)
    return not loss.tokens


def _companies(own: int, place_K: Tensor, logits_KV: Tensor) -> list[Tensor]:
    """Return two sets of rows to test together: the first `own` ones, once each, and those at `place_K`, many times.

    In the first set no quantile is a row's own value; the second is large enough for a small share of it to be a row.
    """
    many = min(MOST_COMPANY, max(2 * len(place_K), COMPANY_BYTES // (4 * logits_KV.size(1))))
    return [torch.arange(own, device=place_K.device), place_K[torch.arange(many, device=place_K.device) % len(place_K)]]


def _loss_of_rows(criterion: nn.Module, rows: Sequence[Tensor], names: Iterable[str]) -> TokenLoss:
    """Return the criterion's loss of scores, targets, and its keywords of these names."""
    logits_KV, target_K, *extra = rows
    return criterion_loss(criterion, logits_KV, target_K, dict(zip(names, extra, strict=True)))


def _widen(criterion: nn.Module, rows: list[Tensor], names: Iterable[str]) -> tuple[nn.Module, list[Tensor]]:
    """Return the criterion and its rows in float32 if they are narrower, provided that it takes that.

    In float32, rounding is far below what a criterion may do to rows.
    """
    if rows[0].dtype.itemsize >= 4:
        return criterion, rows
    wide = [rows[0].float(), *rows[1:]]
    copy = in_float32(criterion)
    # A tensor that is neither a parameter nor a buffer keeps its dtype
    with contextlib.suppress(Exception):
        _loss_of_rows(copy, wide, names)
        return copy, wide
    return criterion, rows


def _not_a_sum(together: Answer, alone: Answer, company: Tensor, change: Change) -> str:
    """Return, in words, what is wrong with a criterion that gives something else for rows in company."""
    size = len(company)
    separately = alone.values[company].sum()
    # The most likely mistake has a message of its own
    if largest_difference(together.values * size, separately) <= together.precision.rounding:
        wrong = "so it takes a mean; the criterion must sum (reduction='sum'): divide once, by the tokens of the step"
    elif change.value <= change.rounding:
        wrong = f"but {change}, so it does not add up; it must return a sum of one term per row; {BESIDE}"
    else:
        wrong = (
            f"so it does not add up; it must return a sum of one term per row that depends on that row alone; {BESIDE}"
        )
    return (
        f"the criterion gives {float(together.values):.6g} for {size} rows and {float(separately):.6g} as the sum over "
        f"each of them alone, {wrong}"
    )
