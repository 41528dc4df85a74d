"""Replicate, scatter and gather: three of the four primitives of `torch.nn.parallel`, for any device list.

A device may be listed more than once (`["cpu"] * 3`, `["cuda:0"] * 2`), and the CPU may be combined with one kind of
accelerator. All devices are treated alike, by copies from one to the other.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from seqpar.core.checks import (
    check_dense,
    check_dim,
    check_integer,
    check_joinable,
    check_module,
    check_type,
    has_own_functions,
    is_dtensor,
    kind_of,
)
from seqpar.core.chunks import even_sizes
from seqpar.core.device_facts import current_streams, select_streams
from seqpar.core.structures import describe, leaves, rebuild
from seqpar.core.token_loss import wide
from seqpar.distributed.wrappers import structural_copy
from seqpar.multi_device.devices import Device, check_devices, move, refuse_capturing
from seqpar.multi_device.sent_weights import on_device

Module = TypeVar("Module", bound=nn.Module)


# replicate


def bind(module: Module, tensors: Mapping[int, Tensor]) -> Module:
    """Return a copy of the module's structure in which each parameter and buffer `t` is `tensors[id(t)]`.

    Tensors that are not in `tensors` are shared. Ties, parametrizations, hooks and the flat weights of RNNs keep
    working; only the containers are copied, so binding costs microseconds per submodule.

    Args:
        module: a module that `check_replicable` has accepted.

    Raises:
        TypeError: a parameter whose class computes in its own way, if its replacement's does not.
    """
    return cast(Module, _bind_module(module, tensors, {}))


def _bind_module(original: nn.Module, tensors: Mapping[int, Tensor], copies: dict[int, nn.Module]) -> nn.Module:
    """Return the copy of a module and of all that it contains; `copies` has those made so far."""
    # Not a function inside `bind`: a recursive closure would keep all copies until the garbage collector runs
    replica: nn.Module = structural_copy(original)
    # By identity, so that a submodule that occurs twice is one submodule in the copy as well
    copies[id(original)] = replica
    own = vars(replica)
    own["_parameters"] = _bind_tensors(original._parameters, tensors) if original._parameters else {}
    own["_buffers"] = _bind_tensors(original._buffers, tensors) if original._buffers else {}
    modules: dict[str, nn.Module | None] = {}
    for name, child in original._modules.items():
        if child is None:
            modules[name] = None
        else:
            made = copies.get(id(child))
            modules[name] = _bind_module(child, tensors, copies) if made is None else made
    own["_modules"] = modules
    if isinstance(replica, nn.RNNBase):
        _rebuild_flat_weights(replica)
    return replica


def _bind_tensors(own: Mapping[str, Tensor | None], tensors: Mapping[int, Tensor]) -> dict[str, Tensor | None]:
    """Return a module's own tensors with their replacements."""
    found: dict[str, Tensor | None] = {}
    for name, tensor in own.items():
        replacement = tensors.get(id(tensor), tensor)
        if type(tensor) is not nn.Parameter and type(replacement) is not type(tensor) and has_own_functions(tensor):
            kinds = f"{kind_of(tensor)}, whose class changes how it computes; detached, it is"
            instead = "which does not; derive the class from torch.Tensor, not from nn.Parameter"
            raise TypeError(f"a parameter is {kinds} {kind_of(replacement)}, {instead}")
        if replacement is not tensor and replacement is not None and vars(tensor):
            # A forward may read a parameter's attributes; those that the replacement already has are kept
            vars(replacement).update({**vars(tensor), **vars(replacement)})
        found[name] = replacement
    return found


def _rebuild_flat_weights(replica: Any) -> None:
    """Make an RNN's second list of its weights, which its forward reads, agree with its parameters."""
    replica._flat_weights = [getattr(replica, name, None) for name in replica._flat_weights_names]
    replica._flat_weight_refs = [w if w is None else weakref.ref(w) for w in replica._flat_weights]


