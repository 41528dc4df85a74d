"""Make the hooks of FSDP2 and DDP run once a step instead of once a chunk.

FSDP2's hooks run around a module's call: an all-gather before its forward, a reduce-scatter after its backward. The
engine calls a structural copy of the generator once per chunk. So a generator that is a `fully_shard` unit of its own
is called once, with the loop over all chunks as its forward, and the copies that the loop calls have no hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.core.checks import is_dtensor
from seqpar.distributed.torch_private import class_before_fully_shard, hook_of_its_own, is_fsdp_unit

WRAP_BOTH = (
    "wrap both in one module, seqpar.ModelWithLoss(model, loss), and give that to DistributedDataParallel or "
    "fully_shard"
)


def refuse_data_parallel(module: nn.Module, what: str) -> None:
    """Raise RuntimeError if the module or one of its submodules is a DistributedDataParallel."""
    if any(isinstance(submodule, DistributedDataParallel) for submodule in module.modules()):
        raise RuntimeError(
            f"{what} is or contains a DistributedDataParallel, whose reducer must see one forward that ends in the "
            f"loss; {WRAP_BOTH}"
        )


IN_ONE_UNIT = (
    f"{WRAP_BOTH}. Inside the generator no part may be a fully_shard unit of its own: its all-gather would run once a "
    "chunk; make the whole generator the unit. If its classes are split by tensor parallelism, pass its local rows to "
    "seqpar.linear_cross_entropy, with vocab=VocabShard.of(rows, group)"
)


def refuse_sharded(head: nn.Module, way_out: str = IN_ONE_UNIT) -> None:
    """Raise RuntimeError if a parameter of the head is currently sharded."""
    for name, parameter in head.named_parameters():
        if is_dtensor(parameter):
            raise RuntimeError(
                f"{name} is sharded (a DTensor): the loss was called outside the forward in which FSDP2 unshards it; "
                f"{way_out}"
            )


def inside_unit(generator: nn.Module, compute: Callable[..., Any], hidden: Any, **given: Any) -> Any:
    """Return `compute(hidden, **given)`, called between the hooks of the generator if that is a `fully_shard` unit.

    The hooks cast all of these to the dtype of a mixed-precision policy, so they must be what the generator itself is
    given; anything else belongs into `compute`.
    """
    if not is_fsdp_unit(generator):
        return compute(hidden, **given)
    unit: Any = generator
    if (hook := hook_of_its_own(unit)) is not None:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise TypeError(
            f"the generator ({type(unit).__name__}) is a fully_shard unit with a hook of its own, {name}, which would "
            "run around the whole loss instead of each chunk's scores: register it on a module inside the generator"
        )
    if "forward" in vars(unit):
        kind = type(unit).__name__
        raise TypeError(
            f"{kind} is a fully_shard unit with a forward of its own, set on the instance; change the class"
        )
    # An attribute of the instance takes precedence over the class's forward; the hooks run around it
    unit.forward = compute
    try:
        return unit(hidden, **given)
    finally:
        del unit.forward


def structural_copy(module: nn.Module) -> Any:
    """Return a replica of the module without parameters, as torch makes it; that of a `fully_shard` unit has no hooks.

    `inside_unit` has already run a unit's hooks. The copy has the class that the module had before `fully_shard`,
    because torch forbids creating an instance of the unit's class.
    """
    is_unit = is_fsdp_unit(module)
    # A class that replicates in its own way, as RNNs do
    if not is_unit and type(module)._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        return module._replicate_for_data_parallel()
    kind: Any = class_before_fully_shard(module) if is_unit else type(module)
    copy: Any = kind.__new__(kind)
    # As torch does it, but without `setattr`, which tests whether each value is a parameter, a module or a buffer
    own = vars(copy)
    own.update(vars(module))
    own |= {
        "_parameters": {},
        "_buffers": module._buffers.copy(),
        "_modules": module._modules.copy(),
        "_is_replica": True,
    }
    if is_unit:
        own |= {"_forward_pre_hooks": OrderedDict(), "_forward_hooks": OrderedDict()}
        # While `inside_unit` runs, it is the whole loop over chunks, which the copy must not call
        own.pop("forward", None)
    return copy
