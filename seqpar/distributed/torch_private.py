"""Everything that seqpar reads or changes in FSDP2 and DDP beyond what torch documents.

torch may rename it in any version, so every name is looked up by `_private`, which says which one is missing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


def _private(owner: object, name: str) -> Any:
    """Return an attribute that torch does not document; raise RuntimeError, naming it, if this torch lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which seqpar needs for DDP and FSDP2; "
            "use a version of torch that CONTRIBUTING.md lists as tested"
        ) from error


def is_fsdp_unit(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the module."""
    # If FSDP was never imported, no module is a unit; importing it here would slow down every start
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def hook_of_its_own(unit: nn.Module) -> Any:
    """Return a hook of a `fully_shard` unit that is not one of FSDP2's; None if there is none."""
    before, after = unit._forward_pre_hooks.values(), unit._forward_hooks.values()
    for hook in (*before, *after, *unit._backward_pre_hooks.values(), *unit._backward_hooks.values()):
        # A method of its state, or a function for a unit of several modules
        owner = type(hook.__self__) if hasattr(hook, "__self__") else hook
        if not str(getattr(owner, "__module__", "")).startswith("torch.distributed."):
            return hook
    return None


def class_before_fully_shard(unit: nn.Module) -> type[nn.Module]:
    """Return the class that a unit had before `fully_shard` gave it one of its own."""
    # The third class, after the one that `fully_shard` made and FSDPModule
    original: type[nn.Module] = type(unit).__mro__[2]
    return original


class ParameterGroup:
    """Some parameters of an FSDP2 unit, which are gathered and reduced together."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def reduction(self) -> tuple[frozenset[int], float]:
        """Return the ranks that gradients are summed over, and what that sum is divided by."""
        ranks = frozenset(_private(_private(self.group, "mesh_info"), "mesh").mesh.flatten().tolist())
        return ranks, _private(self.group, "gradient_divide_factor") or len(ranks)

    def gather_group(self) -> ProcessGroup | None:
        """Return the ranks that parameters are gathered over; None if every rank has them."""
        # Only a mesh that shards has the attribute
        group: ProcessGroup | None = getattr(_private(self.group, "mesh_info"), "shard_process_group", None)
        return group

    def reduces(self) -> bool:
        """Return whether a backward reduces the gradients over all ranks."""
        return bool(_private(self.group, "reduce_grads") and _private(self.group, "all_reduce_grads"))

    def parameters(self) -> Iterator[Tensor]:
        """Yield each parameter as the module has it between steps, sharded, and as it has it while it is gathered."""
        for p in _private(self.group, "fsdp_params"):
            yield _private(p, "sharded_param")
            # Exists once it has been gathered
            gathered = getattr(p, "_unsharded_param", None)
            if gathered is not None:
                yield gathered

    def forget_forwards(self) -> None:
        """Drop the record of forwards that FSDP2 uses to gather ahead in the next backward."""
        of_all_groups = _private(self.group, "comm_ctx")
        _private(of_all_groups, "post_forward_order").clear()
        _private(self.group, "_post_forward_indices").clear()

    def forget_gradients(self) -> None:
        """Drop the gradients that were accumulated but not reduced."""
        for p in _private(self.group, "fsdp_params"):
            remains = _private(p, "unsharded_accumulated_grad")
            # torch 2.15 made it a property without a setter
            made = getattr(type(p), "unsharded_accumulated_grad", None)
            if not isinstance(made, property) or made.fset is not None:
                p.unsharded_accumulated_grad = None
            elif remains is not None:
                # Zeros are added to the next step without effect
                remains.zero_()
            gathered = getattr(p, "_unsharded_param", None)
            if gathered is not None:
                gathered.grad = None


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, ParameterGroup]]:
    """Yield each FSDP2 unit's name and its groups of parameters."""
    for name, module in model.named_modules():
        if not is_fsdp_unit(module):
            continue
        state = _private(module, "_get_fsdp_state")()
        # Depending on torch's version, a unit has one group of parameters or several
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group for group in [_private(state, "_fsdp_param_group")] if group is not None]
        for group in groups:
            yield name, ParameterGroup(group)


def take_for_root(model: nn.Module) -> None:
    """Make FSDP2 treat a `fully_shard` unit as the root of the units in it, as the model's first forward does.

    Otherwise a part that is called before the model would become a root itself.
    """
    _private(_private(model, "_get_fsdp_state")(), "_lazy_init")()


def forget_forwards(model: nn.Module) -> None:
    """Make FSDP2 forget the forwards that no backward follows."""
    for _, group in parameter_groups(model):
        group.forget_forwards()


def forget_step(model: nn.Module) -> None:
    """Drop the gradients that FSDP2 has accumulated but not reduced, and end the iteration that it has begun."""
    unit: Any = model
    # From torch 2.13 on; its error must not hide the step's own
    if hasattr(unit, "reset_iter_state"):
        with contextlib.suppress(RuntimeError):
            unit.reset_iter_state()
    for _, group in parameter_groups(model):
        group.forget_gradients()


def ddp_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that DDP reduces if they are trained."""
    parameters: list[nn.Parameter] = _private(model, "_module_parameters")
    return parameters


def reduced_parameters(model: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that were trainable when DDP was made, which are those that it reduces."""
    everything: list[Tensor] = [*ddp_parameters(model)]
    if int(_private(model, "_get_ddp_logging_data")()["num_parameter_tensors"]) == len(everything):
        return everything
    # These take memory for as many numbers as they have
    buckets = _private(_private(model, "reducer"), "_get_zeros_like_grad_buckets")()
    return [parameter for bucket in buckets for parameter in bucket.parameters()]


def records_static_graph(model: nn.Module | None) -> bool:
    """Return whether the model is a DDP with `static_graph` that has not run its first backward yet."""
    if not isinstance(model, DistributedDataParallel) or not _private(model, "static_graph"):
        return False
    return not _private(model, "_static_graph_delay_allreduce_enqueued")


def reduces_by_hooks(model: DistributedDataParallel) -> bool:
    """Return whether DDP reduces by hooks: in its two experimental ways, which do not, its forward leaves no trace."""
    return not (_private(model, "_use_python_reducer") or _private(model, "_delay_all_reduce_all_params"))


def expect_forward(model: DistributedDataParallel) -> None:
    """Mark DDP so that `has_run_forward` tells whether its forward has run since."""
    # Its forward ends by setting this to True or False; an int has the same effect in between
    model.require_forward_param_sync = int(_private(model, "require_forward_param_sync"))  # type: ignore[assignment]


def has_run_forward(model: DistributedDataParallel) -> bool:
    """Return whether DDP's forward has run since `expect_forward`."""
    return isinstance(_private(model, "require_forward_param_sync"), bool)


def will_reduce(model: DistributedDataParallel) -> bool:
    """Return whether DDP's forward has run since `expect_forward`, with gradients and outside `no_sync`."""
    return _private(model, "require_forward_param_sync") is True


def is_inside_no_sync(model: DistributedDataParallel) -> bool:
    """Return whether DDP is inside `no_sync`, where it reduces nothing."""
    return not _private(model, "require_backward_grad_sync")
