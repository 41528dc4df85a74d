"""Run a module on several devices in one process, each on some of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from torch import nn

from seqpar.core.checks import check_integer, check_module, check_type
from seqpar.multi_device.devices import Device, available, check_devices
from seqpar.multi_device.parallel_apply import parallel_apply
from seqpar.multi_device.replicas import batch_rows, gather, needs_no_replica, replicate, scatter


def data_parallel(
    module: nn.Module,
    inputs: object,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, object] | None = None,
) -> Any:
    """Return `module(*inputs, **module_kwargs)`, computed with the rows divided among the devices.

    Like `torch.nn.parallel.data_parallel`, but for any device list; see `DataParallel` for the arguments.

    Example:
        >>> model, batch = nn.Linear(8, 4), torch.randn(6, 8)
        >>> torch.allclose(seqpar.data_parallel(model, batch, ["cpu", "cpu"]), model(batch), atol=1e-6)
        True
    """
    check_type(module_kwargs, "module_kwargs", (Mapping, NoneType), "a dict of keyword arguments")
    # As in torch, one argument need not be in a tuple; a list is one argument
    if not isinstance(inputs, tuple):
        inputs = (inputs,)
    return DataParallel(module, device_ids, output_device, dim).forward(*inputs, **(module_kwargs or {}))


class DataParallel(nn.Module):
    """Run a module, or one block of a model, on several devices at once, each on some of the rows.

    Like `torch.nn.DataParallel`, with three differences: any device list works (`["cpu", "cpu"]`, `["cuda:0"] * 2`);
    rows are divided evenly (6 rows on 4 devices use all 4); outputs may stay where they are.

    Args:
        module: the module to run. Its gradients arrive in its own parameters, summed over the devices.
        device_ids: the devices; None takes every accelerator, or the CPU if there is none.
        output_device: the device where outputs are concatenated; None takes the first of `device_ids`.
        dim: the batch dimension.
        gather_outputs: False returns the list of per-device outputs, which `LossCompute` takes as it is.

    Raises:
        TypeError, ValueError: an invalid device list, module or input, as in `replicate`, `scatter` and `gather`.

    Example:
        >>> model, batch = nn.Linear(8, 4), torch.randn(6, 8)
        >>> parallel = seqpar.DataParallel(model, device_ids=["cpu", "cpu"])
        >>> torch.allclose(parallel(batch), model(batch), atol=1e-6)
        True
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
        self.device_ids = tuple(available())
        if device_ids is not None:
            self.device_ids = check_devices(device_ids, "device_ids")
        if output_device is None:
            output_device = self.device_ids[0]
        (self.output_device,) = check_devices([output_device], "output_device")
        self.dim = dim
        self.gather_outputs = gather_outputs

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Return the module's output for all rows; with `gather_outputs=False`, the list of the devices' outputs."""
        devices = self.device_ids
        # Without rows, each replica would compute the whole output once more
        if batch_rows((inputs, kwargs), self.dim) is None:
            devices = devices[:1]
        shards = scatter((inputs, kwargs), devices, self.dim)
        # Fewer rows than devices leave the last devices idle
        used = devices[: len(shards)]
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        modules = [self.module] if needs_no_replica(tensors, used) else replicate(self.module, used)
        outputs = parallel_apply(modules, [s[0] for s in shards], [s[1] for s in shards], used)
        if not self.gather_outputs:
            return outputs
        return gather(outputs, self.output_device, self.dim)

    def extra_repr(self) -> str:
        """Return the settings for `print(module)`."""
        return f"device_ids={[str(d) for d in self.device_ids]}, gather_outputs={self.gather_outputs}"
