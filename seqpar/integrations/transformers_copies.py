"""Leave the chunked loss out of copies and pickles of a Hugging Face model.

Its hooks belong to one model: in a copy they would read the original's weights, and a pickle would need this library.
Copies and pickles contain the model as it was before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

HOOKS = "_forward_pre_hooks", "_forward_hooks"
KINDS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
"""The attributes in which a module keeps its hooks by number, and what it records about them."""

REDUCE = "__reduce_ex__"
"""The method that `copy.deepcopy` and `pickle` look up; an instance attribute takes precedence over the class's."""


class LeftOut:
    """An owner of hooks that copies leave out.

    It has `hooks`, their handles, and `restored(module, state)`, which removes from a copy's attributes whatever else
    this owner has put into the module.
    """


def owners(module: nn.Module) -> list[Any]:
    """Return the owners of those hooks on a module that copies leave out."""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    found = (getattr(hook, "__self__", None) for hook in hooks)
    return list(dict.fromkeys(owner for owner in found if isinstance(owner, LeftOut)))


def leave_out_of_copies(module: nn.Module) -> None:
    """Make copies and pickles of a module leave out the hooks of `LeftOut`, until `copy_as_before`."""
    vars(module)[REDUCE] = partial(_reduce, module)


def copy_as_before(module: nn.Module) -> None:
    """Undo `leave_out_of_copies`, unless the module still has such hooks."""
    if not owners(module):
        vars(module).pop(REDUCE, None)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Return what recreates a copy of a module without those hooks."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    make, arguments, attributes, *rest = reduced
    state = {name: value for name, value in attributes.items() if name != REDUCE}
    for owner in owners(module):
        ours = {hook.id for hook in owner.hooks}
        for name in (*HOOKS, *KINDS):
            state[name] = type(state[name])((key, value) for key, value in state[name].items() if key not in ours)
        owner.restored(module, state)
    return make, arguments, state, *rest
