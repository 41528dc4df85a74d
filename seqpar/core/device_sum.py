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
from seqpar.core.chunked_gradient import Leaves, StoredGradient, Walk
from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import Gradients, SummedGradient, in_own_precision, narrow
from seqpar.core.streams import current_streams
from seqpar.core.structures import map_tensors
from seqpar.core.token_loss import TokenLoss, wide

Job = tuple[Walk, Sequence[Chunk], Leaves]
"""What is added up on a device."""

Apply = Callable[[Sequence[Walk], Sequence[tuple[Any, ...]]], Sequence[TokenLoss]]
"""(walks, the arguments of each) -> the loss of each."""


def sum_over_devices(
    jobs: Sequence[Job], params: Sequence[Tensor | None], loss_scale: float | Tensor, apply: Apply
) -> TokenLoss:
    """Return the loss of all devices, on the first one.

    Args:
        params: the caller's parameters, of which the leaves of each job have copies, in the same order.
        loss_scale: as in `chunked_gradient`.
        apply: runs the walks.
    """
    per_token = [t for _, _, leaves in jobs for t in leaves.of_tokens]
    tensors = (*per_token, *params)
    refuse_transforms(tensors)
    enabled = torch.is_grad_enabled()
    gradients = None
    stored: Sequence[Gradients | None] = [None] * len(jobs)
    with torch.no_grad():
        if enabled and any(t is not None and t.requires_grad for t in tensors):
            gradients = _GradientsOverDevices(jobs, params, loss_scale)
            stored = gradients.on_devices
        arguments = [(chunks, leaves, own) for (_, chunks, leaves), own in zip(jobs, stored, strict=True)]
        loss = sum_on_first(apply([walk for walk, _, _ in jobs], arguments))
    if gradients is None:
        return loss
    gradients.detached_chunks = sum(own.detached_chunks for own in gradients.on_devices)
    chunks = sum(len(own) for _, own, _ in jobs)
    return TokenLoss(*StoredGradient.apply(gradients, loss, chunks, *tensors))


class _GradientsOverDevices:
    """The stored gradients of all devices; read as `Gradients` is."""

    def __init__(self, jobs: Sequence[Job], params: Sequence[Tensor | None], scale: float | Tensor) -> None:
        trained = [t is not None and t.requires_grad for t in params]
        self.on_devices = [self._of_device(job, trained, scale) for job in jobs]
        if len(jobs) > 1:
            # Gradients of one chunk, too, are summed over the devices before they are narrow
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
        self.scale = self.on_devices[0].scale
        self.detached_chunks = 0

    @staticmethod
    def _of_device(job: Job, trained: list[bool], scale: float | Tensor) -> Gradients:
        _, chunks, leaves = job
        wanted = [t is not None and t.requires_grad for t in leaves.of_tokens]
        return Gradients(leaves.of_tokens, leaves.params, [*wanted, *trained], chunks, scale)

    @property
    def per_token(self) -> list[Any]:
        """Return the slots of all devices, which a walk may replace by its own."""
        return [slot for own in self.on_devices for slot in own.per_token]


class _ParameterGradient:
    """The gradient of one parameter, which is summed over its copies."""

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
