"""Hugging Face models: a training forward in which the logits of all tokens never exist at once.

Three hooks of torch do it, and the model's code runs as it is. Before the model, labels are put by and replaced by
those of a window of a few tokens. Before its output embeddings, the loss is taken from all hidden states, and those of
the window go on. After the model, its loss is replaced by ours. What the model itself made of the window (scaled,
capped or biased logits, shifted labels) is what ours is checked against, on the first call.

Shape suffixes: B batch, T time, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.chunks import check_size
from seqpar.criteria import LabelSmoothing, check_smoothing
from seqpar.integrations.transformers_model import (
    IGNORED,
    Scores,
    check_logits,
    check_loss,
    close,
    decoder_inputs,
    lacks_decoder_inputs,
    mean_loss,
    next_labels,
    shifts_labels,
)
from seqpar.linear_cross_entropy import linear_cross_entropy
from seqpar.sharded import refuse_sharded
from seqpar.token_loss import TokenLoss

WINDOW = 8
"""Tokens of which the model makes its own logits and loss on calls that are checked."""


def apply_seqpar_loss(
    model: PreTrainedModel, *, label_smoothing: float = 0.0, chunk_tokens: int | None = None
) -> AppliedLoss:
    """From here on, `model(..., labels=labels).loss` in training is chunked, with the same value and gradient.

    Plain equivalent: `model(...)` itself, or, with smoothing,
    `F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)` of its logits (and, for a
    decoder-only model, of labels shifted by one, as the model does).

        with apply_seqpar_loss(model, label_smoothing=0.1):
            Seq2SeqTrainer(model, arguments, train_dataset=..., data_collator=...).train()

    It acts where the model is training, gradients are enabled and labels are given; `logits` is then None. Evaluation
    (its loss has no smoothing), `generate` and calls without labels are as before. `num_items_in_batch`, which a
    Trainer hands to the model, is honoured: the loss is sum / num_items_in_batch, so that accumulation and ranks are
    exact; without it the loss is the mean over labels that are not -100 (0, not nan, where there are none). Leave the
    Trainer's own `label_smoothing_factor` at 0: it would ask for all logits.

    Args:
        model: an encoder-decoder or decoder-only model, or any other whose output embeddings are an `nn.Linear` that is
            called once per forward: Marian, BART, mBART, T5, Pegasus, M2M100, Llama, GPT-2, Gemma 2, ... Tied weights,
            `final_logits_bias`, `final_logit_softcapping`, `logit_scale` and `logits_scaling` are known.
        label_smoothing: eps in [0, 1), by the convention of torch and of Hugging Face: eps/V to all V classes.
        chunk_tokens: the most tokens whose logits exist at once; None chooses by bytes.

    Returns:
        `AppliedLoss`: its `remove()`, or leaving the `with` block, makes the model what it was.

    Raises:
        TypeError: no output embeddings, or such as are no plain `nn.Linear`.
        ValueError: numbers out of their range; a model that has the loss already.
        RuntimeError: in the first training forward: the model makes other logits, or another loss, of a few tokens than
            this would; the message says by how much. In any: an auxiliary loss (mixtures of experts), which would be
            lost; output embeddings that were replaced since; sharded ones.
    """
    check_smoothing(label_smoothing, "torch", ("label_smoothing", "smoothing"))
    check_size(chunk_tokens, "chunk_tokens")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise TypeError(
            f"the output embeddings of {type(model).__name__} are a {type(head).__name__}; the chunked loss needs a "
            "torch.nn.Linear"
        )
    if any(isinstance(getattr(hook, "__self__", None), AppliedLoss) for hook in model._forward_hooks.values()):
        raise ValueError(f"this {type(model).__name__} has the loss already; remove() the first before another")
    return AppliedLoss(model, label_smoothing, chunk_tokens)


def compute_loss_func(applied: AppliedLoss) -> Callable[..., Tensor]:
    """What `Trainer(compute_loss_func=...)` takes: sum / num_items_in_batch, in chunks.

    Plain equivalent: `F.cross_entropy(logits, labels, label_smoothing=..., reduction="sum") / num_items_in_batch`.

        applied = apply_seqpar_loss(model, label_smoothing=0.1)
        Seq2SeqTrainer(model, ..., compute_loss_func=compute_loss_func(applied)).train()

    `apply_seqpar_loss` alone gives the same gradient, exact over accumulation and ranks; this is for where a Trainer is
    to be told its loss. It then takes the labels away before the forward. So, from this call on, a training forward
    without labels leaves hidden states where logits were, for the function to take; and an encoder-decoder needs
    `decoder_input_ids` in the batch, as `DataCollatorForSeq2Seq(tokenizer, model=model)` makes them.
    """
    applied.withholds = True
    return applied.loss_of_outputs


@dataclass
class Call:
    """One training forward, from before the model until after it."""

    model: PreTrainedModel
    target_BT: Tensor | None
    """What each position is to predict; None where the labels come after the forward."""
    window: tuple[slice, slice]
    items: Tensor | int | None
    hidden_BTD: Tensor | None = None
    loss: TokenLoss | None = None
    window_logits: Tensor | None = None


class AppliedLoss:
    """The loss in a model, until `remove()`; what `apply_seqpar_loss` returns."""

    def __init__(self, model: PreTrainedModel, label_smoothing: float, chunk_tokens: int | None) -> None:
        self.model = model
        self.label_smoothing = label_smoothing
        self.chunk_tokens = chunk_tokens
        self.shifts = shifts_labels(model)
        self.withholds = False
        self.checked = False
        self.withheld = False
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.get_output_embeddings().register_forward_pre_hook(self._at_head),
            # First, so that hooks of fully_shard see our loss and not the one it replaces
            model.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        ]
        # By these a Trainer leaves the division to the model, and counts the labels that are predicted
        told = {"accepts_loss_kwargs": True, **({"loss_type": "ForCausalLM"} if self.shifts else {})}
        self.before = {name: model.__dict__[name] for name in told if name in model.__dict__}
        self.told = tuple(told)
        model.__dict__.update(told)

    def remove(self) -> None:
        """Make the model what it was; a second time does nothing."""
        if not self.hooks:
            return
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for name in self.told:
            del self.model.__dict__[name]
        self.model.__dict__.update(self.before)

    def __enter__(self) -> AppliedLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Puts the labels by and leaves the model those of a window."""
        head = model.get_output_embeddings()
        head.__dict__["seqpar_call"] = None
        self.withheld = False
        if not (model.training and torch.is_grad_enabled()):
            return None
        if args:
            kwargs = inspect.signature(model.forward).bind_partial(*args).arguments | kwargs
        if kwargs.get("labels") is None and not self.withholds:
            return None
        self._check_head(head)
        take = self._withhold if kwargs.get("labels") is None else self._put_by
        head.__dict__["seqpar_call"], kwargs = take(model, kwargs)
        return (), kwargs

    def _check_head(self, head: nn.Linear) -> None:
        if self._at_head not in head._forward_pre_hooks.values():
            raise RuntimeError(
                "the output embeddings were replaced since apply_seqpar_loss (resize_token_embeddings does that); call "
                "remove() and apply it again"
            )
        refuse_sharded(head)

    def _put_by(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """The labels, and what the model gets in their place."""
        labels_BT = kwargs["labels"]
        if labels_BT.dim() != 2:
            raise ValueError(f"labels have shape {tuple(labels_BT.shape)}; they must be (batch, time)")
        kwargs = dict(kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        if lacks_decoder_inputs(model, kwargs):
            kwargs["decoder_input_ids"] = decoder_inputs(model, labels_BT)
        window = _window(labels_BT, self.checked)
        target_BT = self._target(labels_BT, kwargs.get("shift_labels"))
        cut = {name: kwargs[name][window] for name in ("labels", "shift_labels") if kwargs.get(name) is not None}
        return Call(model, target_BT, window, items), kwargs | cut

    def _withhold(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """A forward whose loss comes later."""
        if lacks_decoder_inputs(model, kwargs):
            raise ValueError(
                "the batch has neither labels nor decoder_input_ids; a Trainer with a compute_loss_func takes the "
                "labels away: use DataCollatorForSeq2Seq(tokenizer, model=model), which makes decoder_input_ids of them"
            )
        self.withheld = True
        kept = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
        return Call(model, None, (slice(0, 1), slice(0, WINDOW)), None), kept

    def _at_head(self, head: Any, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """Takes the loss of all hidden states and lets those of the window go on."""
        call: Call | None = head.__dict__.get("seqpar_call")
        if call is None:
            return None
        if call.hidden_BTD is not None:
            raise RuntimeError(f"{type(call.model).__name__} called its output embeddings twice in one forward")
        (hidden_BTD,) = args
        call.hidden_BTD = hidden_BTD
        if call.target_BT is not None:
            call.loss = self._token_loss(call.model, head, hidden_BTD, call.target_BT)
        window = hidden_BTD.detach()[call.window]
        if not self.checked:
            with torch.no_grad():
                call.window_logits = Scores.of(call.model, head, window).logits(window, head.weight)
        return (window,)

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Puts our loss in the place of the window's."""
        head = model.get_output_embeddings()
        call: Call | None = head.__dict__.pop("seqpar_call", None)
        if call is None or outputs is None:  # None: the forward raised
            return None
        if call.hidden_BTD is None:
            raise RuntimeError(f"{type(model).__name__} did not call its output embeddings, {type(head).__name__}")
        if isinstance(outputs, Mapping) and any(name.endswith(("aux_loss", "z_loss")) for name in outputs):
            raise RuntimeError(
                f"{type(model).__name__} adds an auxiliary loss to its own (output_router_logits), which the chunked "
                "loss would drop; use the model without apply_seqpar_loss"
            )
        if not self.checked:
            self.checked = self._agrees(call, kwargs, outputs)
        if call.loss is None:
            return _replaced(outputs, logits=_Using.apply(call.hidden_BTD, *head.parameters()))
        return _replaced(outputs, loss=_divided(call.loss, call.items), logits=None)

    def loss_of_outputs(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss a Trainer asks for after the forward, of hidden states in training and of logits elsewhere."""
        scores = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        target_BT = self._target(labels, None)
        if self.withheld:
            loss = self._token_loss(self.model, self.model.get_output_embeddings(), scores, target_BT)
        else:
            criterion = LabelSmoothing(self.label_smoothing, "torch", ignore_index=IGNORED)
            loss = criterion.token_loss(scores.flatten(0, -2), target_BT.flatten())
        return _divided(loss, num_items_in_batch)

    def _target(self, labels_BT: Tensor, shifted_BT: Tensor | None) -> Tensor:
        """What each position is to predict."""
        if shifted_BT is not None:
            return shifted_BT
        return next_labels(labels_BT) if self.shifts else labels_BT

    def _token_loss(self, model: PreTrainedModel, head: nn.Linear, hidden_BTD: Tensor, target_BT: Tensor) -> TokenLoss:
        scores = Scores.of(model, head, hidden_BTD)
        return linear_cross_entropy(
            hidden_BTD,
            head.weight,
            target_BT.to(hidden_BTD.device),
            bias=scores.bias_V,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            softcap=scores.softcap,
            temperature=scores.temperature,
            chunk_tokens=self.chunk_tokens,
        )

    def _agrees(self, call: Call, kwargs: dict[str, Any], outputs: Any) -> bool:
        """Whether the model's own logits and loss of the window are ours for certain; raises where they are not.

        False where the window does not tell, because a loss without the shift, or with one, would be the same.
        """
        name, ours = type(call.model).__name__, call.window_logits
        has_names = isinstance(outputs, Mapping)
        logits = outputs["logits"] if has_names else outputs[0 if call.loss is None else 1]
        check_logits(name, ours, logits)
        if call.loss is None:
            return True
        labels = kwargs["labels"]
        loss = (outputs["loss"] if has_names else outputs[0]).detach()
        check_loss(name, mean_loss(logits, self._target(labels, kwargs.get("shift_labels"))), loss)
        return not close(mean_loss(logits, labels if self.shifts else next_labels(labels)), loss)


class _Using(torch.autograd.Function):
    """Hidden states, with parameters in their graph that the loss will use: DDP looks there for what was used."""

    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return hidden_BTD.view_as(hidden_BTD)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream, *[None] * ctx.parameters


def _window(labels_BT: Tensor, checked: bool) -> tuple[slice, slice]:
    """A row and some of its time steps; while unchecked, such as have labels, which has to wait for the device."""
    if checked:
        return slice(0, 1), slice(0, 2)
    kept_BT = labels_BT != IGNORED
    row = int(kept_BT.sum(1).argmax())
    start = max(0, int(kept_BT[row].int().argmax()) - 1)
    return slice(row, row + 1), slice(start, start + WINDOW)


def _replaced(outputs: Any, **fields: Tensor | None) -> Any:
    """The outputs with other fields; in a tuple they come first."""
    if isinstance(outputs, tuple):
        return *fields.values(), *outputs[len(fields) :]
    return type(outputs)(**{**outputs, **fields})


def _divided(loss: TokenLoss, items: Tensor | int | None) -> Tensor:
    if items is None:
        return loss.mean
    return loss.total / (items.to(loss.total.device) if isinstance(items, Tensor) else items)
