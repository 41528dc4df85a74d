"""Find out what calling a module runs, what is around that code, and whether it is more than its class's `forward`."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from seqpar.core.reach import Place, function_in, read_only
from seqpar.core.settings import HOLDER, OF_TORCH, OWN_CLASSES, ROLES, noted, settings_of, settings_of_class
from seqpar.core.surroundings import Surroundings
from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.multi_device.replicas import refuse_scripted

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks; torch keeps those of all modules under the same names, beginning with _global."""
OF_ALL = tuple((f"_global{hooks}", getattr(torch_modules, f"_global{hooks}")) for hooks in HOOKS)
"""Registered by torch.nn.modules.module.register_module_forward_hook and its siblings; torch keeps these dicts."""


TRACKERS = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker")
"""Modules of the classes whose hooks only note which module runs, for `FlopCounterMode` and the like."""


class Parts(NamedTuple):
    """A module and everything that it contains, each once."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: list[Tensor]


def parts_of(module: nn.Module) -> Parts:
    """Return the parts of a module, in a different order from torch's generators, and in a tenth of their time."""
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    todo: list[nn.Module] = [module]
    while todo:
        part = todo.pop()
        if id(part) in modules:
            continue
        modules[id(part)] = part
        # A scripted module keeps its parts elsewhere
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
    """Return the hooks of all modules by their numbers, which torch never reuses; not those that only note calls."""
    found = []
    for name, hooks in OF_ALL:
        # Runs twice a call, and is nearly always empty
        for number, hook in hooks.items() if hooks else ():
            if type(getattr(hook, "__self__", None)).__module__ not in TRACKERS:
                found.append((name, number))
    return tuple(found)


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether the instance has a forward of its own."""
    if "forward" in vars(module):
        return True
    # Tested once more: torch.compile notices when this result changes later, but not when the one above does
    forward = module.forward
    return isinstance(forward, MethodType) and forward.__func__ is not type(module).forward


def surroundings_of(head: nn.Module) -> Surroundings:
    """Return the current values of the names that the code of modules uses."""
    return Surroundings(lambda: (_code_of(head), _hooks_of(head)))


def _code_of(head: nn.Module) -> Iterator[Any]:
    """Yield the classes of modules, the functions set on them, and the classes of objects set on them."""
    for module in head.modules():
        yield from OWN_CLASSES[type(module)]
        own = [value for name, value in vars(module).items() if name not in OF_TORCH]
        yield from filter(None, map(function_in, own))
        for value in own:
            yield from OWN_CLASSES[type(value)]


def _hooks_of(head: nn.Module) -> Iterator[Place]:
    """Yield the hooks of these modules and those of all modules: functions, methods, or objects that are called."""
    of_one = ((owner, vars(module)[name]) for owner, module in head.named_modules() for name in HOOKS)
    of_all = (("all modules", hooks) for _, hooks in OF_ALL)
    for owner, hooks in (*of_one, *of_all):
        for hook in hooks.values():
            yield read_only(f"a hook of {owner}", hook)


def refuse_cached(parts: Parts) -> None:
    """Raise RuntimeError for parametrized modules inside `torch.nn.utils.parametrize.cached()`.

    It keeps the tensors of the first chunk, whose graph is freed with that chunk: the others would have no gradient.
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
    """Return everything that decides which code calls of these modules run, for comparison with another time.

    For each of them: the class and what it defines, the names of its submodules, the hooks, and the settings and
    functions (`seqpar.core.settings`) that it holds, itself or in objects and containers, such as a configuration.
    """
    found: list[object] = [hooks_of_all()]
    role_of, of_torch = ROLES, OF_TORCH
    held: dict[int, Any] = {}
    kinds: dict[type, None] = {}
    for module in modules:
        own = vars(module)
        kinds[type(module)] = None
        found += (type(module), *own["_modules"])
        for hooks in HOOKS:
            if own[hooks]:
                found.append((hooks, *own[hooks]))
        for name, value in own.items():
            if name not in of_torch and (role := role_of[type(value)]):
                if role is HOLDER:
                    # By id, because many modules of a model hold the same configuration
                    held[id(value)] = value
                else:
                    found.append(noted(name, value, role))
    for holder in held.values():
        found += settings_of(holder)
    for kind in kinds:
        forward = kind.forward  # type: ignore[attr-defined]
        found.append(ref(forward) if type(forward) is FunctionType else None)
        found += settings_of_class(kind)
    return tuple(found)
