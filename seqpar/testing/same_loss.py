"""Compare a user's generator, criterion and way of computing their loss with the plain single-device computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_dense, check_floating, check_integer_target, check_module, check_number
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.collectives import gather_objects, world_size
from seqpar.engine.loss_compute import LossCompute
from seqpar.multi_device.devices import Device
from seqpar.testing.comparison import Comparison, Loss
from seqpar.testing.gradients import RTOL, is_shown
from seqpar.testing.precision import has_float64, in_dtype

__tracebackhide__ = True  # pytest shows the call that failed, and the sentence


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
    rtol: float = RTOL,
    **per_token: Tensor,
) -> None:
    """Assert that a loss and its gradients equal those of the plain single-device computation, in float64.

    Plain equivalent: `criterion(generator(hidden).flatten(0, -2), target.flatten()) / tokens` on the tokens of all
    ranks at once, and its gradients by autograd. Both losses are compared as they are and times 1/8, because a factor
    on the loss must reach every gradient. Both use the generator's and the criterion's own backward:
    `assert_numerical_gradients` checks whether a custom backward is right. Over two ranks:

        assert_same_loss(generator, criterion, hidden, target, loss=my_loss, ranks=2, tokens=count)

    Args:
        generator, criterion: as in `seqpar.LossCompute`. If either is not float64, float64 copies of both are used. In
            training mode dropout would draw different numbers in every call: call `.eval()` first. On a device without
            float64, such as mps, the loss is computed in float32; it is compared with the plain one in float64 on the
            CPU, and may be at most twice as far from it as plain PyTorch is in float32 on that device.
        hidden: `(N, D)` or `(B, T, D)`; it is turned into a float64 leaf (on mps a float32 one).
        target: hidden's leading shape.
        loss: the function under test, `loss(generator, criterion, hidden, target, **per_token)`. It returns the tensor
            that `backward()` is called on, or a `TokenLoss`, whose total is divided by `tokens` (and multiplied by the
            world size) and which must count the targets that are not ignored. It must use the modules that it is given.
            None means seqpar's engine, with `devices`, `chunk_tokens` and `chunk_size` as for `LossCompute`.
        tokens: the number that the step's sum is divided by; 1 leaves the sum as it is.
        group: the ranks that the step is divided among; each calls this with its own hidden and target, and gradients
            of parameters are averaged over them, as in DDP.
        ranks: instead of calling this in every rank, call it once, outside any group: the first dimension of these
            tensors is then divided, unequally, among this many new processes over gloo (`seqpar.testing.ranks`), which
            form `torch.distributed`'s default group and each compute the loss of their own part. Modules and loss must
            be picklable, so the loss must be a function at the top level of a module.
        rtol: as in `assert_same_gradients`; on a device without float64 it has no effect.
        per_token: further tensors for the generator, whose first dimensions are target's; floating ones are
            differentiated.

    Raises:
        AssertionError: on every rank; the message says what differs and by how much, the likely cause, and the smallest
            subset of these inputs that also fails (inside a hypothesis test, hypothesis itself looks for that).
        ValueError: `loss` together with arguments of seqpar's engine, `ranks` together with `group`, a number out of
            its range, no gradient on either side (`torch.no_grad`), or ranks that all have the same number of tokens.
        TypeError: an argument of the wrong type, or one that cannot be sent to the ranks.

    Example:
        >>> from seqpar.testing import assert_same_loss
        >>> generator, criterion = nn.Linear(8, 50), nn.CrossEntropyLoss(reduction="sum")
        >>> hidden, target = torch.randn(2, 6, 8), torch.randint(50, (2, 6))
        >>> assert_same_loss(generator, criterion, hidden, target, devices=["cpu", "cpu"], chunk_size=5)
        >>> def my_loss(generator, criterion, hidden, target):
        ...     return criterion(generator(hidden.detach()).flatten(0, 1), target.flatten())
        >>> assert_same_loss(generator, criterion, hidden, target, loss=my_loss)
        Traceback (most recent call last):
            ...
        AssertionError: Likely cause: hidden: no gradient at all, so the loss is detached from it...
    """
    engine_only = {"devices": devices, "chunk_tokens": chunk_tokens, "chunk_size": chunk_size}
    given = {name: value for name, value in engine_only.items() if value is not None}
    if loss is not None and given:
        raise ValueError(f"loss= computes the loss by itself, and {', '.join(given)} are for seqpar's engine; pass one")
    if ranks is not None and group is not None:
        raise ValueError("group is for a call in every rank, and ranks for one call outside of them; pass one")
    check_module(generator, "generator")
    check_module(criterion, "criterion")
    check_floating(hidden, "hidden")
    check_integer_target(target)
    for name, value in per_token.items():
        check_dense(value, name)
    check_number(tokens, "tokens", above=0)
    check_number(rtol, "rtol", at_least=0)
    dtype = torch.float64 if has_float64(hidden.device) else torch.float32
    head = in_dtype(nn.ModuleDict({"generator": generator, "criterion": criterion}), dtype)
    own = loss is not None
    layout = "".join(f", {name}={value!r}" for name, value in given.items())
    if loss is None:
        engine = LossCompute(head["generator"], head["criterion"], devices, chunk_tokens, chunk_size)
        loss = _EnginesLoss(engine)
    floating = {name: t.detach().to(dtype) for name, t in per_token.items() if t.is_floating_point()}
    given_tokens = hidden.detach().to(dtype), target, per_token | floating
    trial = Comparison(head, loss, *given_tokens, tokens, group, rtol, own, layout, ranks)
    with _unchanged(head):
        # Gathered, so that all ranks raise the same error instead of waiting for the one that did
        failures = {rank: text for rank, text in enumerate(gather_objects(trial.failure(is_shown()), group)) if text}
        if failures:
            rank, message = next(iter(failures.items()))
            if world_size(group) > 1:
                message = f"rank {rank}: {message}"
            raise AssertionError(f"{message}{trial.smallest_failure()}")


@contextlib.contextmanager
def _unchanged(head: nn.Module) -> Iterator[None]:
    """Restore the parameters' gradients and the buffers' values after the block."""
    gradients = [(p, p.grad) for p in head.parameters()]
    numbers = [(b, b.detach().clone()) for b in head.buffers()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in numbers:
                buffer.copy_(before)


class _EnginesLoss:
    """The engine as a function that also takes the modules, which it already has."""

    def __init__(self, engine: LossCompute) -> None:
        self.engine = engine

    def __call__(self, generator: nn.Module, criterion: nn.Module, *tokens: Tensor, **per_token: Tensor) -> TokenLoss:
        loss: TokenLoss = self.engine(*tokens, **per_token)
        return loss