def refuse_scripted(module: nn.Module) -> None:
    """Raise TypeError, with the remedy, if the module itself was compiled by TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        wrong = "is scripted or traced and cannot be replicated"
        raise TypeError(f"{type(module).__name__} {wrong}; pass the module as it was before torch.jit")


def _refuse(module: nn.Module) -> None:
    """Raise TypeError, with the remedy, unless the module itself (not its submodules) can be replicated."""
    kind = type(module).__name__
    refuse_scripted(module)
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        instead = "pass the module as it was before torch.compile (module._orig_mod)"
        raise TypeError(f"{kind} is compiled, and the compiled code keeps the original's parameters; {instead}")
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        # Such as the bias of nn.Linear(..., bias=False)
        if tensor is None:
            continue
        if is_lazy(tensor):
            raise TypeError(f"{kind}.{name} is lazy, it has no shape yet; run one batch through the module first")
        if tensor.is_meta:
            raise TypeError(f"{kind}.{name} is on the meta device and has no data; use module.to_empty(device=...)")
        if is_dtensor(tensor):
            raise TypeError(f"{kind}.{name} is sharded (a DTensor); use it on one device per rank, without a list")
        if name in module._parameters and tensor.layout not in (torch.strided, torch.sparse_coo):
            instead = "chunks add up gradients in dense and COO layouts only; call .to_dense() or .to_sparse_coo()"
            raise TypeError(f"{kind}.{name} is {tensor.layout}, and {instead}")


def replicate(module: Module, device_ids: Sequence[Device]) -> list[Module]:
    """Return one replica per listed device; the gradients of their parameters are summed into the original's.

    Like `torch.nn.parallel.replicate`, but for any device list. A replica's parameters are tensors linked to the
    original by autograd (not leaves), and `.parameters()` lists them. The first replica on the original's own device
    shares its buffers, so that updates of running statistics persist; the other replicas have copies.

    Raises:
        TypeError, ValueError: an invalid device list, or a module that cannot be replicated (see `bind`).

    Example:
        >>> model, batch = nn.Linear(8, 4), torch.randn(6, 8)
        >>> first, second = seqpar.replicate(model, ["cpu", "cpu"])
        >>> (first(batch[:3]).sum() + second(batch[3:]).sum()).backward()
        >>> model.bias.grad  # of all 6 rows
        tensor([6., 6., 6., 6.])
    """
    check_module(module, "module")
    devices = check_devices(device_ids, "device_ids")
    check_replicable(module)
    parameters = list(module.parameters())
    return _replicas(module, parameters, _linked_parameters(parameters, devices), devices)


def detached_replicas(module: Module, devices: Sequence[torch.device]) -> list[Module]:
    """Return one replica per device, as `replicate` does, for a caller that hands out the gradients itself.

    Their parameters are leaves, detached from the original's; those on the original's device share its memory.
    """
    parameters = list(module.parameters())
    there = {d: [on_device(p, d) for p in parameters] for d in dict.fromkeys(devices)}
    # Detached once more, so that each replica has tensors of its own
    copies = [
        [t.detach().requires_grad_(p.requires_grad) for t, p in zip(there[d], parameters, strict=True)] for d in devices
    ]
    return _replicas(module, parameters, copies, devices)


def _replicas(
    module: Module,
    parameters: Sequence[nn.Parameter],
    copies: Sequence[Sequence[Tensor]],
    devices: Sequence[torch.device],
) -> list[Module]:
    """Return replicas with these copies of the parameters, and buffers as `replicate` says."""
    own_buffers: set[torch.device] = set()
    replicas = []
    for device, own in zip(devices, copies, strict=True):
        # By identity, as `bind` looks them up: a tied parameter is one tensor in the replica as well
        tensors = {id(p): copy for p, copy in zip(parameters, own, strict=True)}
        for buffer in module.buffers():
            shared = device == buffer.device and device not in own_buffers
            if not shared:
                tensors[id(buffer)] = buffer.to(device, copy=True)
        own_buffers.add(device)
        replicas.append(bind(module, tensors))
    return replicas


def needs_no_replica(tensors: Iterable[Tensor], devices: Sequence[torch.device]) -> bool:
    """Return whether there is one device, and all of these tensors of a module are there."""
    return len(devices) == 1 and all(tensor.device == devices[0] for tensor in tensors)


def check_replicable(module: nn.Module) -> None:
    """Raise TypeError, with the remedy, if a submodule is compiled, scripted, lazy, on the meta device or sharded."""
    check_parts_replicable(module.modules())


def check_parts_replicable(modules: Iterable[nn.Module]) -> None:
    """Raise TypeError, with the remedy, if one of these modules cannot be replicated, whatever it contains."""
    for module in modules:
        _refuse(module)


def _linked_parameters(parameters: list[nn.Parameter], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Return the parameters on each device: one transfer per distinct device, an alias for each repeat."""
    distinct = list(dict.fromkeys(devices))
    # One flat tuple: all parameters on the first device, then all on the second, ...
    flat = [p.to(distinct[0]) for p in parameters] if len(distinct) == 1 else _Copies.apply(distinct, *parameters)
    count = len(parameters)
    there = {d: flat[i * count : (i + 1) * count] for i, d in enumerate(distinct)}
    # An alias is not a leaf, so all replicas are alike
    return [[_Alias.apply(t) for t in there[d]] for d in devices]


