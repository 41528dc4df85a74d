"""Whether a Hugging Face model's loss is what it was taken for: its own logits and loss of a few made-up tokens.

The model runs as it is, but for its output embeddings: these return random logits, in float32 or wider whatever the
model's precision, from -50 to 50, so that a soft cap, a factor or a clamp shows far above rounding. What the model
makes of them, and its loss of made-up labels (among them every token id that the configuration names), must be ours.
The loss must also be a function of nothing else: random logits need no gradient, so neither does a loss that is made of
them alone.

Shape suffixes: W tokens of the window, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.core.token_loss import wide
from seqpar.integrations.transformers_model import IGNORED, Reading

WINDOW = 8
"""Tokens of the window beside those of special labels."""

SPREAD = 50.0
"""The largest made-up logit."""

WITHOUT = "use the model without apply_seqpar_loss"


class RefusedModelError(TypeError):
    """A model whose loss is not known here."""


def made_up_labels(special: set[int], vocab_size: int) -> Tensor:
    """(1, W): labels from all over the vocabulary, all different, and one that counts for nothing."""
    spread = torch.linspace(0, vocab_size - 1, WINDOW).long().tolist()
    labels = torch.tensor([*sorted({*special, *spread}), IGNORED])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return labels[order].unsqueeze(0)


def made_up_logits(labels_1W: Tensor, like: Tensor) -> Tensor:
    """(1, W, V), in the precision that sums are kept in."""
    generator = torch.Generator().manual_seed(1)
    logits_1WV = torch.empty(*labels_1W.shape, like.size(-1), dtype=wide(like.dtype))
    return logits_1WV.uniform_(-SPREAD, SPREAD, generator=generator).to(like.device)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A forward inside leaves random states and buffers (batch normalisation's) as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def own_outputs(model: nn.Module, kwargs: dict[str, Any], forget: Callable[[], None]) -> Any:
    """What the model makes of the window. Its errors are the batch's own only if they come without labels, too.

    `forget` lets the output embeddings be called once more.
    """
    try:
        return model.forward(**kwargs)
    except (RefusedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        forget()
        model.forward(**{k: v for k, v in kwargs.items() if k not in ("labels", "shift_labels")})
        raise RefusedModelError(
            f"{type(model).__name__} fails with the labels of a few tokens in the place of all "
            f"({type(error).__name__}: {' '.join(str(error).split())}): it does more with labels than take the loss of "
            f"its logits; {WITHOUT}"
        ) from error


def check_shapes(name: str, scores: Tensor, target_BT: Tensor) -> None:
    """Raises ValueError unless there is a label for each prediction."""
    if scores.shape[:-1] != target_BT.shape:
        raise ValueError(
            f"{name} makes {tuple(scores.shape[:-1])} predictions for labels of shape {tuple(target_BT.shape)}; give a "
            "label to each, -100 where none is wanted (images, soft prompts)"
        )


def examine(name: str, ways: list[Reading], logits_1WV: Tensor, target_1W: Tensor, outputs: Any) -> Reading:
    """What the model does to logits; raises unless its logits and loss of the window are ours."""
    if not isinstance(outputs, Mapping) or outputs.get("logits") is None:
        fields = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise RefusedModelError(f"{name} returns no field logits but {fields}; {WITHOUT}")
    refuse_added(name, outputs)
    theirs = outputs["logits"].detach()
    reading = next((way for way in ways if same_logits(way.applied(logits_1WV), theirs)), None)
    if reading is None:
        same_shape = logits_1WV.shape == theirs.shape
        errors = [(way.applied(logits_1WV) - theirs).abs().max().item() for way in ways] if same_shape else []
        by = f"by up to {min(errors):.3g}" if errors else f"in shape ({tuple(theirs.shape)})"
        raise RuntimeError(
            f"{name}'s own logits of a few tokens differ {by} from hidden x output embeddings with the bias, softcap "
            f"and scale its configuration names: it does something else to them as well; {WITHOUT}"
        )
    loss = outputs.get("loss")
    if loss is None:
        raise RefusedModelError(f"{name} returns no loss for labels; {WITHOUT}")
    ours = mean_loss(theirs, target_1W)
    if loss.dim() != 0 or not close(ours, loss.detach()):
        raise RuntimeError(
            f"{name}'s own loss of a few tokens is {_shown(loss)}, that of apply_seqpar_loss {_shown(ours)}; "
            f"it shifts its labels in another way, or adds to the cross-entropy; {WITHOUT}"
        )
    return reading


def refuse_added(name: str, outputs: Any) -> None:
    """Raises RuntimeError where something is added to the cross-entropy that would be lost."""
    fields = isinstance(outputs, Mapping)
    named = fields and any(key.endswith(("aux_loss", "z_loss")) for key in outputs)
    loss = outputs.get("loss") if fields else None
    if named or (isinstance(loss, Tensor) and loss.requires_grad):
        raise RuntimeError(
            f"{name} adds an auxiliary loss to its own (output_router_logits), or parameters behind its output "
            f"embeddings, which the chunked loss would drop; {WITHOUT}"
        )


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The plain loss; nan where no target is kept."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten().to(logits.device), ignore_index=IGNORED)


def same_logits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and close(ours, theirs)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Up to a few roundings of float32, whatever the model's precision: the logits it was given are no narrower."""
    finite = ours[ours.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 1.0
    tolerance = 8 * torch.finfo(torch.float32).eps * max(1.0, largest)
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=tolerance)


def _shown(loss: Tensor) -> str:
    return f"{loss.item():.6g}" if loss.dim() == 0 else f"of shape {tuple(loss.shape)}"
