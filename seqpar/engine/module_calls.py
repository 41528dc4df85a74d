"""Find out what calling a module runs, and whether that is more than its class's `forward`."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType

from torch import nn
from torch.nn.modules import module as torch_modules

from seqpar.distributed.torch_private import is_fsdp_unit

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks; torch keeps those of all modules under the same names, beginning with _global."""


def extra_in_call(module: nn.Module) -> str:
    """Return what a call of the module, or of a submodule, runs besides the forward of its class, or "" for nothing."""
    for hooks in HOOKS:
        # Registered by torch.nn.modules.module.register_module_forward_hook and its siblings
        if getattr(torch_modules, f"_global{hooks}"):
            return "hooks are registered for all modules"
    for submodule in module.modules():
        kind = type(submodule).__name__
        if any(getattr(submodule, hooks) for hooks in HOOKS):
            return f"{kind} has hooks"
        # For a `fully_shard` unit it is `inside_unit` that sets this attribute
        if _has_own_forward(submodule) and not is_fsdp_unit(submodule):
            return f"{kind} has a forward of its own, set on the instance"
    return ""


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether the instance has a forward of its own."""
    if "forward" in vars(module):
        return True
    # The same question once more: torch.compile notices later that this answer changes, but not that the one above does
    forward = module.forward
    return isinstance(forward, MethodType) and forward.__func__ is not type(module).forward


def what_calls_run(module: nn.Module) -> tuple[object, ...]:
    """Return what decides which code a call of the module runs, for comparison with another time.

    That is, for it and each submodule: the class, the hooks, and the attributes that are flags (the mode is one), text
    or functions. Numbers are left out, because many change in every step, such as one that counts them.
    """
    # Hooks by their numbers, which torch uses once
    found: list[object] = [tuple(getattr(torch_modules, f"_global{hooks}")) for hooks in HOOKS]
    switches = (bool, str, FunctionType, BuiltinFunctionType, MethodType)
    for name, submodule in module.named_modules():
        found += (name, type(submodule), *(tuple(getattr(submodule, hooks)) for hooks in HOOKS))
        found += (item for item in vars(submodule).items() if isinstance(item[1], switches))
    return tuple(found)
