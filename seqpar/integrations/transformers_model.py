"""Find out from a Hugging Face model and its configuration what it does with labels, hidden states and logits.

None of this is taken on trust: `transformers_check` compares it with the model's own logits and loss.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from seqpar.core.surroundings import Identity
from seqpar.engine.module_calls import HOOKS

IGNORED = -100
"""The label that Hugging Face models ignore."""

WITHOUT = "use the model without apply_seqpar_loss"

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Names of factors of the logits. Some models multiply by them, some divide by them, and some ignore them."""

FORWARD_HOOKS = [hooks for hooks in HOOKS if "forward" in hooks]

Settings = tuple[object, ...]


class Reading(NamedTuple):
    """The function that a model applies to its logits before the softmax: softcap tanh(z / softcap) / temperature."""

    softcap: float | None
    temperature: float
    adds: bool = False
    """Whether the model adds to the cross-entropy a term, such as a router's, that ignores logits and labels."""

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the function to logits."""
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


def configurations(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield the configuration and the configurations nested in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from configurations(value)


def settings_of_logits(config: PretrainedConfig) -> Iterator[tuple[str, float]]:
    """Yield the names and values of soft caps and factors in a configuration that are in use."""
    for nested in configurations(config):
        for name in SOFTCAPS + SCALES:
            value = getattr(nested, name, None)
            # None or 0 means off, and a factor of 1 has no effect
            if isinstance(value, int | float) and value > 0 and not (name in SCALES and value == 1):
                yield name, float(value)


def readings(model: PreTrainedModel) -> list[Reading]:
    """Return every possible meaning of the configuration's settings; the model's own logits decide between them."""
    named = set(settings_of_logits(model.config))
    softcaps = [None, *sorted({value for name, value in named if name in SOFTCAPS})]
    scales = {value for name, value in named if name in SCALES}
    # z * scale is a temperature of 1 / scale, z / scale one of scale, and a scale that is ignored one of 1
    temperatures = sorted({1.0, *scales, *(1 / scale for scale in scales)})
    return [Reading(softcap, temperature) for softcap in softcaps for temperature in temperatures]


def final_bias(model: PreTrainedModel, like: Tensor) -> Tensor | None:
    """Return the bias (V,) that Marian and BART add to the logits outside their output embeddings, or None."""
    bias: Tensor | None = getattr(model, "final_logits_bias", None)
    if bias is None:
        return None
    return bias.flatten().to(like.device, like.dtype)


def special_labels(model: PreTrainedModel, vocab_size: int) -> set[int]:
    """Return the token ids in the configuration: any label that a model treats specially is among them."""
    found: list[object] = []
    for config in configurations(model.config):
        for name, value in vars(config).items():
            if "token" in name and isinstance(value, list):
                found += value
            elif "token" in name:
                found.append(value)
    # Some are None, and an image token may be above the vocabulary of the output embeddings
    return {v for v in found if isinstance(v, int) and 0 <= v < vocab_size}


def key_of(model: PreTrainedModel, kwargs: Mapping[str, object]) -> Settings:
    """Return all that decides what a forward does to logits and labels: one check holds for one such key."""
    return model.training, *settings_of(model, kwargs), *calls_of(model)


def settings_of(model: PreTrainedModel, kwargs: Mapping[str, object]) -> Settings:
    """Return everything that a forward may branch on: arguments that are given, flags, configuration and attributes."""
    # The values of flags and modes may choose a branch; for tensors it only matters whether they are given
    given: list[tuple[str, object]] = []
    for name, value in sorted(kwargs.items()):
        if isinstance(value, bool | str):
            given.append((name, value))
        elif value is not None:
            given.append((name, type(value)))
    plain = (bool, int, float, str)
    configured = (v for c in configurations(model.config) for v in vars(c).items() if isinstance(v[1], plain))
    # Such as the factor of Cohere's logits, which the model copies from its configuration; not its training mode.
    # Only numbers whose name is in a configuration: any other may count steps
    named = {name for c in configurations(model.config) for name in vars(c)}
    own = (
        v
        for v in vars(model).items()
        if v[0] != "training" and (isinstance(v[1], bool | str) or (isinstance(v[1], plain) and v[0] in named))
    )
    return *given, *configured, *own


def calls_of(model: PreTrainedModel) -> Settings:
    """Return everything replaceable that a forward calls after its last hidden states."""
    head = model.get_output_embeddings()
    own = (getattr(head, hooks) for hooks in FORWARD_HOOKS)
    of_all = (getattr(torch_modules, f"_global{hooks}") for hooks in FORWARD_HOOKS)
    hooks = [hook for registered in (*own, *of_all) for hook in registered.values()]
    kinds = [("class", type(module)) for module in (model, head)]
    called: list[Any] = [F.cross_entropy, F.linear, nn.Linear.forward, *loss_functions(model)]
    for module in (model, head):
        called += type(module).forward, vars(module).get("forward")
    return *kinds, *map(_identity, (*called, *hooks))


def _identity(function: Any) -> object:
    """Return a key for a function, which need not be hashable; a method is a new object each time it is looked up."""
    if isinstance(function, MethodType):
        return Identity(function.__func__), Identity(function.__self__)
    return None if function is None else Identity(function)


def loss_functions(model: PreTrainedModel) -> tuple[Any, Any]:
    """Return the model's own loss function, or None, and that of its `loss_type`.

    Models without a `loss_type`, such as GPT-2, use transformers' default, which is that of causal models.
    """
    return vars(model).get("_loss_function"), LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)


def signature_of(model: PreTrainedModel) -> inspect.Signature:
    """Return the signature of a model's forward; if that takes `*args`, the one of a base class that names them."""
    forwards = [model.forward, *(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))]
    first, *inherited = map(inspect.signature, forwards)
    for own in inherited if _takes_any(first) else ():
        if not _takes_any(own):
            # Without self
            return own.replace(parameters=[*own.parameters.values()][1:])
    return first


