"""Find out what a DistributedDataParallel or an FSDP2 module communicates, and refuse gradients it would not reduce.

A parameter that the loss needs and nothing reduces would keep the gradient of its own rank's tokens, without an error,
and the ranks would drift apart.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.core.graphs import leaves_of_graph
from seqpar.core.reach import used_by
from seqpar.core.structures import attributes_of
from seqpar.distributed.collectives import gather_numbers, world_size
from seqpar.distributed.torch_private import (
    ddp_parameters,
    expect_forward,
    forget_step,
    has_run_forward,
    is_fsdp_unit,
    is_inside_no_sync,
    parameter_groups,
    reduced_parameters,
    reduces_by_hooks,
    will_reduce,
)
from seqpar.distributed.wrappers import WRAP_BOTH


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise TypeError for FSDP1, whose hybrid strategies reduce over ranks other than those of its group."""
    # If FSDP was never imported, nothing is wrapped; importing it here would slow down every start
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and isinstance(model, kind):
        instead = "call fully_shard (FSDP2) on the module inside, or wrap it in DistributedDataParallel"
        raise TypeError(f"model is a FullyShardedDataParallel (FSDP1), which is not supported; {instead}")


def reducer_in(model: nn.Module) -> nn.Module | None:
    """Return the module that reduces the gradients over ranks: the model, or one inside it; None if there is none.

    That is a DistributedDataParallel, or the outermost module that `fully_shard` was called on. Raises ValueError for
    several of them, such as an encoder and a decoder that were sharded separately.
    """
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        if isinstance(module, DistributedDataParallel) or is_fsdp_unit(module):
            found.append(module)
        else:
            waiting.extend(module.children())
    if len(found) > 1:
        kinds = " and ".join(sorted(type(module).__name__ for module in found))
        raise ValueError(
            f"{len(found)} modules each reduce their own gradients, {kinds}; {WRAP_BOTH}, which then reduces all"
        )
    return found[0] if found else None


def reducer_over(ranks: int, model: nn.Module, way_out: str) -> nn.Module | None:
    """Return the module that reduces the gradients of a model over ranks; None for one rank.

    Raises TypeError for DeepSpeed and, with several ranks, for FSDP1 and for a model whose gradients nothing reduces
    (`way_out` says what to do then); ValueError as `reducer_in` does.
    """
    if any(type(module).__name__ == "DeepSpeedEngine" for module in model.modules()):
        raise TypeError(
            "model is a DeepSpeedEngine, whose backward divides and reduces in its own way; use DDP or FSDP2, or give "
            "the engine loss.total / tokens of the whole step yourself"
        )
    if ranks == 1:
        return None
    refuse_fsdp1(model)
    reducer = reducer_in(model)
    if reducer is None:
        raise TypeError(
            f"there are {ranks} ranks and no DDP or FSDP2 reduces the gradients of this {type(model).__name__}; "
            f"{way_out}, or call seqpar.accumulate_gradients"
        )
    return reducer


def gathers_for_any(model: nn.Module, wanted: bool) -> bool:
    """Return whether any rank wants a further forward of the model, in which all ranks that share it must take part.

    A forward of an FSDP2 module gathers the parameters over these ranks. Nothing is communicated for other modules.
    """
    groups = {}
    for _, parameters in parameter_groups(model):
        group = parameters.gather_group()
        if group is not None:
            groups[group.group_name] = group
    for name in sorted(groups):
        wanted = any(theirs for (theirs,) in gather_numbers([int(wanted)], groups[name]))
    return wanted


