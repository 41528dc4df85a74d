"""The engine beside FSDP2 and DDP: their hooks run once a step, never once a chunk.

FSDP2's hooks sit on a module's call: one all-gather before, one reduce-scatter after its backward. The engine calls a
structural copy of the generator once a chunk, so a generator that is a unit of its own is entered once, with the whole
walk inside, and the copies inside have no hooks of their own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.core.tensor_checks import is_dtensor as is_dtensor

WRAP_BOTH = (
    "wrap both in one module, seqpar.ModelWithLoss(model, loss), and give that to DistributedDataParallel or "
    "fully_shard"
)


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def refuse_data_parallel(module: nn.Module, what: str) -> None:
    """Raises RuntimeError if a part of `module` is wrapped in DistributedDataParallel."""
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise RuntimeError(
            f"{what} is, or has inside, a DistributedDataParallel, whose reducer must see one forward that ends in the "
            f"loss; {WRAP_BOTH}"
        )


def refuse_sharded(head: nn.Module) -> None:
    """Raises RuntimeError if a parameter of the head is sharded now."""
    for name, parameter in head.named_parameters():
        if is_dtensor(parameter):
            raise RuntimeError(
                f"{name} is sharded (a DTensor): the loss was called outside the forward in which FSDP2 unshards it; "
                f"{WRAP_BOTH}. Inside the generator no part may be a fully_shard unit of its own: its all-gather would "
                "run once a chunk; make the whole generator the unit"
            )


def inside_unit(generator: nn.Module, walk: Callable[..., Any], *inputs: Any) -> Any:
    """`walk(*inputs)`; where the generator is a `fully_shard` unit of its own, between its hooks."""
    if not is_fsdp_unit(generator):
        return walk(*inputs)
    unit: Any = generator
    unit.forward = walk  # shadows the class's own; the hooks run round whatever forward is
    try:
        return unit(*inputs)
    finally:
        del unit.forward


def structural_copy(part: nn.Module) -> Any:
    """A replica without parameters, as torch makes it; of a `fully_shard` unit, the module from before, without hooks.

    `inside_unit` has run a unit's hooks already, and the unit's class makes no bare instances.
    """
    if not is_fsdp_unit(part):
        return part._replicate_for_data_parallel()
    before: Any = type(part).__mro__[2]  # fully_shard made a class of (FSDPModule, the module's own)
    copy: Any = before.__new__(before)
    kept = {name: value for name, value in part.__dict__.items() if name != "forward"}
    copy.__dict__ = kept | {
        "_parameters": {},
        "_buffers": part._buffers.copy(),
        "_modules": part._modules.copy(),
        "_forward_pre_hooks": OrderedDict(),
        "_forward_hooks": OrderedDict(),
        "_is_replica": True,
    }
    return copy
