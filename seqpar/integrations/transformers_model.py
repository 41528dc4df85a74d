"""What a Hugging Face model does with labels, hidden states and logits, and whether that is what it was taken for.

Shape suffixes: B batch, T time, D hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from seqpar.token_loss import wide

IGNORED = -100
"""The label that Hugging Face models count for nothing."""


class Scores(NamedTuple):
    """What a model does to the products of hidden states and output embeddings before the softmax."""

    bias_V: Tensor | None
    softcap: float | None
    temperature: float

    @staticmethod
    def of(model: PreTrainedModel, head: nn.Linear, like: Tensor) -> Scores:
        """By what the model and its configuration say; the check on the first call is there for what they do not."""
        config = model.config.get_text_config()
        bias_V: Tensor | None = head.bias
        final: Tensor | None = getattr(model, "final_logits_bias", None)
        if final is not None:
            final = final.flatten().to(like.device, head.weight.dtype)
            bias_V = final if bias_V is None else bias_V + final
        temperature = float(getattr(config, "logits_scaling", None) or 1.0)
        temperature /= float(getattr(config, "logit_scale", None) or 1.0)
        return Scores(bias_V, getattr(config, "final_logit_softcapping", None), temperature)

    def logits(self, hidden: Tensor, weight_VD: Tensor) -> Tensor:
        """The model's logits, written plainly."""
        logits = F.linear(hidden, weight_VD, self.bias_V)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether the model predicts label t + 1 from position t; an unnamed loss is the one that does (GPT-2's is)."""
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)
    return loss is ForCausalLMLoss and not getattr(model.config, "is_encoder_decoder", False)


def next_labels(labels_BT: Tensor) -> Tensor:
    """The label after each position, and none after the last."""
    return F.pad(labels_BT, (0, 1), value=IGNORED)[..., 1:]


def lacks_decoder_inputs(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether the model has a decoder whose inputs are not among the arguments."""
    given = any(kwargs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    return bool(getattr(model.config, "is_encoder_decoder", False)) and not given


def decoder_inputs(model: PreTrainedModel, labels_BT: Tensor) -> Tensor:
    """Labels shifted right, by the model's own function: it will not see all labels, and cannot do so itself."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels_BT)  # type: ignore[no-any-return]
    modules = (sys.modules.get(part.__module__) for part in type(model).__mro__)
    shift = next(filter(None, (getattr(module, "shift_tokens_right", None) for module in modules)), None)
    if shift is None:
        raise TypeError(f"{type(model).__name__} does not say how it shifts labels; pass decoder_input_ids")
    config = model.config
    return shift(labels_BT, config.pad_token_id, config.decoder_start_token_id)  # type: ignore[no-any-return]


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The plain loss, in float32 or wider; nan where no target is kept."""
    wide_logits, target = logits.detach().to(wide(logits.dtype)), target.to(logits.device)
    return F.cross_entropy(wide_logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Up to what may differ where one is rounded more often; Hugging Face rounds float64 logits to float32."""
    eps = max(torch.finfo(dtype).eps for dtype in (ours.dtype, theirs.dtype, torch.float32))
    finite = ours[ours.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 1.0
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=8 * eps * max(1.0, largest), equal_nan=True)


def check_logits(name: str, ours: Tensor | None, theirs: Tensor) -> None:
    """Raises RuntimeError unless the logits of a few tokens are the same."""
    if ours is None or ours.shape != theirs.shape or not close(ours, theirs.detach()):
        same_shape = ours is not None and ours.shape == theirs.shape
        by = f"by up to {(ours - theirs).abs().max().item():.3g}" if same_shape else "in shape"  # type: ignore[operator]
        raise RuntimeError(
            f"{name}'s own logits of a few tokens differ {by} from hidden x output embeddings with the bias, "
            "final_logit_softcapping, logit_scale and logits_scaling it names: it does something else to them as well; "
            "use the model without apply_seqpar_loss"
        )


def check_loss(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Raises RuntimeError unless the mean loss of a few tokens is the same."""
    if not close(ours, theirs):
        raise RuntimeError(
            f"{name}'s own loss of a few tokens is {theirs.item():.6g}, that of apply_seqpar_loss {ours.item():.6g}; "
            "it shifts its labels in another way, or adds to the cross-entropy; use the model without apply_seqpar_loss"
        )
