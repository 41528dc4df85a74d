"""A user's generator, criterion and way to compute their loss, held against the plain single-device computation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.tensor_checks import check_dense, check_floating, check_integer_target, check_number
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import gather_objects, group_sum, rank_in, world_size
from seqpar.engine.loss_compute import LossCompute
from seqpar.losses.criteria import ignored_target
from seqpar.multi_device.devices import Device
from seqpar.testing.causes import FACTOR, Evidence, Result, gradients_by_use, likely_cause
from seqpar.testing.gradients import (
    assert_same_results,
    check_tolerance,
    plain_loss,
    refuse_no_gradients,
    value_and_gradients,
)

Loss = Callable[..., Tensor | TokenLoss]
"""`loss(generator, criterion, hidden, target, **per_token)`."""
SMALLER_TRIES = 40
SHOWN = 12
"""Targets that a message shows."""


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
    rtol: float = 1e-12,
    **per_token: Tensor,
) -> None:
    """Asserts that a loss and its gradients are those of the plain single-device computation, in float64.

    Plain equivalent: `criterion(generator(hidden).flatten(0, -2), target.flatten()) / tokens` on the tokens of all
    ranks at once, and its gradients by autograd. The loss is called as it is and times 1/8, for what comes from above
    must reach every gradient.

        assert_same_loss(my_generator, my_criterion, hidden, target, devices=["cuda:0", "cuda:1"], chunk_size=5)
        assert_same_loss(my_generator, my_criterion, hidden, target, loss=my_training_loss)

    Args:
        generator, criterion: as `seqpar.LossCompute`. Where either is not float64, float64 copies of both take part.
        hidden: `(N, D)` or `(B, T, D)`, of which a float64 leaf is made.
        target: hidden's leading shape.
        loss: the way to compute it that is under test, `loss(generator, criterion, hidden, target, **per_token)`: what
            `backward()` is called on, or a `TokenLoss`, whose total is divided by `tokens` (and multiplied by the world
            size). It must use the modules that it is given. None is seqpar's engine, with `devices`, `chunk_tokens` and
            `chunk_size` as `LossCompute` has them.
        tokens: what the step's sum is divided by; 1 is the sum itself.
        group: ranks that share the step out; every one of them calls this with its own hidden and target, and
            parameters' gradients are averaged over them, as DDP does.
        rtol: as `assert_same_gradients`.
        per_token: further tensors with target's shape first, for the generator; floating ones are differentiated.

    Raises:
        AssertionError: on every rank, naming what is off and by how much, the likely cause told from the numbers, and
            the smallest part of these inputs that is off as well.
        ValueError: `loss` and what only seqpar's engine takes, together; a number out of its range; no gradient on
            either side (`torch.no_grad`).
        TypeError: an argument of another kind.
    """
    engine_only = {"devices": devices, "chunk_tokens": chunk_tokens, "chunk_size": chunk_size}
    given = [name for name, value in engine_only.items() if value is not None]
    if loss is not None and given:
        raise ValueError(f"loss= computes the loss by itself, and {', '.join(given)} are for seqpar's engine; pass one")
    _check_arguments(generator, criterion, hidden, target, tokens, per_token)
    check_tolerance(rtol)
    head = _in_float64(generator, criterion)
    if loss is None:
        engine = LossCompute(head["generator"], head["criterion"], devices, chunk_tokens, chunk_size)
        loss = _engines(engine)
    inputs = {name: t.detach().double() if t.is_floating_point() else t for name, t in per_token.items()}
    trial = _Trial(head, loss, hidden.detach().double(), target, inputs, tokens, group, rtol)
    said = trial.failure()
    everyones = {rank: text for rank, text in enumerate(gather_objects(said, group)) if text}
    if everyones:
        rank, text = next(iter(everyones.items()))
        where = f"rank {rank}: " if world_size(group) > 1 else ""
        raise AssertionError(f"{where}{text}{trial.smallest_failure()}")


@dataclass(frozen=True)
class _Trial:
    """One loss, on some tokens, against the plain one."""

    head: nn.ModuleDict
    loss: Loss
    hidden: Tensor
    target: Tensor
    per_token: dict[str, Tensor]
    tokens: float
    group: ProcessGroup | None
    rtol: float

    def failure(self) -> str:
        """What is off, and the likely cause; empty where nothing is."""
        head, hidden = (self.head["generator"], self.head["criterion"]), self.hidden.detach().requires_grad_()
        extra = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in self.per_token.items()}
        parameters = {n: p for name in self.head for n, p in _named(self.head, name)}
        tensors = {"hidden": hidden, **{n: t for n, t in extra.items() if t.requires_grad}, **parameters}
        whole = gather_objects((self.hidden, self.target, self.per_token), self.group)

        def candidate() -> Tensor:
            return self._scaled(self.loss(*head, hidden, self.target, **extra))

        def plain() -> Tensor:
            parts = [*whole]
            parts[rank_in(self.group)] = hidden, self.target, extra
            losses = [plain_loss(*head, h, t, **keywords) for h, t, keywords in parts]
            return torch.stack(losses).sum() / self.tokens

        expected, got = value_and_gradients(plain, tensors), self._reduced(candidate, tensors)
        refuse_no_gradients(got, expected, tensors)
        eighth = self._reduced(lambda: candidate() * FACTOR, tensors)
        try:
            assert_same_results(got, expected, self.rtol)
            assert_same_results(eighth, _times(expected, FACTOR), self.rtol)
        except AssertionError as error:
            return f"{error}\n{likely_cause(self._evidence(got, expected, eighth, gradients_by_use(plain, tensors)))}"
        return ""

    def _scaled(self, loss: Tensor | TokenLoss) -> Tensor:
        return loss.total * world_size(self.group) / self.tokens if isinstance(loss, TokenLoss) else loss

    def _reduced(self, loss: Callable[[], Tensor], tensors: dict[str, Tensor]) -> Result:
        """Value and gradients as the step has them: the ranks' average, and this rank's share of hidden's."""
        (value, gradients), world = value_and_gradients(loss, tensors), world_size(self.group)
        if world == 1:
            return value, gradients
        averaged = {}
        for name, tensor in tensors.items():
            found = gradients[name]
            found = torch.zeros_like(tensor) if found is None else found
            own = name == "hidden" or name in self.per_token
            averaged[name] = found / world if own else group_sum(found, self.group) / world
        return group_sum(value, self.group) / world, averaged

    def _evidence(self, got: Result, expected: Result, eighth: Result, uses: Any) -> Evidence:
        ignored = ignored_target(self.head["criterion"])
        kept = torch.ones_like(self.target) if ignored is None else self.target != ignored
        counts = int(kept.sum()), self.target.numel(), self.tokens, world_size(self.group)
        return Evidence(got, expected, eighth, uses, frozenset({"hidden"}), *counts)

    def smallest_failure(self) -> str:
        """The smallest part of the inputs that fails as well, in words; for one rank alone."""
        if world_size(self.group) > 1:
            return ""
        for cut in self._parts():
            with suppress(Exception):  # a loss that cannot take so few tokens says nothing about them
                if not cut.failure():
                    continue
                shown = cut.target.tolist() if cut.target.numel() <= SHOWN else f"{tuple(cut.target.shape)}"
                return f"\nSmallest part of these inputs that fails: hidden {tuple(cut.hidden.shape)}, target {shown}"
        return ""

    def _parts(self) -> Iterator[_Trial]:
        """The first sentences and time steps, fewest tokens first, and all of them last."""
        sizes = self.target.shape
        corners = torch.cartesian_prod(*(torch.arange(1, n + 1) for n in sizes)).reshape(-1, len(sizes)).tolist()
        for corner in [*sorted(corners, key=math.prod)[:SMALLER_TRIES], list(sizes)]:
            at = tuple(slice(n) for n in corner)
            extra = {name: t[at] for name, t in self.per_token.items()}
            yield replace(self, hidden=self.hidden[at], target=self.target[at], per_token=extra)


