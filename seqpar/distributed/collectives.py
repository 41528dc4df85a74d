"""Sum, join and compare values over a process group; the only file that calls `torch.distributed` collectives.

A differentiable collective has an adjoint, which runs in backward: a value that every rank uses receives gradients from
every rank, so copying it is the adjoint of summing it, and vice versa.

A `group` of None means this process alone: nothing is communicated. (`torch.distributed.group.WORLD` is all ranks.)
`accumulate_gradients`, where a forgotten group would give a wrong gradient, asks for `THIS_PROCESS` instead.

| forward | backward | name |
|---|---|---|
| identity | sum over the group | `copy_to_group`: a value every rank has, used differently on each |
| sum over the group | identity | `sum_from_group`: partial results that every rank needs whole |
| concatenation over the group | sum over the group, sliced | `join_from_group`: slices that every rank needs whole |
| sum or maximum, no gradient | - | `group_sum`, `group_max` |
| every rank's tensor or numbers, no gradient | - | `group_gather`, `gather_numbers` |
| every rank's object, one rank's object | - | `gather_objects`, `broadcast_object` |
| the whole of a DTensor | this rank's part | `whole_tensor` |

Ranks that wait for a missing rank raise an error after the group's timeout. torch's default for gloo is half an hour; a
trainer sets its own when it creates the group: `init_process_group(..., timeout=timedelta(minutes=2))`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.core.checks import check_dense, check_integer, check_type, is_dtensor, kind_of, refuse_second_derivative
from seqpar.core.device_facts import FACTS
from seqpar.core.structures import leaves

Value = TypeVar("Value")


class ThisProcess(Enum):
    """A `group` of this process alone, for `accumulate_gradients`: no other rank has tokens of the step.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> loss_of = lambda m: seqpar.TokenLoss((weight * m).sum(), torch.tensor(3))
        >>> seqpar.accumulate_gradients([torch.ones(3)], loss_of, len, group=seqpar.THIS_PROCESS).tokens
        tensor(3)
    """

    THIS_PROCESS = "seqpar.THIS_PROCESS"

    def __repr__(self) -> str:
        """Return the name by which code refers to it."""
        return self.value


THIS_PROCESS = ThisProcess.THIS_PROCESS


def check_group(group: object) -> None:
    """Raise TypeError unless it is a group of ranks, or None."""
    wanted = "a torch.distributed ProcessGroup (of a mesh: mesh.get_group()), or None for this process alone"
    check_type(group, "group", (ProcessGroup, NoneType), wanted)


def world_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 for None."""
    if group is None:
        return 1
    check_group(group)
    return group.size()


def ranks_of(group: ProcessGroup) -> frozenset[int]:
    """Return the group's ranks, as numbered among all processes."""
    return frozenset(dist.get_process_group_ranks(group))


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in the group; 0 for None."""
    if group is None:
        return 0
    check_group(group)
    return group.rank()


def group_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum over the group as a new tensor, without a gradient.

    Example:
        >>> target = torch.tensor([[4, 7, 2], [9, 2, -100]])
        >>> seqpar.group_sum((target != -100).sum(), torch.distributed.group.WORLD)  # the tokens of a single rank
        tensor(5)
    """
    return _reduce(tensor, group, dist.ReduceOp.SUM)


def group_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the maximum over the group as a new tensor, without a gradient."""
    return _reduce(tensor, group, dist.ReduceOp.MAX)


def _reduce(tensor: Tensor, group: ProcessGroup | None, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Return the tensor reduced over the group, as a new tensor."""
    check_dense(tensor, "tensor")
    # all_reduce overwrites its argument, which may be the caller's own tensor, and adds numbers by their place in
    # memory: ranks may have the same shape with different strides
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world_size(group) > 1:
        dist.all_reduce(result, operation, group=group)
    return result


def group_gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return every rank's tensor, in rank order, without a gradient; all must have the same shape and dtype."""
    if world_size(group) == 1:
        return [tensor.detach()]
    everyone = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world_size(group))]
    dist.all_gather(everyone, tensor.detach().contiguous(), group=group)
    return everyone