def _takes_any(signature: inspect.Signature) -> bool:
    """Return whether a function takes any number of positional arguments."""
    return any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the model predicts label t + 1 from position t."""
    _, loss = loss_functions(model)
    return loss is ForCausalLMLoss and not getattr(model.config, "is_encoder_decoder", False)


def next_labels(labels_BT: Tensor) -> Tensor:
    """Return the label after each position; the last position has none."""
    return F.pad(labels_BT, (0, 1), value=IGNORED)[..., 1:]


def lacks_decoder_inputs(model: PreTrainedModel, kwargs: Mapping[str, object]) -> bool:
    """Return whether the model has a decoder whose inputs are not among the arguments."""
    given = any(kwargs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    return bool(getattr(model.config, "is_encoder_decoder", False)) and not given


def decoder_inputs(model: PreTrainedModel, labels_BT: Tensor) -> Tensor:
    """Return the labels shifted right by the model's own function.

    The model makes its decoder's inputs from the labels it is given, and here it is not given all of them.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels_BT)  # type: ignore[no-any-return]
    # Models without that method have a function in their module; for a subclass it is in the parent's module
    modules = (sys.modules.get(cls.__module__) for cls in type(model).__mro__)
    shift = next(filter(None, (getattr(module, "shift_tokens_right", None) for module in modules)), None)
    # A multimodal model has the decoder's token ids in its text configuration
    config = model.config
    if getattr(config, "decoder_start_token_id", None) is None:
        config = config.get_text_config(decoder=True)
    pad, start = (getattr(config, name, None) for name in ("pad_token_id", "decoder_start_token_id"))
    if shift is None or pad is None or start is None:
        raise TypeError(
            f"{type(model).__name__} shifts labels in its own way; for apply_seqpar_loss give it decoder_input_ids"
        )
    return shift(labels_BT, pad, start)  # type: ignore[no-any-return]


PAST_HOOKS = "calls the model's forward without its hooks, so that its own loss would remain"
REFUSED_ADAPTERS = {
    "ADALORA": PAST_HOOKS,
    "ADAPTION_PROMPT": PAST_HOOKS,
    "CPT": "computes a loss of its own from the logits",
}
"""What PEFT's adapters of these types do instead of calling the model."""


def refuse_adapter(model: Any, without: str) -> None:
    """Raise TypeError for a PeftModel with an adapter that bypasses hooks on its base model.

    Args:
        without: an alternative, for the message.
    """
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind in REFUSED_ADAPTERS:
            raise TypeError(f"PEFT's {kind} {REFUSED_ADAPTERS[kind]}; use another adapter, or {without}")