def _check_arguments(
    generator: object, criterion: object, hidden: object, target: object, tokens: object, per_token: dict[str, Any]
) -> None:
    for name, module in (("generator", generator), ("criterion", criterion)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} is a {type(module).__name__}; it must be a torch.nn.Module")
    check_floating(hidden, "hidden")
    check_integer_target(target)
    for name, value in per_token.items():
        check_dense(value, name)
    check_number(tokens, "tokens", above=0)


def _in_float64(generator: nn.Module, criterion: nn.Module) -> nn.ModuleDict:
    """Both of them, ties included; copies where any parameter or buffer is of another floating dtype."""
    head = nn.ModuleDict({"generator": generator, "criterion": criterion})
    floating = (t for t in (*head.parameters(), *head.buffers()) if t.is_floating_point())
    return head if all(t.dtype == torch.float64 for t in floating) else copy.deepcopy(head).double()


def _named(head: nn.ModuleDict, part: str) -> Iterator[tuple[str, nn.Parameter]]:
    return ((f"{part}.{name}", parameter) for name, parameter in head[part].named_parameters())


def _engines(engine: LossCompute) -> Loss:
    return lambda generator, criterion, hidden, target, **per_token: engine(hidden, target, **per_token)


def _times(result: Result, factor: float) -> Result:
    value, gradients = result
    return value * factor, {name: None if g is None else g * factor for name, g in gradients.items()}
