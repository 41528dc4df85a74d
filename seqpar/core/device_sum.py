"""Sum the walks of several devices as one node of autograd's graph.

    total = sum_d total_d,    d total / d parameter = sum_d of the gradient on device d

Each device walks over its own chunks with its own copies of the parameters. Their gradients are summed on the
parameter's device, in the order of the devices, in float32 or wider, and narrowed once: so they are as precise as those
of one device, and the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.core.checks import refuse_transforms
from seqpar.core.chunked_gradient import DETACHED, Leaves, StoredGradient, Walk, is_detached
from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import current_streams
from seqpar.core.graphs import autocast_of_now, check_unchanged, with_version
from seqpar.core.stored_gradients import Gradients, SummedGradient, in_own_precision, narrow
from seqpar.core.structures import map_tensors
from seqpar.core.token_loss import TokenLoss, wide

Job = tuple[Walk, Sequence[Chunk], Leaves]
"""What one device adds up."""

SAME_LOSS = 1e-6
"""The largest relative difference of two walks over the same chunks: a float32 sum may be in another kernel's order."""

Apply = Callable[[Sequence[Walk], Sequence[tuple[Any, ...]]], Sequence[TokenLoss]]
"""(walks, the arguments of each) -> the loss of each."""


def sum_over_devices(
    jobs: Sequence[Job],
    params: Sequence[Tensor | None],
    loss_scale: float | Tensor,
    apply: Apply,
    is_linear: bool = True,
) -> TokenLoss:
    """Return the loss of all devices, on the first one.

    Args:
        params: the caller's parameters; the leaves of each job have copies of them, in the same order.
        loss_scale: as in `chunked_gradient`.
        apply: runs the walks.
        is_linear: whether the gradient of a multiple of the loss is that multiple of its gradient. Otherwise it is
            computed in backward, by a second walk that knows the factor.
    """
    per_token = [t for _, _, leaves in jobs for t in leaves.of_tokens]
    tensors = (*per_token, *params)
    refuse_transforms(tensors)
    chunks = sum(len(own) for _, own, _ in jobs)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def run_walks(gradients: _GradientsOverDevices | None, apply: Apply) -> TokenLoss:
        stored = [None] * len(jobs) if gradients is None else gradients.on_devices
        arguments = [(chunks, leaves, own) for (_, chunks, leaves), own in zip(jobs, stored, strict=True)]
        return sum_on_first(apply([walk for walk, _, _ in jobs], arguments))

    def with_gradients(scale: float | Tensor, apply: Apply) -> tuple[TokenLoss, _GradientsOverDevices]:
        gradients = _GradientsOverDevices(jobs, params, scale)
        loss = run_walks(gradients, apply)
        gradients.detached_chunks = sum(own.detached_chunks for own in gradients.on_devices)
        return loss, gradients

    with torch.no_grad():
        if not wanted:
            return run_walks(None, apply)
        gradients: _GradientsOverDevices | _GradientsLater
        if is_linear:
            loss, gradients = with_gradients(loss_scale, apply)
        else:
            loss = run_walks(None, apply)
            # Backward is called outside of autocast
            autocast = autocast_of_now(sorted({t.device.type for t in tensors if t is not None}))

            def later(factor: float | Tensor) -> tuple[TokenLoss, _GradientsOverDevices]:
                # Not in threads: their own backward on an accelerator would wait for the thread that runs this one
                with autocast():
                    return with_gradients(factor, _one_after_another)

            gradients = _GradientsLater(loss.total.detach(), chunks, later, [t for t in tensors if t is not None])
    return TokenLoss(*StoredGradient.apply(gradients, loss, chunks, *tensors))


def _one_after_another(walks: Sequence[Walk], arguments: Sequence[tuple[Any, ...]]) -> Sequence[TokenLoss]:
    return [walk(*own) for walk, own in zip(walks, arguments, strict=True)]


