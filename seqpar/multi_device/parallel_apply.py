"""Apply modules to inputs, one thread per distinct device: the third of the four primitives of `torch.nn.parallel`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from seqpar.core.checks import check_function, check_type
from seqpar.core.device_facts import current, current_streams, select_streams
from seqpar.core.graphs import autocast_of_now, hooks_around
from seqpar.core.structures import leaves
from seqpar.multi_device.devices import Device, accelerator, available, check_devices

Result = TypeVar("Result")


def parallel_apply(
    modules: Sequence[Callable[..., Result]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Result]:
    """Return `[module(*input, **kwargs) for ...]`, computed with one thread per distinct device.

    Like `torch.nn.parallel.parallel_apply`. A list or tuple among the inputs is one module's positional arguments.
    Modules on the same device run one after another, in order: threads gain nothing there and make dropout
    irreproducible. The threads have the caller's context variables, default device, grad mode, inference mode and
    autocast (with its dtype). Inside saved-tensor hooks (a checkpoint), torch modes (`FlopCounterMode`) or transforms
    of `torch.func`, which threads cannot share, the modules run one after another in the caller's thread.

    Raises:
        TypeError: modules, inputs or keyword arguments that are not lists, or lists of the wrong types.
        ValueError: lists of different lengths.
        Exception: whatever a module raises, with a note that names the replica and its device.

    Example:
        >>> model, batch, devices = nn.Linear(8, 4), torch.randn(6, 8), ["cpu", "cpu"]
        >>> replicas, shards = seqpar.replicate(model, devices), seqpar.scatter(batch, devices)
        >>> outputs = seqpar.parallel_apply(replicas, shards, devices=devices)
        >>> torch.allclose(torch.cat(outputs), model(batch), atol=1e-6)
        True
    """
    for name, values in (("modules", modules), ("inputs", inputs), ("kwargs_tup", kwargs_tup or ())):
        check_type(values, name, (list, tuple, nn.ModuleList), "a list with one for each replica")
    for i, module in enumerate(modules):
        check_function(module, f"modules[{i}]", "a module or a function")
    for i, keywords in enumerate(kwargs_tup or ()):
        check_type(keywords, f"kwargs_tup[{i}]", Mapping, "a dict of keyword arguments")
    if kwargs_tup is None:
        kwargs_tup = [{}] * len(modules)
    where = _devices_of(inputs) if devices is None else list(check_devices(devices))
    if not len(modules) == len(inputs) == len(kwargs_tup) == len(where):
        raise ValueError(
            f"{len(modules)} modules, {len(inputs)} inputs, {len(kwargs_tup)} kwargs and {len(where)} devices: "
            "there must be as many of each"
        )

    def job(i: int) -> Result:
        arguments = inputs[i]
        if not isinstance(arguments, (list, tuple)):
            arguments = (arguments,)
        try:
            with current(where[i]):
                return modules[i](*arguments, **kwargs_tup[i])
        except Exception as error:
            error.add_note(f"in replica {i} of {len(modules)} (counted from 0) on {where[i]}")
            raise

    return side_by_side(job, where)


def side_by_side(job: Callable[[int], Result], where: Sequence[object]) -> list[Result]:
    """Return `[job(0), job(1), ...]`; jobs with the same `where` run in order, all others in parallel threads."""
    jobs_of: dict[object, list[int]] = {}
    for i, device in enumerate(where):
        jobs_of.setdefault(device, []).append(i)
    if len(jobs_of) < 2 or _belong_to_this_thread():
        return [job(i) for i in range(len(where))]
    # Grad mode, autocast, current device and streams belong to a thread, so the new ones must be given the caller's
    modes = _modes()

    def worker(context: contextvars.Context, indices: list[int]) -> list[Result]:
        return context.run(in_modes, indices)

    def in_modes(indices: list[int]) -> list[Result]:
        with modes():
            return [job(i) for i in indices]

    # Leaving the block waits for all threads, so that an error is raised only when no thread is still computing. `map`
    # keeps no future: that would hold an error whose traceback holds this frame, a cycle that keeps all tensors alive
    with ThreadPoolExecutor(len(jobs_of)) as pool:
        # One for each, because a context cannot be entered twice at the same time
        contexts = [contextvars.copy_context() for _ in jobs_of]
        found = list(pool.map(worker, contexts, jobs_of.values()))
    results: dict[int, Result] = {}
    for indices, own in zip(jobs_of.values(), found, strict=True):
        results.update(zip(indices, own, strict=True))
    return [results[i] for i in range(len(where))]


def _belong_to_this_thread() -> bool:
    """Return whether jobs must run in this thread, because saved-tensor hooks, modes or transforms are active.

    These record what happens, in order. With several threads that order would differ each time, and a checkpoint would
    take one replica's tensors for those of another.
    """
    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    modes += _get_current_dispatch_mode_stack()
    return bool(modes) or hooks_around() or torch._C._functorch.peek_interpreter_stack() is not None


def _modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that sets this thread's modes, devices and streams in another thread."""
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    kind = accelerator()
    autocast = autocast_of_now(sorted({"cpu", kind or "cpu"}))
    index = torch.accelerator.current_device_index() if kind else 0
    # Stream 0 is a new thread's default anyway, and selecting it would claim memory on devices that are not used
    streams = [stream for stream in current_streams(available()) if stream.stream_id]
    default = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(autocast())
            if kind is not None:
                torch.accelerator.set_device_index(index)
            stack.enter_context(select_streams(streams))
            for device in default:
                stack.enter_context(device)
            yield

    return enter


def _devices_of(inputs: Sequence[Any]) -> list[torch.device]:
    """Return the device of each input's first tensor; the CPU for an input without tensors."""
    cpu = torch.device("cpu")
    return [next((t.device for t in leaves(i) if isinstance(t, Tensor)), cpu) for i in inputs]
