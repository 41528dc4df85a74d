"""Find out whether calling a module does more than its class's `forward`: hooks, or a forward of its own."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_modules

from seqpar.distributed.wrappers import is_fsdp_unit

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
        if "forward" in vars(submodule) and not is_fsdp_unit(submodule):
            return f"{kind} has a forward of its own, set on the instance"
    return ""