class _GradientsLater:
    """Gradients that are computed in backward, where the factor of the loss is known.

    Args:
        total: the loss, which the second walk must reproduce.
        chunks: how many chunks the walks have together.
        walk: factor -> the loss and the gradients, stored multiplied by the factor.
        leaves: what the walks read, which must not change in place between them.
    """

    detached_chunks = 0
    """How many chunks were detached: none, before the second walk."""

    def __init__(
        self,
        total: Tensor,
        chunks: int,
        walk: Callable[[float | Tensor], tuple[TokenLoss, _GradientsOverDevices]],
        leaves: Sequence[Tensor],
    ) -> None:
        self.total = total
        self.chunks = chunks
        self.walk = walk
        self.leaves = [with_version(t) for t in leaves]

    def of(self, upstream: Tensor) -> tuple[_GradientsOverDevices, None]:
        """Return the gradients of the loss times the upstream factor, and None, as no factor is left to multiply by.

        Raises RuntimeError for a leaf that was changed in place, and if the second walk finds a different loss, because
        something without a version, such as a mode, has changed since the first.
        """
        for saved in self.leaves:
            check_unchanged(saved)
        loss, gradients = self.walk(upstream)
        if is_detached(gradients.detached_chunks, self.chunks, loss.total):
            raise RuntimeError(DETACHED)
        if not torch.allclose(loss.total, self.total, rtol=SAME_LOSS, atol=0.0, equal_nan=True):
            raise RuntimeError(
                f"the loss was {float(self.total):.9g} in forward and is {float(loss.total):.9g} in backward, where it "
                "is computed again since the backward of the generator or the criterion is not linear: call backward "
                "before weights or modes, as of train() and eval(), change"
            )
        return gradients, None


class _GradientsOverDevices:
    """The stored gradients of all devices, with what `StoredGradient` reads of a `Gradients`."""

    def __init__(self, jobs: Sequence[Job], params: Sequence[Tensor | None], scale: float | Tensor) -> None:
        trained = [t is not None and t.requires_grad for t in params]
        self.on_devices = [self._of_device(job, trained, scale) for job in jobs]
        if len(jobs) > 1:
            # Even those of a single chunk are summed over the devices before they are narrowed
            for own in self.on_devices:
                own.params = [slot and SummedGradient(wide(slot.dtype), max(2, slot.chunks)) for slot in own.params]
        self.params = [
            _ParameterGradient(t, self.on_devices, i) if t is not None and is_trained else None
            for i, (t, is_trained) in enumerate(zip(params, trained, strict=True))
        ]
        homes = [t.device for t in params if t is not None]
        self.streams = current_streams(
            [*(t.device for _, _, own in jobs for t in own.of_tokens if t is not None), *homes]
        )
        self.detached_chunks = 0

    def of(self, upstream: Tensor) -> tuple[_GradientsOverDevices, Tensor]:
        """Return these gradients and the factor to multiply them by, as `Gradients.of` does."""
        _, factor = self.on_devices[0].of(upstream)
        return self, factor

    @staticmethod
    def _of_device(job: Job, trained: list[bool], scale: float | Tensor) -> Gradients:
        _, chunks, leaves = job
        wanted = [t is not None and t.requires_grad for t in leaves.of_tokens]
        return Gradients(leaves.of_tokens, leaves.params, [*wanted, *trained], chunks, scale)

    @property
    def per_token(self) -> list[Any]:
        """Return the slots of all devices, read late because a walk may replace them by its own."""
        return [slot for own in self.on_devices for slot in own.per_token]


class _ParameterGradient:
    """The gradient of one parameter, summed over its copies on the devices."""

    def __init__(self, parameter: Tensor, on_devices: Sequence[Gradients], place: int) -> None:
        self.home = parameter.device
        self.dtype = parameter.dtype
        self.on_devices = on_devices
        self.place = place

    def release(self, factor: Tensor | None) -> Tensor | None:
        """Return the sum times `factor` (None is 1), in the parameter's dtype, and drop the references to it."""
        if len(self.on_devices) == 1:
            grad = self._release(self.on_devices[0], factor)
            return None if grad is None else grad.to(self.home)
        total = None
        for own in self.on_devices:
            if (part := self._release(own, None)) is not None:
                part = part.to(self.home)
                total = part if total is None else total.add_(part)
        if total is None or factor is None:
            return None if total is None else narrow([total], self.dtype)
        return narrow([total.mul_(in_own_precision(factor, total))], self.dtype)

    def _release(self, own: Gradients, factor: Tensor | None) -> Tensor | None:
        slot = own.params[self.place]
        assert slot is not None
        return slot.release(factor)


def sum_on_first(losses: Sequence[TokenLoss]) -> TokenLoss:
    """Return the sum of the devices' losses, on the first one."""
    device = losses[0].total.device
    return sum((map_tensors(lambda t: t.to(device), loss) for loss in losses[1:]), start=losses[0])
