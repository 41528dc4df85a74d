"""Find out what calling a module runs, and whether that is more than its class's `forward`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.multi_device.replicas import refuse_scripted

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks; torch keeps those of all modules under the same names, beginning with _global."""
OF_ALL = tuple((f"_global{hooks}", getattr(torch_modules, f"_global{hooks}")) for hooks in HOOKS)
"""Registered by torch.nn.modules.module.register_module_forward_hook and its siblings; torch keeps these dicts."""
SETTINGS = (bool, str, Enum, torch.dtype, torch.device)
"""Values that choose what code runs; numbers are left out, because many change in every step."""
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
MOST_SETTINGS = 64
"""How many entries of a dict are looked at in every call: a longer one is data."""
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps in a module."""


TRACKERS = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker")
"""Where the classes are whose hooks only note which module runs, for `FlopCounterMode` and the like."""


class Parts(NamedTuple):
    """A module with all that it contains, each once."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: list[Tensor]


def parts_of(module: nn.Module) -> Parts:
    """Return the parts of a module in an order of their own, in a tenth of the time of torch's generators."""
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    todo: list[nn.Module] = [module]
    while todo:
        part = todo.pop()
        if id(part) in modules:
            continue
        modules[id(part)] = part
        # Which has its parts elsewhere
        refuse_scripted(part)
        own = vars(part)
        if children := own["_modules"]:
            todo += [child for child in children.values() if child is not None]
        for parameter in own["_parameters"].values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
        for buffer in own["_buffers"].values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    return Parts(list(modules.values()), list(parameters.values()), list(buffers.values()))


def extra_in_call(module: nn.Module) -> str:
    """Return what a call of the module, or of a submodule, runs besides the forward of its class, or "" for nothing."""
    if hooks_of_all():
        return "hooks are registered for all modules"
    for submodule in module.modules():
        kind = type(submodule).__name__
        if any(getattr(submodule, hooks) for hooks in HOOKS):
            return f"{kind} has hooks"
        # For a `fully_shard` unit it is `inside_unit` that sets this attribute
        if _has_own_forward(submodule) and not is_fsdp_unit(submodule):
            return f"{kind} has a forward of its own, set on the instance"
    return ""


def hooks_of_all() -> tuple[tuple[str, int], ...]:
    """Return the hooks of all modules by their numbers, which torch uses once, but those that only note what runs."""
    found = []
    for name, hooks in OF_ALL:
        # Asked twice a call, and empty nearly always
        for number, hook in hooks.items() if hooks else ():
            if type(getattr(hook, "__self__", None)).__module__ not in TRACKERS:
                found.append((name, number))
    return tuple(found)


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether the instance has a forward of its own."""
    if "forward" in vars(module):
        return True
    # The same question once more: torch.compile notices later that this answer changes, but not that the one above does
    forward = module.forward
    return isinstance(forward, MethodType) and forward.__func__ is not type(module).forward


def refuse_cached(parts: Parts) -> None:
    """Raise RuntimeError for parametrized modules inside `torch.nn.utils.parametrize.cached()`.

    It keeps the tensor of the first chunk, whose graph is freed with that chunk: the others would have no gradient.
    """
    if not parametrize._cache_enabled:
        return
    for module in parts.modules:
        if "parametrizations" in vars(module)["_modules"]:
            raise RuntimeError(
                f"the {type(module).__name__} is called for each chunk inside torch.nn.utils.parametrize.cached(), "
                "which would keep its parametrized tensors from chunk to chunk: leave that block before the loss"
            )


def calls_of(modules: list[nn.Module]) -> tuple[object, ...]:
    """Return what decides which code calls of these modules run, for comparison with another time.

    For each of them: the class, the names of its submodules, the hooks, and the attributes that are settings (the mode
    is one) or may be called; and those of an object or a dict that it holds, such as a configuration. Numbers are left
    out, because many change in every step, such as one that counts them.
    """
    found: list[object] = [hooks_of_all()]
    kind_of, of_torch = _KIND, OF_TORCH
    held: dict[int, Any] = {}
    for module in modules:
        own = vars(module)
        found.append(type(module))
        found += own["_modules"]
        for hooks in HOOKS:
            if own[hooks]:
                found.append((hooks, *own[hooks]))
        for name, value in own.items():
            if name not in of_torch and (kind := kind_of[type(value)]):
                if kind is HOLDS:
                    # A configuration is held by many modules of a model
                    held[id(value)] = value
                else:
                    found.append((name, ref(value) if kind is CALLED else value))
    for holder in held.values():
        found += _settings_of(holder if isinstance(holder, dict) else vars(holder))
    return tuple(found)


def _settings_of(held: Mapping[Any, Any]) -> Iterator[object]:
    """Yield the settings and functions among what is held, by their names."""
    if len(held) <= MOST_SETTINGS:
        for name, value in held.items():
            kind = _KIND[type(value)]
            if kind is SET or kind is CALLED:
                yield name, ref(value) if kind is CALLED else value


SET, CALLED, HOLDS = "a setting", "a function", "a holder of settings"
"""What attributes may be. A function may hold a batch: its reference equals another one only while it lives."""


class _Kind(dict[type, str]):
    """Of each class of attributes what they are, empty for anything else: asked thousands of times a call."""

    def __missing__(self, kind: type) -> str:
        """Find out about a class that is asked for the first time."""
        found = ""
        if issubclass(kind, SETTINGS):
            found = SET
        elif issubclass(kind, FUNCTIONS) or _is_function(kind):
            found = CALLED
        elif issubclass(kind, dict) or (kind.__dictoffset__ and not issubclass(kind, (Tensor, nn.Module))):
            found = HOLDS
        return self.setdefault(kind, found)


def _is_function(kind: type) -> bool:
    """Return whether objects of a class may be called, such as a partial, and are equal to nothing but themselves."""
    if issubclass(kind, (Tensor, nn.Module)) or kind.__eq__ is not object.__eq__ or not kind.__weakrefoffset__:
        return False
    return any("__call__" in vars(base) for base in kind.__mro__)


_KIND = _Kind()
