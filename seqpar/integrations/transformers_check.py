"""Check that the chunked loss is a Hugging Face model's own loss, by running the model on a few made-up labels.

It is checked once for each combination of settings. The model runs unchanged except for its output embeddings: these
return random logits from -50 to 50, in float32 or wider whatever the model's precision, so that the effect of a soft
cap, a factor or a clamp is far above rounding. The logits and the loss that the model returns must then equal ours. The
labels include every token id that the configuration names. If the loss differs, or depends on more than the logits, the
model runs once more, with different labels and logits that are certain of them. The loss may differ by the same number
with the same gradient in both runs: that is a router's auxiliary loss, which is then added to ours as well. Anything
else is refused.

Shape suffixes: B batch, T time, R rows and W tokens of the window (the made-up labels), V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from seqpar.core.graphs import graph_of_its_own, nodes_of_graph
from seqpar.distributed.reducers import gathers_for_any
from seqpar.integrations.made_up import (
    RefusedModelError,
    are_close,
    close,
    evaluating,
    in_one_line,
    keep_state,
    same_logits,
    undo_rounding,
)
from seqpar.integrations.transformers_call import Call, Running
from seqpar.integrations.transformers_head import number_of_classes, supported_linear
from seqpar.integrations.transformers_model import (
    IGNORED,
    WITHOUT,
    Reading,
    Settings,
    final_bias,
    key_of,
    next_labels,
    readings,
    shifts_labels,
    special_labels,
)
from seqpar.integrations.transformers_window import KEPT_LABELS, batch_shape, made_up_labels, window_rows

UNCALLED = (
    "did not call its output embeddings, as where a fused loss has taken its forward's place (Liger's: with "
    "fused_linear_cross_entropy=False the rest of it stays)"
)


def own_outputs(model: nn.Module, kwargs: dict[str, Any], forget: Callable[[], None]) -> object:
    """Return the model's outputs for the window.

    An error in the model comes from the batch if it also occurs without labels; otherwise the labels caused it.
    `forget` makes a second call of the output embeddings possible.
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
    """Return the arguments with copies of any caches, which a forward may append to; tensors are not copied.

    Prefix tuning gives the model its prefix as a cache.
    """
    return {name: _copy_of_cache(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}


def _copy_of_cache(cache: Cache) -> Cache:
    own = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, Cache):
            # The caches of encoder and decoder
            setattr(own, name, _copy_of_cache(value))
        elif isinstance(value, list):
            # The layers
            setattr(own, name, [copy.copy(item) for item in value])
        elif isinstance(value, dict):
            setattr(own, name, dict(value))
    return own


def check_shapes(name: str, scores: Tensor, target_BT: Tensor) -> None:
    """Raise ValueError unless there is one label for each prediction."""
    if scores.shape[:-1] != target_BT.shape:
        made = f"{name} makes {tuple(scores.shape[:-1])} predictions for labels of shape {tuple(target_BT.shape)}"
        raise ValueError(f"{made}; give each a label, -100 where none is wanted (images, soft prompts)")


class Examined(NamedTuple):
    """What a model made of the logits and labels of a window."""

    reading: Reading
    ours: Tensor
    """The mean cross-entropy of the logits that it returned."""
    theirs: Tensor
    """Its own loss."""
    entering: list[Tensor]
    """The gradient of its loss with respect to everything that enters it besides the logits."""

    @property
    def adds(self) -> bool:
        """Return whether the loss is more than the cross-entropy, or depends on other parameters."""
        return bool(self.entering) or not close(self.ours, self.theirs)


def examine(
    name: str, ways: list[Reading], made_up_RWV: Tensor, bias_V: Tensor | None, target_RW: Tensor, outputs: object
) -> Examined:
    """Return what the model made of the logits and labels of a window; raise an error unless its logits are ours."""
    if not isinstance(outputs, Mapping) or outputs.get("logits") is None:
        fields = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise RefusedModelError(f"{name} returns {fields} and no logits; {WITHOUT}")
    logits_RWV = made_up_RWV.detach()
    # The model adds this outside the head, and only the head's output was made up
    if bias_V is not None:
        logits_RWV = logits_RWV + bias_V
    theirs = outputs["logits"].detach()
    # The configuration names the numbers but not how they are used; the model's own logits decide
    reading = matching_reading(name, ways, logits_RWV, theirs, WITHOUT)
    loss = outputs.get("loss")
    if loss is None:
        raise RefusedModelError(f"{name} returns no loss for labels; {WITHOUT}")
    if loss.dim() != 0:
        raise RefusedModelError(f"{name} returns a loss of shape {tuple(loss.shape)}, not a single number; {WITHOUT}")
    return Examined(reading, mean_loss(theirs, target_RW), loss.detach(), _gradients_on_entry(loss, made_up_RWV))