class _Alias(torch.autograd.Function):
    """The same tensor, whose gradient may be sparse (an embedding's): the backward of a view takes dense ones only."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream


class _Copies(torch.autograd.Function):
    """Copy parameters to devices, and sum the copies' gradients in the order of the devices.

    Autograd runs a thread for each device, and would sum in the order in which they finish: with three gradients the
    last bits would change from run to run.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.homes = [p.device for p in parameters]
        ctx.streams = current_streams(devices)
        copies = [p.view_as(p) if p.device == d else on_device(p, d) for d in devices for p in parameters]
        trained = [p.requires_grad for p in parameters] * len(devices)
        ctx.mark_non_differentiable(*[copy for copy, wanted in zip(copies, trained, strict=True) if not wanted])
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.homes)
        found = []
        with select_streams(ctx.streams):
            for i, home in enumerate(ctx.homes):
                parts = [grad.to(home) for grad in grads[i::count] if grad is not None]
                found.append(_sum(parts) if parts else None)
        return None, *found


def _sum(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of gradients in their dtype, to which it is rounded once."""
    first, *others = grads
    if not others:
        return first
    return sum((grad.to(wide(grad.dtype)) for grad in others), start=first.to(wide(first.dtype))).to(first.dtype)


# scatter and gather


def batch_rows(inputs: Any, dim: int = 0) -> int | None:
    """Return the common size of all tensors along `dim`; None if there is no tensor with dimensions.

    Raises:
        TypeError: a tensor is sparse, nested, quantised, on the meta device or sharded.
        ValueError: sizes disagree, or a tensor has no dimension `dim`.
    """
    tensors = [t for t in leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    for t in tensors:
        named = {"a tensor of the inputs": t}
        check_dense(t, *named)
        check_dim(dim, **named)
        if t.size(dim) != tensors[0].size(dim):
            raise ValueError(
                f"cannot scatter along dim {dim}: shapes {tuple(tensors[0].shape)} and {tuple(t.shape)} have "
                f"{tensors[0].size(dim)} and {t.size(dim)} rows; expand what has no rows, or pass it as a non-tensor"
            )
    if not tensors:
        return None
    return tensors[0].size(dim)


SHARED_CACHE = (
    "the inputs hold a cache of transformers, which all replicas would fill together: leave past_key_values out, or "
    "pass keys and values as tuples of tensors"
)


def scatter(inputs: Any, device_ids: Sequence[Device], dim: int = 0, sizes: Sequence[int] | None = None) -> list[Any]:
    """Split the inputs along `dim` into even shards, shard i on `device_ids[i]`; differentiable.

    Like `torch.nn.parallel.scatter`, but for any device list. Takes nested dict, list, tuple, NamedTuple and dataclass.
    Non-tensors and tensors without dimensions go to every shard. With fewer rows than devices, only the first devices
    are used. `sizes` overrides the even split.

    Raises:
        TypeError: a tensor that is not dense (sparse, nested, meta, ...), a cache of Hugging Face transformers for
            several replicas, or a `dim` or sizes that are not ints.
        ValueError: tensors of different sizes along `dim`, or `sizes` that do not add up to the rows.

    Example:
        >>> [len(shard) for shard in seqpar.scatter(torch.randn(6, 8), ["cpu"] * 4)]  # torch would split 2, 2, 2
        [2, 2, 1, 1]
    """
    devices = check_devices(device_ids, "device_ids")
    refuse_capturing(devices)
    check_integer(dim, "dim")
    rows = batch_rows(inputs, dim)
    # How many rows each shard gets; without rows every device gets the whole input
    if rows is None:
        shard_rows = [0] * len(devices)
    elif sizes is None:
        shard_rows = even_sizes(rows, len(devices))
    else:
        check_type(sizes, "sizes", (list, tuple), "a list of one number of rows for each device")
        for i, size in enumerate(sizes):
            check_integer(size, f"sizes[{i}]")
        shard_rows = list(sizes)
    fits = sum(shard_rows) == (rows or 0) and len(shard_rows) <= len(devices) and min(shard_rows, default=0) >= 0
    if not fits:
        raise ValueError(
            f"sizes is {shard_rows} for {rows} rows on {len(devices)} devices; give at most one size for each device, "
            f"0 or more, and {rows} in all"
        )
    used = devices[: len(shard_rows)]
    if len(used) > 1 and any(map(is_cache, leaves(inputs))):
        raise TypeError(SHARED_CACHE)
    # From one list per leaf to one structure per device; inputs without any leaf, such as (), are their own shards
    scattered = [_scatter_leaf(leaf, used, dim, shard_rows) for leaf in leaves(inputs)]
    return [rebuild(inputs, iter(shard)) for shard in zip(*scattered, strict=True)] or [inputs for _ in used]


def _scatter_leaf(leaf: object, devices: Sequence[torch.device], dim: int, sizes: list[int]) -> Sequence[object]:
    """Return the rows of a leaf on each device; a leaf without rows is the same on all of them."""
    if not isinstance(leaf, Tensor):
        return [leaf] * len(devices)
    if leaf.dim() == 0:
        return [leaf.to(d) for d in devices]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    # Not `split`, whose pieces may not be changed in place
    pieces = [leaf.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
    return [move(piece, d) for piece, d in zip(pieces, devices, strict=True)]


def gather(outputs: Sequence[Any], output_device: Device, dim: int = 0) -> Any:
    """Concatenate the replicas' outputs along `dim` on one device; differentiable, the inverse of `scatter`.

    Like `torch.nn.parallel.gather`. Tensors without dimensions become a vector with one entry per replica.

    Raises:
        TypeError: outputs that are not a list, or tensors that are not dense.
        ValueError: structures or shapes that do not match, or non-tensors that differ between replicas.

    Example:
        >>> batch = torch.randn(6, 8)
        >>> shards = seqpar.scatter(batch, ["cpu", "cpu"])
        >>> torch.equal(seqpar.gather(shards, "cpu"), batch)
        True
    """
    (device,) = check_devices([output_device], "output_device")
    check_integer(dim, "dim")
    check_type(outputs, "outputs", (list, tuple), "a list with the output of each replica")
    if not outputs:
        raise ValueError("outputs is empty; gather needs the output of at least one replica")
    first = outputs[0]
    for i, other in enumerate(outputs):
        if describe(other) != describe(first):
            raise ValueError(f"replica 0 returned {describe(first)} and replica {i} {describe(other)}; they must match")
    # One column per leaf, with every replica's value of it
    columns = zip(*(leaves(output) for output in outputs), strict=True)
    return rebuild(first, iter([_gather_leaf(column, device, dim) for column in columns]))


def _gather_leaf(column: Sequence[object], device: torch.device, dim: int) -> object:
    """Return the replicas' tensors as one; for other values the first, if all are equal."""
    if is_cache(column[0]):
        return _gather_cache(column, device, dim)
    if not isinstance(column[0], Tensor):
        # Identity first: equality of an array is not a bool
        for i, other in enumerate(column):
            if other is not column[0] and other != column[0]:
                raise ValueError(
                    f"replica 0 returned {column[0]!r} and replica {i} {other!r}; return tensors to have them joined"
                )
        return column[0]
    named = {f"the output of replica {i}": output for i, output in enumerate(column)}
    for name, output in named.items():
        check_dense(output, name)
    # A loss without dimensions becomes one entry of a vector
    outputs = [torch.atleast_1d(t) for t in column]
    check_joinable(dim, **dict(zip(named, outputs, strict=True)))
    return torch.cat([t.to(device) for t in outputs], dim)


def is_cache(value: object) -> bool:
    """Return whether a value is a cache of Hugging Face transformers, or a layer of one."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def _gather_cache(column: Sequence[Any], device: torch.device, dim: int) -> object:
    """Return one cache with all sequences of the replicas' caches, which are of one model and one length."""
    made = copy.copy(column[0])
    for name, value in vars(made).items():
        values = [vars(cache).get(name) for cache in column]
        if isinstance(value, torch.device):
            vars(made)[name] = device
        elif isinstance(value, Tensor) and not value.dim():
            # How many tokens there are; `gather` would make it a vector
            vars(made)[name] = torch.tensor(gather([t.item() for t in values], device), device=device)
        else:
            vars(made)[name] = gather(values, device, dim)
    return made