def gather_numbers(numbers: Sequence[int], group: ProcessGroup | None) -> list[list[int]]:
    """Return every rank's whole numbers, in rank order; all ranks must pass equally many."""
    check_group(group)
    device = None
    # NCCL has no collectives for CPU tensors
    if group is not None and dist.get_backend(group) == "nccl":
        device = torch.accelerator.current_accelerator()
    return [t.tolist() for t in group_gather(torch.tensor(numbers, dtype=torch.int64, device=device), group)]


def gather_objects(value: Value, group: ProcessGroup | None) -> list[Value]:
    """Return every rank's value, in rank order; it is pickled on the way."""
    if world_size(group) == 1:
        return [value]
    # Every entry is overwritten with a rank's value
    everyone = [value] * world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(value: Any, source: int, group: ProcessGroup | None) -> Any:
    """Return the value of the group's rank `source` on every rank; it is pickled on the way."""
    if world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor on its device, differentiably: a DTensor is gathered, any other tensor is returned.

    Over gloo, an accelerator's DTensor is gathered from copies on the CPU: gloo has no
    `allgather_into_tensor_coalesced` for other devices, so that torch's `full_tensor` would end the process
    (https://github.com/pytorch/pytorch/issues/152645).
    """
    if not is_dtensor(tensor):
        return tensor
    sharded: Any = tensor
    if gathers_on_cpu(sharded.device_mesh):
        return _gather_on_cpu(sharded).to(sharded.to_local().device)
    whole: Tensor = sharded.full_tensor()
    return whole


def gathers_on_cpu(mesh: Any) -> bool:
    """Return whether a group of the mesh gathers an accelerator's tensors over gloo."""
    over_gloo = f"{mesh.device_type}:gloo"
    return not FACTS[mesh.device_type].is_host and any(
        over_gloo in dist.get_backend_config(group).split(",") for group in mesh.get_all_groups()
    )


def _gather_on_cpu(sharded: Any) -> Tensor:
    """Return the whole of a DTensor, gathered over the same groups from copies of its parts on the CPU."""
    # Importing DTensor takes longer than importing this library
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    mesh = sharded.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    here = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    settings = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
    whole: Tensor = DTensor.from_local(sharded.to_local().cpu(), here, sharded.placements, **settings).full_tensor()
    return whole


def copy_to_group(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the tensor itself; its gradient is the sum of all ranks' gradients.

    Example:
        >>> hidden, target = torch.randn(6, 8), torch.randint(50, (6,))  # of this rank
        >>> weight = torch.randn(50, 8, requires_grad=True)  # of every rank
        >>> copy = seqpar.copy_to_group(weight, torch.distributed.group.WORLD)
        >>> seqpar.linear_cross_entropy(hidden, copy, target).total.backward()
        >>> weight.grad.shape  # the gradient of all ranks' tokens
        torch.Size([50, 8])
    """
    check_dense(tensor, "tensor")
    if world_size(group) > 1:
        tensor = _CopyToGroup.apply(tensor, group)
    return tensor


def sum_from_group(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum over the group; each rank's gradient is that of the sum, which all ranks must use the same way."""
    if world_size(group) > 1:
        tensor = _SumFromGroup.apply(tensor, group)
    return tensor


def join_from_group(tensor: Tensor, sizes: Sequence[int], dim: int, group: ProcessGroup | None) -> Tensor:
    """Concatenate all ranks' slices along `dim`, in rank order; rank r's slice has `sizes[r]` entries, which may be 0.

    Each rank's gradient is the sum over the ranks of the gradient of its slice, so ranks may use the result in
    different ways.
    """
    if world_size(group) > 1:
        tensor = _JoinFromGroup.apply(tensor, sizes, dim, group)
    return tensor


PLAINLY = "a single process"
"""What has the second derivatives that a sum over ranks has not."""


class _CopyToGroup(torch.autograd.Function):
    """Identity in forward, the sum over the group in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("copy_to_group", PLAINLY)
        return group_sum(upstream, ctx.group), None


class _SumFromGroup(torch.autograd.Function):
    """The sum over the group in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return group_sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        # d (a + b) / d a = 1, and all ranks have the same upstream gradient
        return upstream, None


class _JoinFromGroup(torch.autograd.Function):
    """Concatenation over the group in forward, the sum over the group of this rank's slice in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.start = sum(sizes[: group.rank()])
        ctx.size = tensor.size(dim)
        ctx.group = group
        shape = list(tensor.shape)
        # all_gather takes tensors of the same shape only, so shorter slices are padded
        shape[dim] = max(sizes)
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, ctx.size).copy_(tensor)
        gathered = group_gather(padded, group)
        return torch.cat([t.narrow(dim, 0, size) for t, size in zip(gathered, sizes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative("join_from_group", PLAINLY)
        # Every rank used the whole result, so this rank's slice has a gradient from each of them
        return group_sum(upstream, ctx.group).narrow(ctx.dim, ctx.start, ctx.size), None, None, None


def check_agreement(
    facts: Mapping[str, object], group: ProcessGroup | None, numbers: Sequence[int] = ()
) -> list[list[int]]:
    """Raise RuntimeError on every rank, naming the ranks, unless all of them have the same facts.

    Call it at the start and wherever sizes may change: ranks that disagree would otherwise wait for each other until
    the timeout, or sum unrelated numbers. While the ranks agree, it costs one all-gather of a digest and `numbers`.

    Args:
        facts: what must be the same on all ranks, by name.
        group: the ranks to compare.
        numbers: whole numbers that may differ between ranks, exchanged in the same collective.

    Returns:
        every rank's `numbers`, in rank order.

    Raises:
        TypeError, ValueError: `facts` is not a dict with text keys, or contains a tensor or an array, or `numbers` are
            not int64.

    Example:
        >>> group = torch.distributed.group.WORLD
        >>> seqpar.check_agreement({"vocabulary": 32_000, "seed": 1}, group, numbers=[512])  # on a single rank
        [[512]]
    """
    check_type(facts, "facts", Mapping, "a dict of names and the values that must be the same")
    check_type(numbers, "numbers", (list, tuple), "a list of whole numbers")
    for name, value in facts.items():
        check_type(name, "a key of facts", str, "a name, as text")
        _check_fact(name, value)
    for i, number in enumerate(numbers):
        check_integer(number, f"numbers[{i}]")
    if world_size(group) == 1:
        return [list(numbers)]
    # 7 bytes, so that the digest fits into a signed int64
    digest = hashlib.blake2b(_text_of(facts).encode(), digest_size=7).digest()
    gathered = gather_numbers([int.from_bytes(digest), *numbers], group)
    if len({theirs[0] for theirs in gathered}) == 1:
        return [theirs[1:] for theirs in gathered]
    # Every rank has seen the difference, so all of them take part in this second, more expensive collective
    everyone = gather_objects(dict(facts), group)
    # The first difference, in the order of the facts: later ones often follow from it
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            values.setdefault(_text_of(theirs.get(name, "nothing")), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            raise RuntimeError(f"ranks disagree on {name}: {said}; start all of them with the same settings and data")
    raise AssertionError("equal facts have one digest")


def _text_of(fact: object) -> str:
    """Return a fact as text, the same in every process for equal ones: sets have no order, nor have the keys of dicts.

    A process hashes text in its own way, so that its sets of words have an order of its own.
    """
    if isinstance(fact, Mapping):
        return "{" + ", ".join(sorted(f"{_text_of(key)}: {_text_of(value)}" for key, value in fact.items())) + "}"
    if isinstance(fact, Set):
        return "{" + ", ".join(sorted(map(_text_of, fact))) + "}"
    if is_dataclass(fact) and not isinstance(fact, type):
        return type(fact).__name__ + _text_of({field.name: getattr(fact, field.name) for field in fields(fact)})
    if isinstance(fact, list):
        return f"[{', '.join(map(_text_of, fact))}]"
    if isinstance(fact, tuple):
        return f"({', '.join(map(_text_of, fact))})"
    # A number of numpy's is the one of Python's
    return repr(fact.item() if isinstance(fact, Number) and hasattr(fact, "item") else fact)


def _check_fact(name: str, fact: object) -> None:
    """Raise TypeError for a tensor or an array: facts are compared as text, which may omit its digits and entries."""
    for value in leaves(fact):
        if hasattr(value, "__array__") and not isinstance(value, Number):
            raise TypeError(f"{name} has {kind_of(value)}; compare its numbers: .tolist(), or a hash of them")
