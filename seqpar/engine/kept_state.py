"""Test what a pair keeps between calls: buffers that add up over rows are allowed, other state that it reads is not.

A histogram of predictions adds up; a buffer that is replaced is lost with the copy, and a moving average or a power
iteration would run once for each chunk. A maximum is right over chunks, but is not a sum over devices.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpar.core.checks import is_dense
from seqpar.core.device_facts import is_on_host
from seqpar.core.effects import (
    KEEPS_A_GRAPH,
    OF_A_COPY,
    Held,
    is_same,
    keep_random_states,
    names_of_new_graphs,
)
from seqpar.core.graphs import version_of
from seqpar.core.settings import OF_TORCH
from seqpar.core.surroundings import REPEATS
from seqpar.engine.module_calls import parts_of
from seqpar.engine.pair import criterion_loss
from seqpar.engine.situation import BufferChanges
from seqpar.engine.trial import PROBE_ROWS, Outcome, Trial

CLOSE = 1e-3
"""The relative difference that rounding may make in a buffer's sum, in any dtype."""
NUMBERS = (bool, int, float, complex)
MOST_NUMBERS = 1024
"""The most numbers of a tensor that is compared in every chunk."""


def has_same_attributes(called: nn.Module, original: nn.Module) -> bool:
    """Return whether the modules of a copy that was called still have the original's attributes, object by object."""
    pairs = _with_originals(called, parts_of(original).modules)
    return bool(pairs) and all(_has_attributes_of(copy, module) for copy, module in pairs)


