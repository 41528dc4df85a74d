"""Test what calls of a pair change outside its modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from torch import nn

from seqpar.core.device_facts import is_on_host
from seqpar.core.reach import Place, function_in, read_only
from seqpar.core.settings import OF_TORCH
from seqpar.core.surroundings import Surroundings, ask_about_state_around, own_classes, refuse_iterators
from seqpar.engine.module_calls import HOOKS, OF_ALL
from seqpar.engine.trial import Outcome, Trial


def surroundings_of(head: nn.Module) -> Surroundings:
    """Return the current values of the names that the code of modules uses."""
    return Surroundings(lambda: (_code_of(head), _hooks_of(head)))


def _code_of(head: nn.Module) -> Iterator[Any]:
    """Yield the classes of modules, the functions set on them, and the classes of objects set on them."""
    for module in head.modules():
        yield from own_classes(module)
        own = [value for name, value in vars(module).items() if name not in OF_TORCH]
        yield from filter(None, map(function_in, own))
        for value in own:
            yield from own_classes(value)


def _hooks_of(head: nn.Module) -> Iterator[Place]:
    """Yield the hooks of these modules and those of all modules: functions, methods, or objects that are called."""
    of_one = ((owner, vars(module)[name]) for owner, module in head.named_modules() for name in HOOKS)
    of_all = (("all modules", hooks) for _, hooks in OF_ALL)
    for owner, hooks in (*of_one, *of_all):
        for hook in hooks.values():
            yield read_only(f"a hook of {owner}", hook)


def ask_about_surroundings(trial: Trial, before: Surroundings, harmless: Collection[str] = ()) -> list[str]:
    """Raise ValueError if results depend on what calls change outside the modules; else return what they change."""
    return ask_about_state_around("the pair", partial(_call, trial), Outcome.difference, before, harmless)


def ask_about_iterators(trial: Trial, before: Surroundings) -> None:
    """Raise ValueError if the pair has an iterator, which cannot be rewound, and results change from call to call."""
    is_exact = is_on_host(trial.target_K)
    call = partial(_call, trial)
    refuse_iterators("the pair", call, Outcome.difference, Outcome.is_same, is_exact, trial.held, before)


def _call(trial: Trial) -> Outcome:
    """Return what a copy gives, always with the same random numbers."""
    with trial.keep_state():
        return trial.call(trial.copy())
