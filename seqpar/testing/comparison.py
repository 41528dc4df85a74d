"""Compare a loss with the plain one on some tokens: in this process, in every rank, or in new processes."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_integer
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import gather_objects, group_sum, rank_in, world_size
from seqpar.engine.pair import counts_itself
from seqpar.rows.conventions import Convention
from seqpar.rows.criteria import LabelSmoothing, ignored_target
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import FACTOR, Evidence, Result, gradients_by_use, repeat_loss
from seqpar.testing.gradients import (
    RTOL,
    first_difference,
    hypothesis_context,
    imagine,
    plain_loss,
    proving,
    refuse_no_gradients,
    under,
    value_and_gradients,
)
from seqpar.testing.imagined import Mistake, shifts, with_criterion
from seqpar.testing.precision import DRAWS, as_float64, farther_than_twice_plain, in_dtype
from seqpar.testing.ranks import ranks as run_in_ranks
from seqpar.testing.ranks import unequal_cuts

__tracebackhide__ = True  # pytest shows the call that failed, and the sentence
Loss = Callable[..., Tensor | TokenLoss]
"""`loss(generator, criterion, hidden, target, **per_token)`."""
SMALLER_TRIES = 40
"""How many smaller inputs are tried in the search for the smallest failure."""
MISCOUNTED = "the loss counts"
SHOWN = 12
"""The largest number of targets that a message shows."""
NONE: AbstractContextManager[None] = nullcontext()


_Tokens = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""One rank's hidden, target, and further tensors by name."""