def check_reduces_all(model: nn.Module) -> None:
    """Raise ValueError, naming it, for a trainable parameter of the model whose gradient the model does not reduce."""
    reduced = _reduced_ids(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if id(p) not in reduced:
            raise ValueError(
                f"the gradient of {name} is not reduced over the ranks: it was added to the model after it was "
                "wrapped, or left out of the wrapping (ignored_params); wrap it with the others, or freeze it"
            )
    if isinstance(model, DistributedDataParallel):
        if model not in _reduced_by:
            _reduced_by[model] = frozenset(map(id, reduced_parameters(model)))
        unfrozen = [name for name, p in trained.items() if id(p) not in _reduced_by[model]]
        if unfrozen:
            raise ValueError(
                f"{unfrozen[0]} is trainable and was not when DistributedDataParallel was made, so its gradient is not "
                "reduced over the ranks; wrap the model again after unfreezing a part of it"
            )


_reduced_by: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()
"""The ids of the parameters that each DDP reduces; it holds the parameters, so the ids stay theirs."""


def _reduced_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are reduced if they are trained."""
    if isinstance(model, DistributedDataParallel):
        return {id(p) for p in ddp_parameters(model)}
    groups = [group for _, group in parameter_groups(model)]
    if not groups:
        # Another library's wrapper, about which nothing is known
        return {id(p) for p in model.parameters()}
    return {id(p) for group in groups for p in group.parameters()}


def check_has_all(total: Tensor, model: nn.Module) -> None:
    """Raise ValueError if the loss depends on a parameter that the model does not have."""
    known = _reduced_ids(model) | {id(p) for p in model.parameters()}
    for leaf in leaves_of_graph(total):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise ValueError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} that model does not have, so nothing "
                f"reduces its gradient over the ranks; {WRAP_BOTH}"
            )


@contextlib.contextmanager
def without_remains(model: nn.Module | None) -> Iterator[None]:
    """Make an FSDP2 module forget the step if the block raises an error.

    The module keeps gradients that it has accumulated but not reduced where `zero_grad` does not find them, and would
    add them to those of the next step. After an error in the middle of a backward, the next backward would not reduce
    its gradients either.
    """
    try:
        yield
    except BaseException as error:
        if model is not None:
            try:
                forget_step(model)
            except Exception as further:
                # It must not hide the step's own error
                error.add_note(f"gradients of this step may remain: {further}; make the model and its wrapper again")
        raise


@contextlib.contextmanager
def check_forward(model: nn.Module | None) -> Iterator[None]:
    """Raise RuntimeError unless a DistributedDataParallel prepares its reduction in the block, as its forward does."""
    if not isinstance(model, DistributedDataParallel) or not reduces_by_hooks(model):
        yield
        return
    expect_forward(model)
    yield
    if not has_run_forward(model):
        raise RuntimeError(
            "loss_of did not call model, the DistributedDataParallel, but perhaps the module inside it, so gradients "
            "would not be reduced over the ranks; call model in loss_of"
        )


def refuse_no_sync(model: nn.Module) -> None:
    """Raise RuntimeError inside DDP's `no_sync()`, or what FSDP2 has for it, where no gradient would be reduced."""
    if isinstance(model, DistributedDataParallel) and is_inside_no_sync(model):
        raise RuntimeError(
            "accumulate_gradients was called inside model.no_sync(), so gradients would not be reduced over the ranks; "
            "call it outside: it enters no_sync itself for all micro-batches but the last"
        )
    for name, group in parameter_groups(model):
        if not group.reduces():
            raise RuntimeError(
                f"FSDP2 is told not to reduce the gradients of {name or 'the model'}; call "
                "model.set_requires_gradient_sync(True), and set_requires_all_reduce(True), before accumulate_gradients"
            )


MOST_REACHED = 2_000
"""How many objects are searched for what a function calls: it may reach a trainer, and through it everything."""


def watch_reducers(function: Any) -> list[nn.Module]:
    """Return the modules that reduce gradients over several ranks and that a function could call, for `refuse_unnamed`.

    Each DistributedDataParallel is marked, so that `will_reduce` can tell whether its forward has run since.
    """
    found: dict[int, nn.Module] = {}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    seen: dict[int, Any] = {}
    todo = deque([function])
    while todo and len(seen) < MOST_REACHED:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, DistributedDataParallel):
            if world_size(value.process_group) > 1 and reduces_by_hooks(value):
                expect_forward(value)
                found[id(value)] = value
        elif isinstance(value, nn.Module) and is_fsdp_unit(value):
            found[id(value)] = value
        else:
            todo.extend(_contents(value))
    return [*found.values()]


def _contents(value: Any) -> Iterator[Any]:
    """Yield what a value holds, or what a function uses."""
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        yield from used_by(value)
    elif isinstance(value, nn.Module):
        yield from value.children()
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif not isinstance(value, (type, ModuleType, Tensor)):
        yield from attributes_of(value).values()
        if callable(value):
            yield type(value).__call__


def refuse_unnamed(reducers: Sequence[nn.Module], total: Tensor) -> None:
    """Raise ValueError if one of these modules, which take the mean over ranks, will reduce the gradient of a loss."""
    for reducer in reducers:
        if isinstance(reducer, DistributedDataParallel) and not will_reduce(reducer):
            continue
        reduced = _reduced_ids(reducer)
        if any(id(leaf) in reduced for leaf in leaves_of_graph(total)):
            kind = "DistributedDataParallel" if isinstance(reducer, DistributedDataParallel) else "fully_shard module"
            raise ValueError(
                f"loss_of calls a {kind}, which takes the mean of gradients over its ranks, but model is not given, so "
                "that the gradient of the step would be divided by the number of ranks; pass that module as model="
            )
