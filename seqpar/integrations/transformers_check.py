"""Check that the chunked loss is a Hugging Face model's own loss, by running the model on a few made-up labels.

The model runs unchanged except for its output embeddings: these return random logits from -50 to 50, in float32 or
wider whatever the model's precision, so that the effect of a soft cap, a factor or a clamp is far above rounding. The
logits and the loss that the model returns must then equal ours. The labels include every token id that the
configuration names. The loss must also depend on nothing else: the random logits need no gradient, so a loss that needs
one depends on something besides them.

Shape suffixes: W tokens of the window (the made-up labels), V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from seqpar.integrations.made_up import WINDOW, RefusedModelError, close, in_one_line, same_logits
from seqpar.integrations.transformers_model import IGNORED, Reading

WITHOUT = "use the model without apply_seqpar_loss"


def made_up_labels(special: set[int], vocab_size: int) -> Tensor:
    """Return labels (1, W): different ones spread over the vocabulary, the special ones, and one that is ignored."""
    spread = torch.linspace(0, vocab_size - 1, WINDOW).long().tolist()
    labels = torch.tensor([*sorted({*special, *spread}), IGNORED])
    # In random order, so that neighbours differ in no regular way and a shift by any number of positions shows
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return labels[order].unsqueeze(0)


def own_outputs(model: nn.Module, kwargs: dict[str, Any], forget: Callable[[], None]) -> object:
    """Return the model's outputs for the window.

    An error of the model is the batch's own if it also occurs without labels; otherwise the labels caused it. `forget`
    makes a second call of the output embeddings possible.
    """
    try:
        return model.forward(**with_own_caches(kwargs))
    except (RefusedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # If this raises an error, the batch is to blame, and the caller sees that error
        forget()
        without_labels = {k: v for k, v in kwargs.items() if k not in ("labels", "shift_labels")}
        model.forward(**with_own_caches(without_labels))
        raise RefusedModelError(
            f"{type(model).__name__} fails with the labels of a few tokens instead of all ({in_one_line(error)}): it "
            f"does more with labels than compute the loss of its logits; {WITHOUT}"
        ) from error


def with_own_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with copies of their caches, to which a forward may append; tensors are not copied.

    Prefix tuning gives the model its prefix as a cache.
    """
    return {name: _copy_of_cache(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}


def _copy_of_cache(cache: Cache) -> Cache:
    own = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, Cache):
            # Of encoder and decoder
            setattr(own, name, _copy_of_cache(value))
        elif isinstance(value, list):
            # Layers
            setattr(own, name, [copy.copy(item) for item in value])
        elif isinstance(value, dict):
            setattr(own, name, dict(value))
    return own


def check_shapes(name: str, scores: Tensor, target_BT: Tensor) -> None:
    """Raise ValueError unless there is a label for each prediction."""
    if scores.shape[:-1] != target_BT.shape:
        made = f"{name} makes {tuple(scores.shape[:-1])} predictions for labels of shape {tuple(target_BT.shape)}"
        raise ValueError(f"{made}; give each a label, -100 where none is wanted (images, soft prompts)")


def examine(name: str, ways: list[Reading], logits_1WV: Tensor, target_1W: Tensor, outputs: object) -> Reading:
    """Return what the model does to its logits; raise an error unless its logits and loss of the window are ours."""
    if not isinstance(outputs, Mapping) or outputs.get("logits") is None:
        fields = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise RefusedModelError(f"{name} returns no field logits but {fields}; {WITHOUT}")
    refuse_added(name, outputs)
    theirs = outputs["logits"].detach()
    # The configuration names the numbers but not what is done with them; the model's own logits decide
    reading = matching_reading(name, ways, logits_1WV, theirs, WITHOUT)
    # With these logits, random and far apart, a loss that shifts its labels in another way is far off
    loss = outputs.get("loss")
    if loss is None:
        raise RefusedModelError(f"{name} returns no loss for labels; {WITHOUT}")
    ours = mean_loss(theirs, target_1W)
    if loss.dim() != 0 or not close(ours, loss.detach()):
        theirs_shown = f"{loss.item():.6g}" if loss.dim() == 0 else f"of shape {tuple(loss.shape)}"
        raise RuntimeError(
            f"{name}'s own loss of a few tokens is {theirs_shown}, that of apply_seqpar_loss {ours.item():.6g}; "
            f"it shifts its labels in another way, or adds to the cross-entropy; {WITHOUT}"
        )
    return reading


def matching_reading(name: str, ways: list[Reading], logits_1WV: Tensor, theirs: Tensor, way_out: str) -> Reading:
    """Return what the model does to the logits of its output embeddings; raise RuntimeError if it is none of `ways`."""
    for way in ways:
        if same_logits(way.applied(logits_1WV), theirs):
            return way
    by = f"in shape ({tuple(theirs.shape)})"
    if logits_1WV.shape == theirs.shape:
        errors = [(way.applied(logits_1WV) - theirs).abs().max().item() for way in ways]
        by = f"by up to {min(errors):.3g}"
    raise RuntimeError(
        f"{name}'s own logits of a few tokens differ {by} from hidden x output embeddings with the bias, softcap "
        f"and scale its configuration names: it does something else to them as well; {way_out}"
    )


def refuse_added(name: str, outputs: object) -> None:
    """Raise RuntimeError if the model adds something to the cross-entropy, which the chunked loss would lose."""
    fields = outputs if isinstance(outputs, Mapping) else {}
    # Either sign is enough: a router's loss under a name of its own, or a loss that needs a gradient although its
    # logits need none
    named = any(key.endswith(("aux_loss", "z_loss")) for key in fields)
    loss = fields.get("loss")
    if named or (isinstance(loss, Tensor) and loss.requires_grad):
        raise RuntimeError(
            f"{name} adds an auxiliary loss to its own (output_router_logits), or parameters behind its output "
            f"embeddings, which the chunked loss would drop; {WITHOUT}"
        )


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the plain mean loss; nan if every target is ignored."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten().to(logits.device), ignore_index=IGNORED)
