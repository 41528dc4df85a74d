"""Data parallelism in one process, over any device list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from seqpar.core.tensor_checks import check_integer, check_module
from seqpar.multi_device.devices import Device, available, check_devices
from seqpar.multi_device.replicas import batch_rows, gather, parallel_apply, replicate, scatter


def _apply(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[Device],
    dim: int,
) -> list[Any]:
    """The outputs of the replicas, each on its device; one where there are no rows to share out."""
    used = devices if batch_rows((inputs, kwargs), dim) is not None else devices[:1]
    shards = scatter((inputs, dict(kwargs)), used, dim)
    used = used[: len(shards)]
    return parallel_apply(replicate(module, used), [s[0] for s in shards], [s[1] for s in shards], used)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """`module(*inputs, **module_kwargs)` with the rows shared out over the devices.

    As `torch.nn.parallel.data_parallel`, for any device list; see `DataParallel` for the arguments.
    """
    check_module(module, "module")
    check_integer(dim, "dim")
    if module_kwargs is not None and not isinstance(module_kwargs, Mapping):
        raise TypeError(f"module_kwargs is a {type(module_kwargs).__name__}; it must be a dict of keyword arguments")
    devices = available() if device_ids is None else check_devices(device_ids, "device_ids")
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    outputs = _apply(module, inputs, module_kwargs or {}, devices, dim)
    return gather(outputs, devices[0] if output_device is None else output_device, dim)


class DataParallel(nn.Module):
    """Runs a module, or one block of a model, on several devices at once, each on its share of the rows.

    As `torch.nn.DataParallel`, with three differences: any device list works (`["cpu", "cpu"]`, `["cuda:0"] * 2`);
    rows are shared out evenly (6 rows on 4 devices use all 4); outputs may stay where they are.

    Args:
        module: what to run. Its gradients arrive in its own parameters, summed over the devices.
        device_ids: the devices; None takes every accelerator, or the CPU where there is none.
        output_device: where outputs are joined; None takes the first of `device_ids`.
        dim: the batch dimension.
        gather_outputs: False returns the list of per-device outputs, for `LossCompute` to take as they are.

    Raises:
        TypeError, ValueError: from the device list, the module or the inputs, as `replicate`, `scatter`, `gather`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        gather_outputs: bool = True,
    ) -> None:
        super().__init__()
        check_module(module, "module")
        check_integer(dim, "dim")
        self.module = module
        self.device_ids = tuple(available()) if device_ids is None else check_devices(device_ids, "device_ids")
        given = self.device_ids[0] if output_device is None else output_device
        (self.output_device,) = check_devices([given], "output_device")
        self.dim = dim
        self.gather_outputs = gather_outputs

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for all rows; with `gather_outputs=False` the list of each device's."""
        outputs = _apply(self.module, inputs, kwargs, self.device_ids, self.dim)
        return gather(outputs, self.output_device, self.dim) if self.gather_outputs else outputs

    def extra_repr(self) -> str:
        """What `print(module)` adds."""
        return f"device_ids={[str(d) for d in self.device_ids]}, gather_outputs={self.gather_outputs}"
