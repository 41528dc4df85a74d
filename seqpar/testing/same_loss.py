"""Compare a user's generator, criterion and way to compute their loss with the plain single-device computation."""

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

from seqpar.core.checks import check_dense, check_floating, check_integer, check_integer_target, check_number
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import gather_objects, group_sum, rank_in, world_size
from seqpar.engine.loss_compute import LossCompute
from seqpar.multi_device.devices import Device
from seqpar.rows.criteria import ignored_target
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import FACTOR, Evidence, Result, Uses, gradients_by_use, repeated
from seqpar.testing.gradients import (
    NO_SOFTCAP_DERIVATIVE,
    assert_same_results,
    check_tolerance,
    first_line,
    plain_loss,
    refuse_no_gradients,
    value_and_gradients,
    with_straight_tanh,
)
from seqpar.testing.imagined import Mistake, mistakes
from seqpar.testing.ranks import ranks as run_in_ranks

Loss = Callable[..., Tensor | TokenLoss]
"""`loss(generator, criterion, hidden, target, **per_token)`."""
SMALLER_TRIES = 40
"""How many smaller inputs are tried in search of the smallest failure."""
SHOWN = 12
"""The largest number of targets that a message shows."""


def assert_same_loss(
    generator: nn.Module,
    criterion: nn.Module,
    hidden: Tensor,
    target: Tensor,
    *,
    loss: Loss | None = None,
    devices: Sequence[Device] | None = None,
    chunk_tokens: int | None = None,
    chunk_size: int | None = None,
    tokens: float = 1,
    group: ProcessGroup | None = None,
    ranks: int | None = None,
    rtol: float = 1e-12,
    **per_token: Tensor,
) -> None:
    """Assert that a loss and its gradients equal those of the plain single-device computation, in float64.

    Plain equivalent: `criterion(generator(hidden).flatten(0, -2), target.flatten()) / tokens` on the tokens of all
    ranks at once, and its gradients by autograd. The loss is compared as it is and times 1/8, because a factor on the
    loss must reach every gradient.

        assert_same_loss(my_generator, my_criterion, hidden, target, devices=["cuda:0", "cuda:1"], chunk_size=5)
        assert_same_loss(my_generator, my_criterion, hidden, target, loss=my_training_loss)
        assert_same_loss(my_generator, my_criterion, hidden, target, loss=my_training_loss, ranks=2, tokens=count)

    Args:
        generator, criterion: as `seqpar.LossCompute`. If either is not float64, float64 copies of both are used. In
            training mode dropout would draw other numbers in every call: call `.eval()` before.
        hidden: `(N, D)` or `(B, T, D)`; a float64 leaf is made of it.
        target: hidden's leading shape.
        loss: the function under test, `loss(generator, criterion, hidden, target, **per_token)`. It returns the tensor
            that `backward()` is called on, or a `TokenLoss`, whose total is divided by `tokens` (and multiplied by the
            world size). It must use the modules that it is given. None is seqpar's engine, with `devices`,
            `chunk_tokens` and `chunk_size` as for `LossCompute`.
        tokens: the number that the step's sum is divided by; 1 leaves the sum as it is.
        group: the ranks among which the step is divided; each of them calls this with its own hidden and target, and
            gradients of parameters are averaged over them, as DDP does.
        ranks: call it once, outside of any group, and the first dimension of these tensors is divided among so many new
            processes over gloo (`seqpar.testing.ranks`), unequally: the loss is computed in each of them on its own
            part, and `torch.distributed`'s default group is theirs. Modules and loss must be picklable, so the loss
            is a function at the top level of a module.
        rtol: as `assert_same_gradients`.
        per_token: further tensors for the generator, whose first dimensions are target's; floating ones are
            differentiated.

    Raises:
        AssertionError: on every rank; the message says what differs and by how much, the likely cause, and the smallest
            subset of these inputs that fails as well.
        ValueError: `loss` together with arguments of seqpar's engine, `ranks` together with `group`, a number out of
            its range, no gradient on either side (`torch.no_grad`), or ranks with equally many tokens.
        TypeError: an argument of a wrong type, or one that cannot be sent to the ranks.
    """
    engine_only = {"devices": devices, "chunk_tokens": chunk_tokens, "chunk_size": chunk_size}
    given = [name for name, value in engine_only.items() if value is not None]
    if loss is not None and given:
        raise ValueError(f"loss= computes the loss by itself, and {', '.join(given)} are for seqpar's engine; pass one")
    if ranks is not None and group is not None:
        raise ValueError("group is for a call in every rank, and ranks for one call outside of them; pass one")
    _check_arguments(generator, criterion, hidden, target, tokens, per_token)
    check_tolerance(rtol)
    head = _in_float64(generator, criterion)
    own = loss is not None
    layout = "".join(f", {name}={engine_only[name]!r}" for name in given)
    if loss is None:
        engine = LossCompute(head["generator"], head["criterion"], devices, chunk_tokens, chunk_size)
        loss = _EnginesLoss(engine)
    floating = {name: t.detach().double() for name, t in per_token.items() if t.is_floating_point()}
    doubled = hidden.detach().double(), target, per_token | floating
    trial = _Trial(head, loss, *doubled, tokens, group, rtol, own, layout, ranks)
    # Gathered, so that all ranks raise the same error instead of waiting for one that did
    failures = {rank: text for rank, text in enumerate(gather_objects(trial.failure(), group)) if text}
    if failures:
        rank, message = next(iter(failures.items()))
        if world_size(group) > 1:
            message = f"rank {rank}: {message}"
        raise AssertionError(f"{message}{trial.smallest_failure()}")


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
class _Trial:
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
        leaves = self._leaves(self.head)
        whole = gather_objects((self.hidden, self.target, self.per_token), self.group)

        def candidate() -> Tensor:
            return self._scaled(self.loss(*leaves.modules, leaves.hidden, self.target, **leaves.extra))

        plain = partial(self._plain, leaves, whole)
        tensors = leaves.tensors
        expected = value_and_gradients(plain, tensors)
        got = self._reduced(candidate, tensors)
        refuse_no_gradients(got, expected, tensors)
        eighth = self._reduced(lambda: candidate() * FACTOR, tensors)
        try:
            assert_same_results(got, expected, self.rtol)
            assert_same_results(eighth, _times(expected, FACTOR), self.rtol)
        except AssertionError as error:
            evidence = self._evidence(got, expected, eighth, gradients_by_use(plain, tensors), repeated(plain))
            named = [("", plain_loss), *mistakes(leaves.modules[1])]
            imagined = [(sentence, partial(self._mistaken, whole, mistake)) for sentence, mistake in named]
            capless = partial(self._mistaken, whole, plain_loss, with_straight_tanh)
            cause = likely_cause(replace(evidence, imagined=[*imagined, (NO_SOFTCAP_DERIVATIVE, capless)]))
            # The cause first, because pytest's summary has only one line
            return f"{cause}\n{first_line(error)}"
        return ""

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

    def parts(self, world: int) -> list[_Trial]:
        """Return each rank's part: of n rows every rank has one, and of the others rank r has a share of r."""
        rest = len(self.target) - world
        cuts = [rank + rest * rank * (rank - 1) // (world * (world - 1)) for rank in range(world + 1)]
        return [self._rows(slice(*ends), ranks=None) for ends in itertools.pairwise(cuts)]

    def _rows(self, *at: slice, **changed: Any) -> _Trial:
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

    def _evidence(self, got: Result, expected: Result, eighth: Result, uses: Uses, again: Sequence[float]) -> Evidence:
        """Return the numbers from which `likely_cause` infers the cause."""
        counts = self._counted(self.target), self.target.numel(), self.tokens, world_size(self.group)
        return Evidence(got, expected, eighth, uses, frozenset({"hidden"}), *counts, again)

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

    def _call(self, whole: _Trial) -> str:
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

    def _subsets(self) -> Iterator[_Trial]:
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


def _check_arguments(
    generator: object,
    criterion: object,
    hidden: object,
    target: object,
    tokens: object,
    per_token: Mapping[str, object],
) -> None:
    """Raise TypeError or ValueError for an argument that no loss could be computed with."""
    for name, module in (("generator", generator), ("criterion", criterion)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} is a {type(module).__name__}; it must be a torch.nn.Module")
    check_floating(hidden, "hidden")
    check_integer_target(target)
    for name, value in per_token.items():
        check_dense(value, name)
    check_number(tokens, "tokens", above=0)


def _in_float64(generator: nn.Module, criterion: nn.Module) -> nn.ModuleDict:
    """Return both modules, copied if any of their parameters or buffers is of another floating dtype."""
    # In one container, so that a parameter that both have is still one parameter in the copies
    head = nn.ModuleDict({"generator": generator, "criterion": criterion})
    floating = (t for t in (*head.parameters(), *head.buffers()) if t.is_floating_point())
    if all(t.dtype == torch.float64 for t in floating):
        return head
    return copy.deepcopy(head).double()


def _named(head: nn.ModuleDict, key: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of one of the two modules, under names that say which one."""
    return ((f"{key}.{name}", parameter) for name, parameter in head[key].named_parameters())


class _EnginesLoss:
    """The engine as a function that takes its modules as arguments, too; it already has them."""

    def __init__(self, engine: LossCompute) -> None:
        self.engine = engine

    def __call__(self, generator: nn.Module, criterion: nn.Module, *tokens: Tensor, **per_token: Tensor) -> TokenLoss:
        loss: TokenLoss = self.engine(*tokens, **per_token)
        return loss


def _failure_of_a_rank(rank: int, world: int, parts: Sequence[_Trial]) -> str:
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