def _with_originals(called: nn.Module, originals: Sequence[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Return each module of a copy with its original; nothing if a call has added one, which moves the others."""
    copies = parts_of(called).modules
    return list(zip(copies, originals, strict=True)) if len(copies) == len(originals) else []


def _has_attributes_of(copy: nn.Module, module: nn.Module) -> bool:
    """Return whether a structural copy has the attributes of the module, and no others."""
    own = vars(copy)
    others = {name: value for name, value in vars(module).items() if name not in OF_A_COPY}
    return own.keys() - OF_A_COPY == others.keys() and all(
        own[name] is value or _is_same_number(own[name], value) for name, value in others.items()
    )


def _is_same_number(one: Any, other: Any) -> bool:
    """Return whether both are numbers, and the same; nan equals nan, and 0 equals 0.0."""
    if type(one) not in NUMBERS or type(other) not in NUMBERS:
        return False
    return bool(one == other or (one != one and other != other))


def ask_about_renewed(trial: Trial, called: nn.ModuleDict) -> None:
    """Raise ValueError for a tensor that a call replaces by itself plus something, which is 0 for the probed rows.

    Such a tensor keeps its numbers, whatever they are at the start; one computed anew gets those of the call.
    """
    renewed = [
        (place, name)
        for place, (copy, module) in enumerate(_with_originals(called, parts_of(trial.head).modules))
        for name, value in vars(copy).items()
        if value is not vars(module).get(name) and _have_same_numbers(value, vars(module).get(name))
    ]
    if not renewed:
        return
    other = trial.copy()
    modules = parts_of(other).modules
    starts = {(place, name): _other_numbers(vars(modules[place])[name].detach())[1] for place, name in renewed}
    for (place, name), start in starts.items():
        vars(modules[place])[name] = start
    try:
        _call(trial, other)
    except Exception:  # the caller's code may refuse such numbers
        return
    for (place, name), start in starts.items():
        value = vars(modules[place]).get(name)
        if isinstance(value, Tensor) and _have_same_numbers(value, start) and not _share_memory(value, start):
            raise _evolves_error(f"{type(modules[place]).__name__}.{name}")


def _have_same_numbers(one: Any, other: Any) -> bool:
    """Return whether both are tensors whose numbers can be compared, and are the same."""
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and is_dense(one) and is_dense(other) and is_same(one, other)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether one tensor is the other or a view of it, such as `detach` returns."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def refuse_lost_numbers(called: nn.Module, originals: Sequence[nn.Module], written: Set[tuple[int, str]]) -> None:
    """Raise ValueError if an attribute of a copy differs from the original's: the change would be lost with the copy.

    The probe has not seen it change, as with a count of correct predictions while there are none. Tensors are compared
    only if they are small and on the host.

    Args:
        written: attributes that the probe has seen change, and that are not read again: the position of their module
            among the originals, and their names.
    """
    for place, (copy, module) in enumerate(_with_originals(called, originals)):
        before = vars(module)
        made = _made_by_hooks(module)
        for name, value in vars(copy).items():
            old = before.get(name)
            if value is old or name in OF_TORCH or name in made or (place, name) in written:
                continue
            if not (_is_same_number(value, old) or _is_slow(value) or _is_slow(old) or is_same(value, old)):
                raise _evolves_error(f"{type(module).__name__}.{name}")


def _is_slow(value: Any) -> bool:
    """Return whether comparing a value would take long, or wait for a device."""
    return isinstance(value, Tensor) and (value.numel() > MOST_NUMBERS or not is_on_host(value))


class Buffer(NamedTuple):
    """A buffer of a module, a copy of its numbers, and how often it had been written."""

    tensor: Tensor
    numbers: Tensor
    version: int

    def is_same(self, other: Buffer | None) -> bool:
        """Return whether the other has the same numbers; nan equals nan."""
        return other is not None and is_same(self.numbers, other.numbers)

    def is_written(self, later: Buffer) -> bool:
        """Return whether it was replaced or written in place, even with the same numbers."""
        return self.tensor is not later.tensor or self.version != later.version


def ask_about_buffers(trial: Trial) -> BufferChanges:
    """Return how calls change buffers; raise if one depends on the chunks, or if the scores depend on one."""
    called = trial.copy()
    before = _buffers_of(called)
    if not before:
        return BufferChanges()
    _call(trial, called)
    # Again with other weights, as after a step of training. With the present ones the power iteration of spectral_norm
    # may have converged, and would look like a sum that the scores do not depend on
    moved = {id(p): p.detach() * (1 + torch.rand_like(p)) for p in trial.head.parameters() if p.requires_grad}
    whole, in_halves = trial.copy(moved), trial.copy(moved)
    tensors = _buffers_of(whole)
    scores = _call(trial, whole)
    at_once = _buffers_of(whole)
    after = _buffers_of(called)
    changed = [
        name
        for name, old in before.items()
        if not (old.is_same(after.get(name)) and tensors[name].is_same(at_once.get(name)))
    ]
    written = [name for name, old in before.items() if name not in changed and old.is_written(after[name])]
    added_to, unproven = _ask_about_written(trial, written, after)
    if not changed:
        return BufferChanges(bool(added_to), unproven=unproven)
    again = _call(trial, whole)
    for some in (slice(0, PROBE_ROWS // 2), slice(PROBE_ROWS // 2, PROBE_ROWS)):
        _call(trial, in_halves, some)
    twice = _buffers_of(whole)
    added = _buffers_of(in_halves)
    repeated = _is_repeated(trial, scores, again)
    not_added_to = ""
    for name in changed:
        kept = name in at_once and at_once[name].tensor is tensors[name].tensor
        if not (kept and _close(at_once[name].numbers, added[name].numbers) and repeated):
            raise _changes_error(name)
        if not _has_same_steps(*(each[name].numbers for each in (tensors, at_once, twice))):
            not_added_to = name
    return BufferChanges(True, not_added_to, unproven)


def _ask_about_written(
    trial: Trial, names: list[str], after: dict[str, Buffer]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return, of the buffers that a call wrote but did not change, those it adds to and those for which it is unproven.

    A count of correct predictions keeps its number, whatever that is, while there are none. Raise for a buffer that is
    replaced by something that depends on its number: the copies of chunks would lose it.
    """
    added_to = set(names)
    unproven: set[str] = set()
    for start in (0, 1) if names else ():
        copy = trial.copy()
        tensors = _buffers_of(copy)
        try:
            for name in names:
                tensors[name].tensor.copy_(_other_numbers(tensors[name].numbers)[start])
            started = _buffers_of(copy)
            _call(trial, copy)
        except Exception:  # the caller's code may refuse such numbers, and a sparse tensor has none
            return frozenset(), frozenset(names)
        ended = _buffers_of(copy)
        for name in names:
            if _share_memory(ended[name].tensor, started[name].tensor):
                unproven |= set() if ended[name].is_same(started[name]) else {name}
            elif ended[name].is_same(after[name]):
                added_to.discard(name)
            else:
                raise _changes_error(name)
    return frozenset(added_to - unproven), frozenset(unproven)


def _other_numbers(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sets of numbers that a buffer could have held instead: below and above these, if possible."""
    if numbers.dtype == torch.bool:
        return ~numbers, ~numbers
    if numbers.is_floating_point() or numbers.is_complex():
        far = 1_000 * (1 + numbers.abs())
        return numbers - far, numbers + far
    # Small numbers, because they may be indices
    return torch.zeros_like(numbers), torch.ones_like(numbers)


def _changes_error(name: str) -> ValueError:
    return ValueError(
        f"the buffer {name} changes when the {name.split('.')[0]} is called, which happens once for each chunk and on "
        "copies, so that it would depend on the chunks: set the module to evaluation mode (.eval()), or compute what "
        "changes before the engine"
    )


def _has_same_steps(before: Tensor, once: Tensor, twice: Tensor) -> bool:
    """Return whether a second call with the same rows has changed a buffer by as much as the first."""
    if before.shape != once.shape:
        return False
    rounding = 8 * torch.finfo(once.dtype).eps if once.is_floating_point() or once.is_complex() else 0.0
    before, once, twice = _in_float64(before), _in_float64(once), _in_float64(twice)
    first, second = once - before, twice - once
    same = (second - first).abs() <= CLOSE * first.abs() + rounding * once.abs()
    # Adding to nan or inf leaves them as they are
    return bool((same | ~once.isfinite()).all())


def _is_repeated(trial: Trial, scores: Tensor, again: Tensor) -> bool:
    """Return whether both calls gave the same scores; up to rounding, if no two calls give the same numbers."""
    if torch.equal(scores, again):
        return True
    first, second = (_call(trial, trial.copy()) for _ in range(2))
    return not torch.equal(first, second) and _close(scores, again)


def _call(trial: Trial, copy: nn.ModuleDict, some: slice = slice(None)) -> Tensor:
    """Call both modules with some rows, always with the same random numbers; return the scores."""
    rows = [t[some] for t in trial.rows]
    with keep_random_states(trial.target_K.device, trial.held.generators):
        logits_KV = trial.scores(copy, trial.shape(len(rows[0])), rows)
        own = {name: t[some] for name, t in trial.of_criterion.items()}
        criterion_loss(copy["criterion"], logits_KV, trial.target_K[some], own)
    return logits_KV


def _observe(trial: Trial, calls: int) -> tuple[list[Outcome], Held]:
    """Call one copy repeatedly with the same rows and random numbers; return the outcomes and what it holds then."""
    outcomes = []
    with trial.keep_state():
        copy = trial.copy()
        for _ in range(calls):
            with keep_random_states(trial.target_K.device, trial.held.generators):
                outcomes.append(trial.call(copy))
        return outcomes, Held(copy, trial.original)


def ask_about_state(trial: Trial) -> frozenset[tuple[int, str]]:
    """Return which attributes calls change; raise ValueError for one that is read again, or keeps a graph.

    The copies of chunks would lose it. An attribute that is written but never read, such as attention that is kept for
    a plot, is the same after a second call with the same rows; these are returned, as `refuse_lost_numbers` takes them.
    """
    _, before = _observe(trial, 0)
    (outcome,), first = _observe(trial, 1)
    if outcome.written:
        raise ValueError(
            f"backward writes into {outcome.written[0]}, which would happen for each chunk and before the loss is "
            "divided: return the gradient instead (without a fused gradient accumulation)"
        )
    if graphs := [name for name in names_of_new_graphs(before, first) if not _is_made_by_a_hook(trial, name)]:
        raise ValueError(f"{graphs[0]} {KEEPS_A_GRAPH}")
    if not before.changed_names(first):
        return frozenset()
    (_, second), settled = _observe(trial, 2)
    evolving = sorted(first.changed_names(settled))
    depends = not outcome.is_same(second)
    for _ in range(REPEATS if evolving or depends else 0):
        (fresh,), again = _observe(trial, 1)
        # What differs between two first calls is random, such as a time measurement
        evolving = [name for name in evolving if name not in first.changed_names(again)]
        depends = depends and outcome.is_same(fresh)
    if evolving or depends:
        name = evolving[0] if evolving else before.changed_names(first)[0]
        raise _evolves_error(name)
    place_of = {id(module): place for place, module in enumerate(parts_of(trial.original).modules)}
    places = {name: place_of[id(module)] for name, module in trial.original.named_modules()}
    changed = (name.rpartition(".") for name in before.changed_names(first))
    # Without those of a module that the call has created
    return frozenset((places[owner], name) for owner, _, name in changed if owner in places)


def _evolves_error(name: str) -> ValueError:
    return ValueError(
        f"{name} changes with every call and is not a buffer that adds up; the pair is called once for each chunk, on "
        "copies, so that it would depend on the chunks or be lost: change it outside, once a step, or register it as a "
        "buffer if it is a sum over rows"
    )


def _is_made_by_a_hook(trial: Trial, name: str) -> bool:
    """Return whether a hook makes this attribute from parameters before each call, as weight_norm's does."""
    owner, _, attribute = name.rpartition(".")
    return attribute in _made_by_hooks(trial.head.get_submodule(owner))


def _made_by_hooks(module: nn.Module) -> set[Any]:
    """Return the attributes that hooks make from parameters before each call; the original's are of an earlier one."""
    hooks = module._forward_pre_hooks.values()
    return {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}


def _buffers_of(head: nn.Module) -> dict[str, Buffer]:
    """Return all buffers but those of batch normalisation, which is refused in training mode for mixing rows."""
    owners = ((name, module) for name, module in head.named_modules() if not isinstance(module, _BatchNorm))
    named = ((f"{owner}.{name}", b) for owner, module in owners for name, b in module.named_buffers(recurse=False))
    return {name: Buffer(b, b.clone(), version_of(b)) for name, b in named}


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and, up to rounding, the same numbers."""
    return a.shape == b.shape and torch.allclose(_in_float64(a), _in_float64(b), rtol=CLOSE, atol=0, equal_nan=True)


def _in_float64(numbers: Tensor) -> Tensor:
    """Return numbers in float64, and complex ones in complex128."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float64))
