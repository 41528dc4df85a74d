"""Let Inductor generate the Triton kernels of an H100 for the emulated accelerator, and write their launches down.

Inductor is told that the accelerator has an H100's multiprocessors and registers. Its code runs as on a GPU: products
and attention go through torch's dispatcher, and each launch of a generated kernel is only noted.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from models import compiled
from tests.emulated import NAME

H100 = types.SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024,
    warp_size=32,
    total_memory=80 * 2**30,
)
"""What the driver tells of one."""


class _Interface(DeviceInterface):
    """What Inductor asks of a device."""

    class Worker:
        """The same, asked by a process that compiles."""

        get_device_properties = staticmethod(lambda device=None: H100)
        current_device = staticmethod(lambda: 0)

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    maybe_exchange_device = staticmethod(lambda device: 0)
    exchange_device = staticmethod(lambda device: 0)
    synchronize = staticmethod(lambda device=None: None)
    get_raw_stream = staticmethod(lambda device: 0)
    get_device_properties = staticmethod(lambda device=None: H100)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


class _Overrides(DeviceOpOverrides):
    """The lines of generated code that select a device and its stream."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"{name} = lambda device: 0"

    def set_device(self, device_idx: int) -> str:
        return "pass"

    def synchronize(self) -> str:
        return "pass"

    def device_guard(self, device_idx: int) -> str:
        return "torch.no_grad()"  # which it is within anyway


class _Kernel:
    """A generated kernel, of which a launch is noted."""

    def __init__(self, name: str, noted: Callable[[str], None]) -> None:
        self.name = name
        self.noted = noted

    def run(self, *_: object, **__: object) -> None:
        self.noted(self.name)


def register_compiler() -> None:
    """Make `torch.compile` generate Triton's kernels for the emulated accelerator."""
    register_interface_for_device(NAME, _Interface)
    register_device_op_overrides(NAME, _Overrides())
    register_backend_for_device(NAME, TritonScheduling, PythonWrapperCodegen)


@contextlib.contextmanager
def noted_launches(log: TorchDispatchMode, noted: Callable[[str], None]) -> Iterator[None]:
    """Within the block, tell `noted` each launch of a generated kernel, and `log` what generated code dispatches."""
    call = CompiledFxGraph.__call__
    forward = compiled._compiled_forward()

    def logged(graph: CompiledFxGraph, inputs: Any) -> Any:
        # Once, also where the mode is on already, as in backward
        with _disable_current_modes(), log:
            return call(graph, inputs)

    def outside_modes(*args: Any, **kwargs: Any) -> Any:
        # Within a mode nothing is compiled
        with _disable_current_modes():
            return forward(*args, **kwargs)

    def kernel(_: object, name: str, *__: object, **___: object) -> _Kernel:
        return _Kernel(name, noted)

    with contextlib.ExitStack() as stack:
        # It asks for a driver
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", lambda: NAME))
        stack.enter_context(patch("torch._inductor.async_compile.AsyncCompile.triton", kernel))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        stack.enter_context(patch.object(CompiledFxGraph, "__call__", logged))
        stack.enter_context(patch.object(compiled, "_compiled_forward", lambda: outside_modes))
        yield


def fused_attention() -> Callable[..., Tensor]:
    """Return attention of which a compiler knows nothing but that it is one launch, and one in backward."""

    @torch.library.custom_op(f"{NAME}::attention", mutates_args=())
    def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.zeros_like(query)

    @torch.library.custom_op(f"{NAME}::attention_backward", mutates_args=())
    def attention_backward(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values)

    attention.register_fake(lambda query, keys, values: torch.empty_like(query))
    attention_backward.register_fake(lambda grad, *inputs: tuple(map(torch.empty_like, inputs)))
    attention.register_autograd(
        lambda ctx, grad: attention_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return lambda query, keys, values, **_: attention(query, keys, values)
