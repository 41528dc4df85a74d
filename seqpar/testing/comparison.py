"""The comparison of a loss with the plain one on some tokens: in this process, in every rank, or in new ones."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from seqpar.rows.criteria import ignored_target
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import FACTOR, Evidence, Result, gradients_by_use, repeated
from seqpar.testing.gradients import (
    NO_SOFTCAP_DERIVATIVE,
    assert_same_results,
    first_line,
    plain_loss,
    proving,
    refuse_no_gradients,
    value_and_gradients,
    with_straight_tanh,
)
from seqpar.testing.imagined import Mistake, mistakes
from seqpar.testing.precision import DRAWS, as_float64, farther_than_twice_plain
from seqpar.testing.ranks import ranks as run_in_ranks

Loss = Callable[..., Tensor | TokenLoss]
"""`loss(generator, criterion, hidden, target, **per_token)`."""
SMALLER_TRIES = 40
"""How many smaller inputs are tried in search of the smallest failure."""
SHOWN = 12
"""The largest number of targets that a message shows."""


_Tokens = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Hidden, target, and further tensors by name, of one rank."""


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
        """Return what gradients are compared of, by name."""
        extra = {name: t for name, t in self.extra.items() if t.requires_grad}
        return {"hidden": self.hidden, **extra, **{n: p for key in self.head for n, p in _named(self.head, key)}}


