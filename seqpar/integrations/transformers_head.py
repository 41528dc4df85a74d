"""Let the output embeddings of a Hugging Face model return what the loss needs of them, sharded or not.

Shape suffixes: D hidden, V vocabulary, W tokens of the window.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.core.checks import is_dtensor
from seqpar.distributed.wrappers import refuse_sharded
from seqpar.integrations.made_up import RefusedModelError, made_up_logits, more_than_linear
from seqpar.integrations.transformers_call import Call
from seqpar.integrations.transformers_check import WITHOUT, certain_logits

WAY_OUT_OF_SHARDS = (
    "call fully_shard on the model as well, so that they are gathered in its forward, and leave out compute_loss_func, "
    "which runs after it; to split their classes use a tensor-parallel plan of from_pretrained"
)


def number_of_classes(head: nn.Linear) -> int:
    """Return how many classes the output embeddings have, also while other ranks hold them by DeepSpeed's ZeRO-3."""
    # Not `out_features`, which Marian's resize_token_embeddings leaves as it was
    return int(getattr(head.weight, "ds_shape", head.weight.shape)[0])


def gather_in_model(model: nn.Module, head: nn.Linear) -> None:
    """Have DeepSpeed's ZeRO-3, if that divides the output embeddings, gather them for the model's forward and backward.

    It gathers them around their own forward, and around the backward of what that returned: the logits of a window.
    """
    for parameter in head.parameters():
        if hasattr(parameter, "ds_id"):
            # What it is for: a parameter that another module uses (documented with ZeRO-3)
            sys.modules["deepspeed"].zero.register_external_parameter(model, parameter)


def refuse_sharded_head(head: nn.Linear) -> None:
    """Raise RuntimeError if the output embeddings are sharded in another way than by a plan that splits classes."""
    # A tensor-parallel plan of transformers gives them a forward of their own, and a mesh of one axis
    split = "forward" in vars(head) and len(getattr(head.weight, "placements", ())) == 1
    if not split:
        refuse_sharded(head, WAY_OUT_OF_SHARDS)


def refuse_released_head(head: nn.Linear) -> None:
    """Raise RuntimeError if the output embeddings will not be there after the forward, for a `compute_loss_func`."""
    refuse_sharded_head(head)
    if any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
        raise RuntimeError(
            "DeepSpeed's ZeRO-3 divides the output embeddings, and has released them when a compute_loss_func is "
            "called; leave that out: apply_seqpar_loss by itself computes the loss in the forward"
        )


def logits_for(call: Call, head: Any, output: Tensor) -> Tensor:
    """Return the logits that the model gets for the window, in place of those that its output embeddings computed."""
    if not call.examined:
        return certain_logits(call.window_1W, output[0, 0]) if call.certain else output.detach()
    assert call.window_1WD is not None
    if not torch.equal(output, plain_logits(call.window_1WD, head)):
        raise RefusedModelError(f"{more_than_linear(type(call.model).__name__)}; {WITHOUT}")
    make = certain_logits if call.certain else made_up_logits
    # They need a gradient, so that it shows what else the loss is made of
    call.made_up = make(call.window_1W, output[0, 0].detach()).requires_grad_()
    # A copy, because a model may change its logits in place
    return call.made_up.clone()


def plain_logits(hidden_1WD: Tensor, head: nn.Linear) -> Tensor:
    """Return the product and the bias of all classes, by the same kernels as the head where its classes are split."""
    weight: Any = head.weight
    if not is_dtensor(weight):
        return F.linear(hidden_1WD, weight, head.bias)
    # Importing DTensor takes longer than importing this library
    from torch.distributed.tensor import DTensor, Replicate

    everywhere_1WD = DTensor.from_local(hidden_1WD, weight.device_mesh, [Replicate()], run_check=False)
    logits_1WV: Any = F.linear(everywhere_1WD, weight, head.bias)
    return logits_1WV.full_tensor()  # type: ignore[no-any-return]
