"""Read what PEFT has put on a model's output embeddings: LoRA, a trained copy (`modules_to_save`), trained tokens.

Shape suffixes: D hidden, R rank of the adapter, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.utils import is_peft_available

from seqpar.core.checks import check_plain_products, kind_of
from seqpar.integrations.made_up import full_name, is_plain_linear

OWN_PRODUCTS = "leave the output embeddings out of what quantises the model, or use it without the chunked loss"
"""The way out if the output embeddings' weight has its own tensor class, as torchao gives to every `nn.Linear`."""


class Adapter(NamedTuple):
    """The active LoRA adapter on output embeddings: logits = hidden @ W.T + scaling * dropout(hidden) @ A.T @ B.T."""

    a_RD: Tensor
    b_VR: Tensor
    scaling: float
    dropout: nn.Module


def is_peft_model(model: Any) -> bool:
    """Return whether PEFT has wrapped the model."""
    return hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """Return the Hugging Face model inside PEFT's."""
    if is_peft_model(model):
        return model.get_base_model()
    return model


def adapted_head(model: Any) -> Any | None:
    """Return a PEFT model's output embeddings if they have an adapter, which TRL's constructors refuse; else None."""
    head = model.get_output_embeddings()
    if is_peft_available():
        from peft.tuners.tuners_utils import BaseTunerLayer

        if isinstance(head, BaseTunerLayer):
            return head
    return None


def linear_of(head: Any, name: str, needed: str) -> nn.Linear:
    """Return the `nn.Linear` of a model's output embeddings, the wrapped one if PEFT has wrapped them.

    Use its weight for the classes, the dtype and the device. The weight that is trained is `head.weight`, which may be
    a copy's or contain trained tokens. Raises TypeError for any other module.

    Args:
        name: the model's name, for the error.
        needed: what the caller needs, and the alternative, for the error.
    """
    inside = head
    if not is_plain_linear(head) and is_peft_available():
        from peft.tuners.lora.layer import Linear as LoraLinear
        from peft.utils.other import AuxiliaryTrainingWrapper

        if isinstance(head, LoraLinear):
            inside = head.get_base_layer()
        elif isinstance(head, AuxiliaryTrainingWrapper):
            inside = head.original_module
    if is_plain_linear(inside):
        for own, parameter in inside._parameters.items():
            check_plain_products(parameter, f"the {own} of {name}'s output embeddings", OWN_PRODUCTS)
        return inside
    if inside is None:
        raise TypeError(f"{name} has no output embeddings; {needed}")
    raise TypeError(f"the output embeddings of {name} are a {full_name(inside)}; {needed}")


def adapter_of(model: Any) -> Adapter | None:
    """Return the LoRA adapter that is active on the output embeddings; raise TypeError for an unsupported kind."""
    head = model.get_output_embeddings()
    if not is_peft_available():
        return None
    from peft.tuners.lora.layer import Linear as LoraLinear

    if not isinstance(head, LoraLinear):
        return None
    active = [key for key in head.active_adapters if key in head.lora_A]
    if not head.merged and (head.disable_adapters or not active):
        return None
    if reason := _why_unsupported(head, active):
        raise TypeError(f"the output embeddings of {type(model).__name__} have {reason}")
    (key,) = active
    return Adapter(head.lora_A[key].weight, head.lora_B[key].weight, head.scaling[key], head.lora_dropout[key])


def _why_unsupported(head: Any, active: list[str]) -> str:
    """Return why an adapter is not supported, and what to do about it; an empty string if it is."""
    if head.merged:
        return "a LoRA adapter that is merged; call unmerge_adapter() first"
    if len(active) > 1:
        return f"{len(active)} active LoRA adapters ({', '.join(active)}); one is supported: set_adapter(...)"
    if active[0] in head.lora_variant:
        return f"an adapter that is {kind_of(head.lora_variant[active[0]])}; only plain LoRA is supported"
    if head.lora_B[active[0]].bias is not None:
        return "an adapter that has a bias of its own; set lora_bias=False"
    return ""