def check_added_part(name: str, random: Examined, certain: Examined) -> None:
    """Raise RuntimeError unless a model adds the same to the loss of random logits as to that of certain ones.

    If the added part is the same number with the same gradient, it depends on neither logits nor labels, and equals the
    difference of the two losses in any forward. Because random logits are far apart, a loss that shifts its labels
    differently or has a factor is far off.
    """
    added, again = (each.theirs - each.ours for each in (random, certain))
    # As accurate as the losses whose difference it is
    rounding = 8 * torch.finfo(torch.float32).eps * max(1.0, abs(random.ours.item()))
    same = abs(added.item() - again.item()) <= rounding and len(random.entering) == len(certain.entering)
    if same and all(map(close, random.entering, certain.entering)):
        return
    raise RuntimeError(
        f"{name}'s own loss of a few tokens is {random.theirs.item():.6g}, that of apply_seqpar_loss "
        f"{random.ours.item():.6g}; the model shifts its labels differently, or adds something to the cross-entropy "
        f"that depends on labels or logits; {WITHOUT}"
    )


def are_as_read(call: Call, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return whether the logits and loss of a window agree with `call.reading`, without waiting for the device.

    If the model adds something to its loss, only the logits are compared.
    """
    assert call.few_RWV is not None
    assert call.reading is not None
    ours = call.few_RWV
    bias_V = final_bias(call.model, ours[0, 0])
    if bias_V is not None:
        ours = ours + bias_V
    theirs = outputs["logits"].detach()
    same = are_close(call.reading.apply(ours), theirs, theirs.dtype)
    if call.certain:
        return same
    loss = outputs["loss"].detach()
    return same & are_close(mean_loss(theirs.to(ours.dtype), call.window_RW), loss, theirs.dtype)


def _gradients_on_entry(loss: Tensor, logits: Tensor) -> list[Tensor]:
    """Return the gradient of the loss with respect to everything that enters it on the way from the logits.

    It is 1 for an added term; for a factor, such as a parameter after the head, it depends on the logits.
    """
    users = defaultdict(set)
    for node in nodes_of_graph(loss.grad_fn):
        for parent, _ in node.next_functions:
            users[parent].add(node)
    todo = [node for node in users if getattr(node, "variable", None) is logits]
    way = set(todo)
    while todo:
        further = users[todo.pop()] - way
        way |= further
        todo += further
    on_the_way = (node for node in nodes_of_graph(loss.grad_fn) if node in way)
    edges = [GradientEdge(*edge) for node in on_the_way for edge in node.next_functions if edge[0] not in {None, *way}]
    if loss.requires_grad and not way:
        # The model has detached the logits, so everything that its loss depends on is added
        return [torch.ones_like(loss)]
    return [gradient.detach() for gradient in torch.autograd.grad(loss, edges)] if edges else []


def matching_reading(name: str, ways: list[Reading], logits_RWV: Tensor, theirs: Tensor, way_out: str) -> Reading:
    """Return what the model does to the logits of its output embeddings; raise RuntimeError if it is none of `ways`."""
    for way in ways:
        if same_logits(way.apply(logits_RWV), theirs):
            return way
    by = f"in shape ({tuple(theirs.shape)})"
    if logits_RWV.shape == theirs.shape:
        errors = [(way.apply(logits_RWV) - theirs).abs().max().item() for way in ways]
        by = f"by up to {min(errors):.3g}"
    raise RuntimeError(
        f"{name}'s own logits of a few tokens differ {by} from hidden x output embeddings with the bias, softcap "
        f"and scale its configuration names: it does something else to them as well; {way_out}"
    )


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the plain mean loss; nan if every target is ignored.

    Written out, because the function that the model calls may have been replaced.
    """
    target_N = target.flatten().to(logits.device)
    counted_N = target_N != IGNORED
    log_prob_NV = torch.log_softmax(logits.flatten(0, 1), -1)
    return -log_prob_NV.gather(1, target_N.where(counted_N, 0).unsqueeze(1)).squeeze(1)[counted_N].mean()


class Readings:
    """What a model was found to do, and the labels used to find out."""

    def __init__(self, model: PreTrainedModel, running: Running) -> None:
        self.running = running
        self.shifts = shifts_labels(model)
        self.checked: dict[Settings, Reading] = {}
        self.vocab_size = number_of_classes(supported_linear(model))
        self.special = special_labels(model, self.vocab_size)
        parameters = inspect.signature(model.forward).parameters
        self.names_outputs = "return_dict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def target(self, kwargs: dict[str, Any]) -> Tensor:
        """Return the label that each position predicts."""
        if kwargs.get("shift_labels") is not None:
            return kwargs["shift_labels"]  # type: ignore[no-any-return]
        return next_labels(kwargs["labels"]) if self.shifts else kwargs["labels"]

    def few_labels(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with labels for a few tokens, whose loss is compared and then discarded."""
        rows = window_rows(batch_shape(kwargs)[0])
        # Different classes, because a class weight has no effect on a mean over a single class
        labels = torch.linspace(0, self.vocab_size - 1, rows * KEPT_LABELS, device="cpu")
        return self._label(model, kwargs, labels.long().view(rows, KEPT_LABELS))

    def _label(self, model: PreTrainedModel, kwargs: dict[str, Any], labels_RW: Tensor) -> dict[str, Any]:
        """Return arguments with these labels, and with `return_dict` if the model takes it."""
        labels_RW = labels_RW.to(supported_linear(model).weight.device).contiguous()
        window: dict[str, Any] = {"labels": labels_RW}
        if kwargs.get("shift_labels") is not None:
            # Different from the unshifted ones, to show which of the two the model uses
            window["shift_labels"] = labels_RW.flip(1)
        if self.names_outputs:
            window["return_dict"] = True
        return kwargs | window

    def of(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reading:
        """Return what the model does in a forward with these arguments, after checking them if they are new."""
        # Checked once for each combination, because any setting may choose a different branch of the forward
        settings = key_of(model, self.few_labels(model, kwargs))
        if gathers_for_any(model, settings not in self.checked):
            self.checked[settings] = self._check(model, kwargs)
        return self.checked[settings]

    def _check(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reading:
        """Run the model on the window and return what it does to logits and adds to their loss, or raise an error."""
        labels_RW = made_up_labels(kwargs, supported_linear(model).weight, self.vocab_size, self.special)
        random = self._examine(model, self._label(model, kwargs, labels_RW))
        if gathers_for_any(model, random.adds):
            again = self._label(model, kwargs, labels_RW[:, :KEPT_LABELS])
            check_added_part(type(model).__name__, random, self._examine(model, again, certain=True))
        return random.reading._replace(adds=random.adds)

    def _examine(self, model: PreTrainedModel, kwargs: dict[str, Any], certain: bool = False) -> Examined:
        """Run the model on the window and return what it made of the window (`examine`)."""
        name = type(model).__name__
        head = model.get_output_embeddings()
        weight_VD = supported_linear(model).weight
        call = Call(model, self.target(kwargs), examined=True, certain=certain)
        self.running.call = call
        # After all other hooks, including any that `fully_shard` has added since
        widening = head.register_forward_hook(self._undo_rounding)
        try:
            # With gradients enabled, so that a loss that requires one is noticed
            with keep_state(model, weight_VD.device), evaluating(head), torch.enable_grad(), graph_of_its_own():
                outputs = own_outputs(model, kwargs, lambda: setattr(call, "hidden_BTD", None))
        finally:
            widening.remove()
            self.running.call = None
        if call.made_up is None:
            raise RefusedModelError(f"{name} {UNCALLED}; {WITHOUT}")
        return examine(name, readings(model), call.made_up, final_bias(model, weight_VD), call.window_RW, outputs)

    def _undo_rounding(self, head: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the made-up logits unrounded if another hook, such as FSDP2's `output_dtype`, only rounded them."""
        call = self.running.call
        if call is None or call.made_up is None:
            return None
        return undo_rounding(output, call.made_up).clone()