class _Leaves(NamedTuple):
    """What a loss is computed from."""

    head: nn.ModuleDict
    hidden: Tensor
    extra: dict[str, Tensor]

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        """Return generator and criterion."""
        return self.head["generator"], self.head["criterion"]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors whose gradients are compared, by name."""
        extra = {name: t for name, t in self.extra.items() if t.requires_grad}
        return {"hidden": self.hidden, **extra, **{n: p for key in self.head for n, p in _name(self.head, key)}}


class _Compared(NamedTuple):
    """The loss under test and the plain one."""

    got: Result
    expected: Result
    eighth: Result
    plain_eighth: Result
    off: str
    """The first difference; empty if there is none."""
    truth: Comparison
    """The comparison that the plain loss was computed from."""
    true: _Leaves
    """Its leaves."""
    whole: Sequence[_Tokens]
    """The tokens of all ranks."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of a loss with the plain one on some tokens."""

    head: nn.ModuleDict
    loss: Loss
    hidden: Tensor
    target: Tensor
    per_token: dict[str, Tensor]
    tokens: float
    group: ProcessGroup | None
    rtol: float
    own: bool
    """Whether the loss is the caller's own, and not seqpar's engine."""
    layout: str
    """The engine's arguments, as written in a call."""
    ranks: int | None = None
    """The number of processes to divide the tokens among; None computes the loss in this one."""

    def failure(self, with_cause: bool) -> str:
        """Return what differs, after its likely cause if that is wanted; empty if nothing does."""
        if self.ranks is not None:
            return self._failure_over_ranks(self.ranks, with_cause)
        compared = self._compare()
        if not compared.off or not with_cause:
            return compared.off
        if compared.off.startswith(MISCOUNTED):
            return f"Likely cause: tokens are counted otherwise than by ignore_index: .mean is wrong\n{compared.off}"
        # The cause first, because pytest's summary has only one line
        return f"{likely_cause(self._evidence(compared))}\n{compared.off}"

    def _failure_over_ranks(self, world: int, with_cause: bool) -> str:
        """Return what the first rank in which something differs says."""
        self._check_ranks(world)
        said = run_in_ranks(world, _failure_of_a_rank, self.parts(world), with_cause)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")

    def _compare(self) -> _Compared:
        """Return the loss under test and the plain one, both as they are and times 1/8, and the first difference."""
        truth = self._truth()
        leaves, true = self._leaves(self.head), truth._leaves(truth.head)
        whole = gather_objects((truth.hidden, truth.target, truth.per_token), self.group)

        counts: list[float] = []

        def candidate() -> Tensor:
            returned = self.loss(*leaves.modules, leaves.hidden, self.target, **leaves.extra)
            if isinstance(returned, TokenLoss):
                counts.append(float(returned.tokens))
            return self._scale(returned)

        plain = partial(truth._plain, true, whole)
        # Before the loss under test, which may leave hooks on the parameters
        expected = value_and_gradients(plain, true.tensors)
        plain_eighth = value_and_gradients(lambda: plain() * FACTOR, true.tensors)
        with proving():
            got = self._reduce(candidate, leaves.tensors)
        refuse_no_gradients(got, expected, true.tensors)
        eighth = self._reduce(lambda: candidate() * FACTOR, leaves.tensors)
        off = self._difference(got, expected, whole, 1)
        if not off and (off := self._difference(eighth, plain_eighth, whole, FACTOR)):
            off += f", where both losses are multiplied by {FACTOR}"
        off = off or self._miscounted(counts)
        if truth is not self:
            got, eighth = as_float64(got), as_float64(eighth)
        return _Compared(got, expected, eighth, plain_eighth, off, truth, true, whole)

    def _miscounted(self, counts: Sequence[float]) -> str:
        """Say if a `TokenLoss` does not count exactly the tokens that are not ignored; return "" if it does.

        With per-token tensors, or a criterion that does its own counting, a different count may be intended.
        """
        right = self._count(self.target)
        if self.per_token or counts_itself(self.head["criterion"]) or all(found == right for found in counts):
            return ""
        return f"{MISCOUNTED} {counts[0]:g} where {right} of {self.target.numel()} targets are not ignored"

    def _difference(self, got: Result, expected: Result, whole: Sequence[_Tokens], factor: float) -> str:
        """Return the first number that is too far from the plain one; empty if none is."""
        if self.hidden.dtype == torch.float64:
            return first_difference(got, expected, self.rtol)
        plain = [self._plain_draw(whole, factor, by) for by in range(DRAWS)]
        return farther_than_twice_plain(as_float64(got), plain, expected)

    def _evidence(self, compared: _Compared) -> Evidence:
        """Return the numbers that the cause is inferred from."""
        truth, whole = compared.truth, compared.whole
        plain = partial(truth._plain, compared.true, whole)
        criterion = truth.head["criterion"]
        ignored = ignored_target(criterion)
        own = getattr(criterion, "label_smoothing", None)

        def smoothed_loss(convention: Convention, eps: float) -> Result:
            other = LabelSmoothing(eps, convention, ignore_index=-100 if ignored is None else ignored)
            return truth._imagine(whole, partial(with_criterion, other=other))

        return Evidence(
            compared.got,
            compared.expected,
            compared.eighth,
            compared.plain_eighth,
            uses=gradients_by_use(plain, compared.true.tensors),
            per_token=frozenset({"hidden"}),
            tokens=self._count(self.target),
            rows=self.target.numel(),
            ignored=self._is_ignored(self.target).flatten(),
            divisor=self.tokens,
            rank=rank_in(self.group),
            counts=[(self._count(target), target.numel()) for _, target, _ in whole],
            again=repeat_loss(plain, dict(truth.head.items())),
            imagined=[
                *imagine(partial(truth._imagine, whole, plain_loss)),
                *((said, partial(truth._imagine, whole, mistake)) for said, mistake in shifts()),
            ],
            smoothed=smoothed_loss,
            smoothing=None if own is None else (getattr(criterion, "smoothing_convention", "torch"), float(own)),
            dtype=torch.float64 if truth is self else torch.float32,
        )

    def _truth(self) -> Comparison:
        """Return what the plain loss is computed from: this comparison if it is float64, else float64 CPU copies."""
        if self.hidden.dtype == torch.float64:
            return self
        extra = {name: t.cpu().double() if t.is_floating_point() else t.cpu() for name, t in self.per_token.items()}
        head = in_dtype(copy.deepcopy(self.head).cpu(), torch.float64)
        return replace(self, head=head, hidden=self.hidden.cpu().double(), target=self.target.cpu(), per_token=extra)

    def _plain_draw(self, whole: Sequence[_Tokens], factor: float, by: int) -> Result:
        """Return the plain loss times a factor in the dtype under test.

        Its rows are moved on by so many places, so that sums round differently in each draw.
        """
        rolled = replace(
            self,
            hidden=self.hidden.roll(by, 0),
            target=self.target.roll(by, 0),
            per_token={name: t.roll(by, 0) for name, t in self.per_token.items()},
        )
        leaves = rolled._leaves(self.head)
        here = [
            (h.to(self.hidden), t.to(self.target), {name: x.to(self.per_token[name]) for name, x in extra.items()})
            for h, t, extra in whole
        ]
        value, gradients = value_and_gradients(lambda: rolled._plain(leaves, here) * factor, leaves.tensors)
        of_tokens = {"hidden", *self.per_token}
        return value, {n: g.roll(-by, 0) if n in of_tokens and g is not None else g for n, g in gradients.items()}

    def _leaves(self, head: nn.ModuleDict) -> _Leaves:
        """Return new leaves, so that no gradient of an earlier comparison is left in them."""
        extra = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in self.per_token.items()}
        return _Leaves(head, self.hidden.detach().requires_grad_(), extra)

    def _plain(self, leaves: _Leaves, whole: Sequence[_Tokens], mistake: Mistake = plain_loss) -> Tensor:
        """Return the plain loss of the tokens of all ranks, optionally with a mistake in it."""
        inputs = [*whole]
        # This rank's own leaves, to be differentiated, in the position of their copies
        inputs[rank_in(self.group)] = leaves.hidden, self.target, leaves.extra
        losses = [mistake(*leaves.modules, hidden, target, **extra) for hidden, target, extra in inputs]
        return torch.stack(losses).sum() / self.tokens

    def _imagine(self, whole: Sequence[_Tokens], mistake: Mistake, mode: AbstractContextManager[Any] = NONE) -> Result:
        """Return the plain loss and its gradients with a mistake, computed under a mode.

        They are computed on a copy: a hook that the loss under test left on a parameter may wait for the other ranks.
        """
        leaves = self._leaves(copy.deepcopy(self.head))
        return under(partial(self._plain, leaves, whole, mistake), leaves.tensors, mode)

    def _check_ranks(self, world: int) -> None:
        """Raise ValueError or TypeError if `world` ranks would show nothing, or cannot be sent this comparison."""
        check_integer(world, "ranks", at_least=2)
        if len(self.target) < world:
            raise ValueError(
                f"target has shape {tuple(self.target.shape)} and ranks is {world}; its first dimension is divided "
                "among the ranks, so it must be at least as long"
            )
        counts = {part._count(part.target) for part in self.parts(world)}
        if len(counts) == 1:
            raise ValueError(
                f"each of {world} ranks has {counts.pop()} tokens that count, and with equal counts a mean of means is "
                "right; give more rows, or ignore some targets; `seqpar.testing.strategies` "
                f"draw such inputs with ranks={world}"
            )
        try:
            pickle.dumps(self)
        except Exception as error:
            # pickle may raise an error of almost any class for objects that it cannot find by name
            raise TypeError(
                f"the generator, the criterion or the loss cannot be sent to the ranks ({error}); define it "
                "at the top level of a module"
            ) from error

    def parts(self, world: int) -> list[Comparison]:
        """Return each rank's part."""
        return [
            self._rows(slice(*ends), ranks=None) for ends in itertools.pairwise(unequal_cuts(len(self.target), world))
        ]

    def _rows(self, *at: slice, **changed: Any) -> Comparison:
        """Return the comparison on a part of the tokens."""
        extra = {name: t[at] for name, t in self.per_token.items()}
        return replace(self, hidden=self.hidden[at], target=self.target[at], per_token=extra, **changed)

    def _scale(self, loss: Tensor | TokenLoss) -> Tensor:
        """Return the tensor to call `backward()` on: a `TokenLoss` as total x ranks / tokens, as DDP takes the mean."""
        if isinstance(loss, TokenLoss):
            return loss.total * world_size(self.group) / self.tokens
        return loss

    def _reduce(self, loss: Callable[[], Tensor], tensors: dict[str, Tensor]) -> Result:
        """Return value and gradients of the whole step: the mean over the ranks, as DDP takes it.

        Per-token tensors belong to one rank, so their gradients are divided by the number of ranks without a sum.
        """
        value, gradients = value_and_gradients(loss, tensors)
        world = world_size(self.group)
        if world == 1:
            return value, gradients
        averaged: dict[str, Tensor | None] = {}
        for name, tensor in tensors.items():
            gradient = gradients[name]
            if gradient is None:
                gradient = torch.zeros_like(tensor)
            if name != "hidden" and name not in self.per_token:
                gradient = group_sum(gradient, self.group)
            # d (mean over the ranks) / d a tensor of this rank alone is 1 / world of its own gradient
            averaged[name] = gradient / world
        return group_sum(value, self.group) / world, averaged

    def _is_ignored(self, target: Tensor) -> Tensor:
        """Return which targets the criterion ignores."""
        ignored = ignored_target(self.head["criterion"])
        if ignored is None:
            return torch.zeros_like(target, dtype=torch.bool)
        return target == ignored

    def _count(self, target: Tensor) -> int:
        """Return the number of targets that are not ignored."""
        return int((~self._is_ignored(target)).sum())

    def smallest_failure(self) -> str:
        """Return the smallest subset of the inputs that also fails, in words.

        Return "" if run in several ranks, or if hypothesis itself looks for a smaller failure.
        """
        if world_size(self.group) > 1 or hypothesis_context() is not None:
            return ""
        for smaller in self._subsets():
            # A loss that raises an error for so few tokens has a different problem
            with suppress(Exception):
                # A loss may divide by the part's number of tokens or the step's: it fails only if it is wrong with both
                if not all(part.failure(False) for part in (smaller, replace(smaller, tokens=self.tokens))):
                    continue
                shape = tuple(smaller.hidden.shape)
                return f"\nSmallest part of these inputs that fails: hidden {shape}, {smaller._call(self)}"
        return ""

    def _call(self, whole: Comparison) -> str:
        """Return the target, and the call that compares this part of the whole inputs."""
        shown = f"target {tuple(self.target.shape)}"
        if self.target.numel() <= SHOWN:
            shown = f"target {self.target.tolist()}"
        part = ", ".join(f":{n}" for n in self.target.shape)
        given = [f"{name}[{part}]" for name in ("hidden", "target")]
        if whole.own:
            given.append("loss=loss")
        if self.tokens != 1:
            given.append(f"tokens={self.tokens:g}")
        if self.ranks is not None:
            given.append(f"ranks={self.ranks}")
        if self.rtol != RTOL:
            given.append(f"rtol={self.rtol:g}")
        given += [f"{name}={name}[{part}]" for name in self.per_token]
        return f"{shown}\n    assert_same_loss(generator, criterion, {', '.join(given)}{whole.layout})"

    def _subsets(self) -> Iterator[Comparison]:
        """Yield the comparison on the first sentences and time steps, fewest tokens first, and on all of them last."""
        sizes = self.target.shape
        # Every (b, t) from (1, 1) to (B, T): the first b sentences and t time steps
        corners = torch.cartesian_prod(*(torch.arange(1, n + 1) for n in sizes)).reshape(-1, len(sizes)).tolist()
        for corner in [*sorted(corners, key=math.prod)[:SMALLER_TRIES], list(sizes)]:
            part = self._rows(*(slice(n) for n in corner))
            # A part has fewer tokens than the step
            if self.tokens != 1 and corner != list(sizes):
                part = replace(part, tokens=max(1, part._count(part.target)))
            yield part


def _name(head: nn.ModuleDict, key: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of one of the two modules, with names that say which module."""
    return ((f"{key}.{name}", parameter) for name, parameter in head[key].named_parameters())


def _failure_of_a_rank(rank: int, world: int, parts: Sequence[Comparison], with_cause: bool) -> str:
    """Return what differs in one rank of the default group."""
    return replace(parts[rank], group=dist.group.WORLD).failure(with_cause)