@dataclass(frozen=True)
class Comparison:
    """The comparison of a loss with the plain one, on some tokens."""

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
    """The engine's arguments, as in a call."""
    ranks: int | None = None
    """The number of processes that the tokens are to be divided among; None computes the loss in this one."""

    def failure(self) -> str:
        """Return what differs, and the likely cause; empty if nothing does."""
        if self.ranks is not None:
            self._check_ranks(self.ranks)
            said = run_in_ranks(self.ranks, _failure_of_a_rank, self.parts(self.ranks))
            return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")
        truth = self._truth()
        leaves, true = self._leaves(self.head), truth._leaves(truth.head)
        whole = gather_objects((truth.hidden, truth.target, truth.per_token), self.group)

        def candidate() -> Tensor:
            return self._scaled(self.loss(*leaves.modules, leaves.hidden, self.target, **leaves.extra))

        plain = partial(truth._plain, true, whole)
        expected = value_and_gradients(plain, true.tensors)
        with proving():
            got = self._reduced(candidate, leaves.tensors)
        refuse_no_gradients(got, expected, true.tensors)
        eighth = self._reduced(lambda: candidate() * FACTOR, leaves.tensors)
        if truth is self:
            off = self._not_exact(got, expected) or self._not_exact(eighth, _times(expected, FACTOR))
        else:
            got, eighth, own = as_float64(got), as_float64(eighth), self._plainly(whole)
            once = _times(eighth, 1 / FACTOR)
            off = farther_than_twice_plain(got, own, expected) or farther_than_twice_plain(once, own, expected)
        if not off:
            return ""
        uses, again = gradients_by_use(plain, true.tensors), repeated(plain)
        named = [("", plain_loss), *mistakes(true.modules[1])]
        imagined = [(sentence, partial(truth._mistaken, whole, mistake)) for sentence, mistake in named]
        imagined.append((NO_SOFTCAP_DERIVATIVE, partial(truth._mistaken, whole, plain_loss, with_straight_tanh)))
        evidence = Evidence(
            got,
            expected,
            eighth,
            uses,
            per_token=frozenset({"hidden"}),
            tokens=self._counted(self.target),
            rows=self.target.numel(),
            divisor=self.tokens,
            world=world_size(self.group),
            again=again,
            imagined=imagined,
            is_float64=truth is self,
        )
        # The cause first, because pytest's summary has only one line
        return f"{likely_cause(evidence)}\n{off}"

    def _truth(self) -> Comparison:
        """Return what the plain loss is computed from: the same, or copies on the CPU if the device has no float64."""
        if self.hidden.dtype == torch.float64:
            return self
        extra = {name: t.cpu().double() if t.is_floating_point() else t.cpu() for name, t in self.per_token.items()}
        head = in_dtype(copy.deepcopy(self.head).cpu(), torch.float64)
        return replace(self, head=head, hidden=self.hidden.cpu().double(), target=self.target.cpu(), per_token=extra)

    def _not_exact(self, got: Result, expected: Result) -> str:
        """Return the first number that differs by more than `rtol`; empty if none does."""
        try:
            assert_same_results(got, expected, self.rtol)
        except AssertionError as error:
            return first_line(error)
        return ""

    def _plainly(self, whole: Sequence[_Tokens]) -> list[Result]:
        """Return the plain loss in the dtype under test, with its rows in some orders, so that sums round otherwise."""
        drawn: list[Result] = []
        for by in range(DRAWS):
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
            value, gradients = value_and_gradients(partial(rolled._plain, leaves, here), leaves.tensors)
            of_tokens = {"hidden", *self.per_token}
            back = {n: g.roll(-by, 0) if n in of_tokens and g is not None else g for n, g in gradients.items()}
            drawn.append((value, back))
        return drawn

    def _leaves(self, head: nn.ModuleDict) -> _Leaves:
        """Return new leaves, so that no gradient of an earlier comparison is left in them."""
        extra = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in self.per_token.items()}
        return _Leaves(head, self.hidden.detach().requires_grad_(), extra)

    def _plain(self, leaves: _Leaves, whole: Sequence[_Tokens], mistake: Mistake = plain_loss) -> Tensor:
        """Return the plain loss of the tokens of all ranks, or that with a mistake in it."""
        inputs = [*whole]
        # This rank's own leaves, to be differentiated, in the position of their copies
        inputs[rank_in(self.group)] = leaves.hidden, self.target, leaves.extra
        losses = [mistake(*leaves.modules, hidden, target, **extra) for hidden, target, extra in inputs]
        return torch.stack(losses).sum() / self.tokens

    def _mistaken(
        self,
        whole: Sequence[_Tokens],
        mistake: Mistake,
        differentiated: Callable[..., Result] = value_and_gradients,
    ) -> Result:
        """Return the plain loss and its gradients with a mistake.

        Those of a copy, because a hook that the loss under test has left on a parameter may wait for the other ranks.
        """
        leaves = self._leaves(copy.deepcopy(self.head))
        return differentiated(partial(self._plain, leaves, whole, mistake), leaves.tensors)

    def _check_ranks(self, world: int) -> None:
        """Raise ValueError or TypeError where so many ranks would show nothing, or cannot be given this comparison."""
        check_integer(world, "ranks", at_least=2)
        if len(self.target) < world:
            raise ValueError(
                f"target has shape {tuple(self.target.shape)} and ranks is {world}; its first dimension is divided "
                "among the ranks, so it must be at least as long"
            )
        counts = {part._counted(part.target) for part in self.parts(world)}
        if len(counts) == 1:
            raise ValueError(
                f"each of {world} ranks has {counts.pop()} tokens that count, and with equal counts a mean of means is "
                "right; give more rows, or ignore some targets"
            )
        try:
            pickle.dumps(self)
        except Exception as error:
            # pickle raises an error of almost any class for what it cannot find by name
            raise TypeError(
                f"the generator, the criterion or the loss cannot be sent to the ranks ({error}); define it "
                "at the top level of a module"
            ) from error

    def parts(self, world: int) -> list[Comparison]:
        """Return each rank's part: of n rows every rank has one, and of the others rank r has a share of r."""
        rest = len(self.target) - world
        cuts = [rank + rest * rank * (rank - 1) // (world * (world - 1)) for rank in range(world + 1)]
        return [self._rows(slice(*ends), ranks=None) for ends in itertools.pairwise(cuts)]

    def _rows(self, *at: slice, **changed: Any) -> Comparison:
        """Return the comparison on a part of the tokens."""
        extra = {name: t[at] for name, t in self.per_token.items()}
        return replace(self, hidden=self.hidden[at], target=self.target[at], per_token=extra, **changed)

    def _scaled(self, loss: Tensor | TokenLoss) -> Tensor:
        """Return the tensor to call `backward()` on: the sum over the tokens of a step, times the ranks of its mean."""
        if isinstance(loss, TokenLoss):
            return loss.total * world_size(self.group) / self.tokens
        return loss

    def _reduced(self, loss: Callable[[], Tensor], tensors: dict[str, Tensor]) -> Result:
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

    def _counted(self, target: Tensor) -> int:
        """Return the number of targets that are not ignored."""
        ignored = ignored_target(self.head["criterion"])
        if ignored is None:
            return target.numel()
        return int((target != ignored).sum())

    def smallest_failure(self) -> str:
        """Return the smallest subset of the inputs that fails as well, in words; nothing inside of several ranks."""
        if world_size(self.group) > 1:
            return ""
        for smaller in self._subsets():
            # A loss that raises an error for so few tokens has a problem of its own with them
            with suppress(Exception):
                # One that divides by a number of its own, the part's or the step's, is right with that one
                if not (smaller.failure() and replace(smaller, tokens=self.tokens).failure()):
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
        given += [f"{name}={name}[{part}]" for name in self.per_token]
        return f"{shown}\n    assert_same_loss(generator, criterion, {', '.join(given)}{whole.layout})"

    def _subsets(self) -> Iterator[Comparison]:
        """Yield the comparison on the first sentences and time steps, fewest tokens first, and on all of them last."""
        sizes = self.target.shape
        # Every (b, t) from (1, 1) to (B, T): the first b sentences and t time steps
        corners = torch.cartesian_prod(*(torch.arange(1, n + 1) for n in sizes)).reshape(-1, len(sizes)).tolist()
        for corner in [*sorted(corners, key=math.prod)[:SMALLER_TRIES], list(sizes)]:
            part = self._rows(*(slice(n) for n in corner))
            # The step's number of tokens is not that of a part of it
            if self.tokens != 1 and corner != list(sizes):
                part = replace(part, tokens=max(1, part._counted(part.target)))
            yield part


def in_dtype(modules: nn.ModuleDict, dtype: torch.dtype) -> nn.ModuleDict:
    """Return the modules, copied if any of their parameters or buffers is of another floating dtype.

    In one container, so that a parameter that both have is still one parameter in the copies.
    """
    floating = (t for t in (*modules.parameters(), *modules.buffers()) if t.is_floating_point())
    if all(t.dtype == dtype for t in floating):
        return modules
    return copy.deepcopy(modules).to(dtype)


def _named(head: nn.ModuleDict, key: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of one of the two modules, under names that say which one."""
    return ((f"{key}.{name}", parameter) for name, parameter in head[key].named_parameters())


def _failure_of_a_rank(rank: int, world: int, parts: Sequence[Comparison]) -> str:
    """Return what differs in a rank of the default group."""
    return replace(parts[rank], group=dist.group.WORLD).failure()


def _times(result: Result, factor: float) -> Result:
    """Return the loss and its gradients times a factor."""
    value, gradients = result
    scaled = dict(gradients)
    for name, gradient in gradients.items():
        if gradient is not None:
            scaled[name] = gradient * factor
    return value * factor, scaled
