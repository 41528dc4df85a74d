"""Find out, once for each combination of settings, what a Hugging Face model does to its logits and adds to its loss.

Shape suffixes: B batch, T time, V vocabulary, R rows and W tokens of the window.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.core.graphs import graph_of_its_own
from seqpar.distributed.reducers import gathers_for_any
from seqpar.integrations.made_up import RefusedModelError, evaluating, keep_state, undo_rounding
from seqpar.integrations.transformers_call import Call, Running
from seqpar.integrations.transformers_check import WITHOUT, Examined, check_added_part, examine, own_outputs
from seqpar.integrations.transformers_head import number_of_classes, supported_linear
from seqpar.integrations.transformers_model import (
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
