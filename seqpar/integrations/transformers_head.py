"""Get from a Hugging Face model's output embeddings what the loss needs, whether or not they are sharded.

Shape suffixes: D hidden, R rows and W tokens of the window, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from seqpar.core.checks import is_dtensor, kind_of
from seqpar.core.token_loss import wide
from seqpar.distributed.collectives import whole_tensor
from seqpar.distributed.wrappers import refuse_sharded
from seqpar.engine.module_calls import HOOKS
from seqpar.integrations.made_up import (
    RefusedModelError,
    certain_logits,
    made_up_logits,
    more_than_linear,
    same_logits,
)
from seqpar.integrations.peft_adapters import Adapter, adapter_of, linear_of
from seqpar.integrations.transformers_call import Call
from seqpar.integrations.transformers_model import WITHOUT
from seqpar.linear.lora import adapter_rows

NEEDED = (
    "the chunked loss needs a torch.nn.Linear, alone or with PEFT's LoRA, modules_to_save or trainable_token_indices; "
    f"otherwise {WITHOUT}"
)

BACKWARD_HOOKS = [hooks for hooks in HOOKS if "backward" in hooks]

WAY_OUT_OF_SHARDS = (
    "call fully_shard on the model as well, so that they are gathered in its forward, and leave out compute_loss_func, "
    "which runs after it; to split their classes use a tensor-parallel plan of from_pretrained"
)


def supported_linear(model: Any) -> nn.Linear:
    """Return the `nn.Linear` of the output embeddings (`linear_of`); raise TypeError unless the loss supports them."""
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"model is {kind_of(model)}; it must be a Hugging Face model with a head, or its Trainer; inside a "
            "wrapper it is wrapper.module"
        )
    linear = linear_of(model.get_output_embeddings(), type(model).__name__, NEEDED)
    adapter_of(model)
    return linear


def with_adapter(hidden: Tensor, weight: Tensor, adapter: Adapter | None) -> tuple[Tensor, Tensor]:
    """Return hidden states and a weight whose product is that of the output embeddings and their LoRA adapter.

    hidden @ W.T + s dropout(hidden) @ A.T @ B.T = [hidden, s dropout(hidden) @ A.T] @ [W, B].T
    """
    if adapter is None:
        return hidden, weight
    low_rank = adapter_rows(adapter.dropout(hidden), adapter.a_RD, adapter.scaling).to(hidden.dtype)
    return torch.cat([hidden, low_rank], -1), torch.cat([weight, adapter.b_VR.to(weight.dtype)], -1)


def bias_of(head: Any) -> Tensor | None:
    """Return the bias of the output embeddings; PEFT's layer with trained tokens adds none and lacks the attribute."""
    return getattr(head, "bias", None)


def number_of_classes(head: Any) -> int:
    """Return how many classes the output embeddings have, even while DeepSpeed's ZeRO-3 keeps them on other ranks."""
    # Not `out_features`, which Marian's resize_token_embeddings does not update
    return int(getattr(head.weight, "ds_shape", head.weight.shape)[0])


def is_divided(head: nn.Module) -> bool:
    """Return whether DeepSpeed's ZeRO-3 partitions the output embeddings, which then exist only while gathered."""
    return any(hasattr(parameter, "ds_id") for parameter in head.parameters())


def gather_in_model(model: nn.Module, head: nn.Linear) -> None:
    """Make DeepSpeed's ZeRO-3, if it partitions the output embeddings, gather them for the whole model's passes.

    By itself it gathers them only for their own forward, and for the backward of its result: the logits of a window.
    """
    for parameter in head.parameters():
        if hasattr(parameter, "ds_id"):
            # ZeRO-3's documented way for a module to use another module's parameter
            sys.modules["deepspeed"].zero.register_external_parameter(model, parameter)


def is_split_by_plan(head: nn.Module) -> bool:
    """Return whether a tensor-parallel plan of transformers has split the classes of the output embeddings."""
    # Such a plan gives them their own forward, and a mesh with one axis
    return "forward" in vars(head) and len(getattr(head.weight, "placements", ())) == 1


def refuse_backward_hooks(head: nn.Module, name: str) -> None:
    """Raise TypeError for output embeddings with backward hooks, which would see only a window of tokens."""
    of_all = [getattr(torch_modules, f"_global{hooks}") for hooks in BACKWARD_HOOKS]
    if any(of_all) or any(getattr(module, hooks) for module in head.modules() for hooks in BACKWARD_HOOKS):
        raise TypeError(
            f"the output embeddings of {name} have backward hooks, which would see the gradients of only a few tokens; "
            f"put a hook on their input instead (hidden.register_hook), or {WITHOUT}"
        )


def refuse_sharded_head(head: nn.Linear) -> None:
    """Raise RuntimeError if the output embeddings are sharded in any way other than by a plan that splits classes."""
    if not is_split_by_plan(head):
        refuse_sharded(head, WAY_OUT_OF_SHARDS)


def refuse_released_head(head: nn.Linear) -> None:
    """Raise RuntimeError if the output embeddings are released before a `compute_loss_func` could use them."""
    refuse_sharded_head(head)
    if is_divided(head):
        raise RuntimeError(
            "DeepSpeed's ZeRO-3 divides the output embeddings, and has released them when a compute_loss_func is "
            "called; leave that out: apply_seqpar_loss by itself computes the loss in the forward"
        )


def logits_for(call: Call, head: Any, output: Tensor) -> Tensor:
    """Return the logits that the model gets for the window, instead of those that its output embeddings computed."""
    if not call.examined:
        few_RWV = certain_logits(call.window_RW, output[0, 0]) if call.certain else output.detach()
        # As exact as those of the check, so that its loss can be compared again
        call.few_RWV = few_RWV.to(wide(few_RWV.dtype))
        return call.few_RWV.clone()
    assert call.window_RWD is not None
    if not _is_linear(call.window_RWD, head, output, adapter_of(call.model)):
        raise RefusedModelError(f"{more_than_linear(type(call.model).__name__)}; {WITHOUT}")
    make = certain_logits if call.certain else made_up_logits
    # They require a gradient, whose graph shows what else the loss is made of
    call.made_up = make(call.window_RW, output[0, 0].detach()).requires_grad_()
    # A copy, because a model may change its logits in place
    return call.made_up.clone()


def _is_linear(hidden_RWD: Tensor, head: Any, output: Tensor, adapter: Adapter | None) -> bool:
    """Return whether logits are product plus bias: to the last bit, unless an adapter changes the order of the sums."""
    if adapter is None:
        return torch.equal(output, plain_logits(hidden_RWD, head))
    both, weight = with_adapter(hidden_RWD, head.weight, adapter)
    return same_logits(F.linear(both, weight, bias_of(head)), output, output.dtype)


def plain_logits(hidden_RWD: Tensor, head: nn.Linear) -> Tensor:
    """Return product plus bias for all classes, computed by the head's own kernels if its classes are split."""
    weight: Any = head.weight
    if not is_dtensor(weight):
        return F.linear(hidden_RWD, weight, bias_of(head))
    # Importing DTensor takes longer than importing this library
    from torch.distributed.tensor import DTensor, Replicate

    everywhere_RWD = DTensor.from_local(hidden_RWD, weight.device_mesh, [Replicate()], run_check=False)
    return whole_tensor(F.linear(everywhere_RWD, weight, bias_of(head)))
