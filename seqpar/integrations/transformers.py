"""Hugging Face models: a training forward in which the logits of all tokens never exist at once.

Hooks of torch do it, and the model's code runs as it is. Before the model, labels are put by, and made-up labels of a
window of a few tokens take their place. Before its output embeddings, the loss is taken from all hidden states; a
window goes on. After the model, its loss is replaced by ours. On the first call, and whenever other arguments or
settings are given, the model is first run once more for what it makes of such a window (`transformers_check`): scaled,
capped or biased logits, shifted labels, losses that are added.

Shape suffixes: B batch, T time, D hidden, V vocabulary, W tokens of the window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.core.chunks import check_size
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.wrappers import refuse_sharded
from seqpar.integrations.transformers_check import (
    WITHOUT,
    RefusedModelError,
    check_shapes,
    examine,
    made_up_labels,
    made_up_logits,
    own_outputs,
    refuse_added,
    undisturbed,
)
from seqpar.integrations.transformers_model import (
    IGNORED,
    Reading,
    Settings,
    decoder_inputs,
    final_bias,
    lacks_decoder_inputs,
    next_labels,
    plain_head,
    readings,
    settings_of,
    shifts_labels,
    special_labels,
)
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.losses.criteria import LabelSmoothing
from seqpar.losses.softmax_loss import check_smoothing

KEPT = 2
"""Tokens of the window on calls where nothing is to be found out."""


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
            `final_logits_bias`, soft caps and factors of the logits are known by the names they have in
            configurations. A `PeftModel` gets the loss in its base model.
        label_smoothing: eps in [0, 1), by the convention of torch and of Hugging Face: eps/V to all V classes.
        chunk_tokens: the most tokens whose logits exist at once; None chooses by bytes.

    Returns:
        `AppliedLoss`: its `remove()`, or leaving the `with` block, makes the model what it was.

    Raises:
        TypeError: no output embeddings, or such as are no plain `nn.Linear` (PEFT's adapters on them); in the first
            training forward, a model that does more with labels than take the loss of its logits.
        ValueError: numbers out of their range; a model that has the loss already; labels that are not as many as the
            predictions.
        RuntimeError: in the first training forward, or the first with other arguments or settings: the model makes
            other logits, or another loss, of a few made-up tokens than this would; the message says by how much. So
            does an auxiliary loss (mixtures of experts), which would be lost. In any: output embeddings that were
            replaced since; sharded ones.

    To find that out the model runs forward twice there.
    """
    check_smoothing(label_smoothing, "torch")
    check_size(chunk_tokens, "chunk_tokens")
    if hasattr(model, "get_base_model"):  # PEFT's: soft prompts are put before its labels on the way to the base
        model = model.get_base_model()
    plain_head(model)
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
    target_BT: Tensor | None = None
    """What each position is to predict; None where the labels come after the forward."""
    reading: Reading | None = None
    """What the model does to its logits; None while that is being found out."""
    items: Tensor | int | None = None
    as_tuple: bool = False
    hidden_BTD: Tensor | None = None
    loss: TokenLoss | None = None
    window_1WD: Tensor | None = None
    made_up: Tensor | None = None
    """The logits in which it is found out."""


class AppliedLoss:
    """The loss in a model, until `remove()`; what `apply_seqpar_loss` returns."""

    def __init__(self, model: PreTrainedModel, label_smoothing: float, chunk_tokens: int | None) -> None:
        self.model = model
        self.label_smoothing = label_smoothing
        self.chunk_tokens = chunk_tokens
        self.shifts = shifts_labels(model)
        self.signature = inspect.signature(model.forward)
        self.withholds = False
        self.withheld: Reading | None = None
        self.unlabelled: dict[str, Any] | None = None
        self.checked: dict[Settings, Reading] = {}
        head = model.get_output_embeddings()
        self.window_1W = made_up_labels(special_labels(model, head.out_features), head.out_features)
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            head.register_forward_pre_hook(self._at_head),
            head.register_forward_hook(self._from_head, prepend=True),
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
        self.withheld = None
        if args:
            kwargs = self.signature.bind_partial(*args).arguments | kwargs
        if kwargs.get("labels") is None and not self.withholds:
            return None
        if not (model.training and torch.is_grad_enabled()):
            self.unlabelled = kwargs if kwargs.get("labels") is None and not self.checked else None
            return None
        if kwargs.get("fused_lm_head"):
            raise TypeError(
                f"TRL's trainer takes the loss of {type(model).__name__} in its own chunks and would ignore this one; "
                "hand it compute_loss_func=compute_loss_func(applied), or use it without apply_seqpar_loss"
            )
        self._check_head(head)
        call, kwargs = self._put_by(model, kwargs)
        call.reading = self._reading(model, kwargs)
        self.withheld = call.reading if call.target_BT is None else None
        head.__dict__["seqpar_call"] = call
        return (), kwargs | {k: kwargs[k][:, :KEPT] for k in ("labels", "shift_labels") if kwargs.get(k) is not None}

    def _check_head(self, head: nn.Linear) -> None:
        if self._at_head not in head._forward_pre_hooks.values():
            raise RuntimeError(
                "the output embeddings were replaced since apply_seqpar_loss (resize_token_embeddings does that); call "
                "remove() and apply it again"
            )
        refuse_sharded(head)

    def _put_by(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """What the call's loss is made of, and what the model gets."""
        kwargs = dict(kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        labels_BT = kwargs.get("labels")
        if labels_BT is not None and labels_BT.dim() != 2:
            raise ValueError(f"labels have shape {tuple(labels_BT.shape)}; they must be (batch, time)")
        if lacks_decoder_inputs(model, kwargs):
            if labels_BT is None:
                raise ValueError(
                    "the batch has neither labels nor decoder_input_ids; a Trainer with a compute_loss_func takes the "
                    "labels away: use DataCollatorForSeq2Seq(tokenizer, model=model), which makes decoder_input_ids"
                )
            kwargs["decoder_input_ids"] = decoder_inputs(model, labels_BT)
        target_BT = None if labels_BT is None else self._target(labels_BT, kwargs.get("shift_labels"))
        named = kwargs.get("return_dict")
        as_tuple = not (getattr(model.config, "return_dict", True) if named is None else named)
        return Call(model, target_BT, items=items, as_tuple=as_tuple), kwargs | self._window(model, kwargs)

    def _window(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The labels of the window, and what names the outputs."""
        labels_1W = self.window_1W.to(model.get_output_embeddings().weight.device)
        window: dict[str, Any] = {"labels": labels_1W}
        if kwargs.get("shift_labels") is not None:
            window["shift_labels"] = labels_1W.flip(1)
        parameters = self.signature.parameters
        if "return_dict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            window["return_dict"] = True
        return window

    def _reading(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reading:
        """What the model does to its logits, found out where these settings are new."""
        settings = (model.training, *settings_of(model, kwargs))
        if settings not in self.checked:
            self.checked[settings] = self._found_out(model, kwargs)
        return self.checked[settings]

    def _found_out(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reading:
        name, head = type(model).__name__, model.get_output_embeddings()
        call = Call(model, made_up=made_up_logits(self.window_1W, head.weight[:, 0]))
        head.__dict__["seqpar_call"] = call
        try:
            with undisturbed(model, head.weight.device), torch.enable_grad():
                outputs = own_outputs(model, kwargs, lambda: setattr(call, "hidden_BTD", None))
        finally:
            head.__dict__["seqpar_call"] = None
        if call.hidden_BTD is None:
            raise RefusedModelError(f"{name} did not call its output embeddings, {type(head).__name__}; {WITHOUT}")
        assert call.made_up is not None
        bias_V = final_bias(model, head.weight)
        logits_1WV = call.made_up if bias_V is None else call.made_up + bias_V
        target_1W = self._target(kwargs["labels"], kwargs.get("shift_labels"))
        return examine(name, readings(model), logits_1WV, target_1W, outputs)

    def _at_head(self, head: Any, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """Takes the loss of all hidden states and lets a window go on."""
        call: Call | None = head.__dict__.get("seqpar_call")
        if call is None:
            return None
        name = type(call.model).__name__
        if call.hidden_BTD is not None:
            raise RefusedModelError(f"{name} called its output embeddings twice in one forward; {WITHOUT}")
        (hidden_BTD,) = args
        if hidden_BTD.dim() != 3:
            raise RefusedModelError(
                f"{name} calls its output embeddings with hidden states of shape {tuple(hidden_BTD.shape)}; they must "
                f"be (batch, time, hidden); {WITHOUT}"
            )
        call.hidden_BTD = hidden_BTD
        if call.target_BT is not None:
            call.loss = self._token_loss(call.model, call.reading, hidden_BTD, call.target_BT)
        rows_ND = hidden_BTD.detach().flatten(0, 1)
        tokens = KEPT if call.made_up is None else self.window_1W.numel()
        some_W = torch.arange(tokens, device=rows_ND.device) % max(1, len(rows_ND))
        call.window_1WD = rows_ND[some_W].unsqueeze(0)
        return (call.window_1WD,)

    def _from_head(self, head: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Logits that need no gradient: a loss that does is made of something else as well."""
        call: Call | None = head.__dict__.get("seqpar_call")
        if call is None:
            return None
        if call.made_up is None:
            return output.detach()
        assert call.window_1WD is not None
        if not torch.equal(output, F.linear(call.window_1WD, head.weight, head.bias)):
            raise RefusedModelError(
                f"the output embeddings of {type(call.model).__name__} do more than multiply and add a bias (a hook, a "
                f"forward of their own); {WITHOUT}"
            )
        return call.made_up

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Puts our loss in the place of the window's."""
        head = model.get_output_embeddings()
        call: Call | None = head.__dict__.pop("seqpar_call", None)
        if call is None or outputs is None:  # None: the forward raised
            return None
        name = type(model).__name__
        if call.hidden_BTD is None:
            raise RuntimeError(f"{name} did not call its output embeddings, {type(head).__name__}")
        refuse_added(name, outputs)
        fields: dict[str, Any] = {"loss": None, "logits": None}
        if call.loss is None:
            fields["logits"] = _Using.apply(call.hidden_BTD, *head.parameters())
        else:
            fields["loss"] = _divided(call.loss, call.items)
        if not call.as_tuple:
            return type(outputs)(**{**outputs, **fields})
        return tuple((outputs | fields)[key] for key in outputs if key != "loss" or call.loss is not None)

    def loss_of_outputs(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss a Trainer asks for after the forward, of hidden states in training and of logits elsewhere."""
        scores = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        target_BT = self._target(labels, None)
        if self.withheld is not None:
            loss = self._token_loss(self.model, self.withheld, scores, target_BT)
            return _divided(loss, num_items_in_batch)
        if self.unlabelled is not None:  # evaluated before it was trained: nothing is known of its shift
            refuse_sharded(self.model.get_output_embeddings())
            self._reading(self.model, self.unlabelled | self._window(self.model, self.unlabelled))
            self.unlabelled = None
        criterion = LabelSmoothing(self.label_smoothing, "torch", ignore_index=IGNORED)
        check_shapes(type(self.model).__name__, scores, target_BT)
        return _divided(criterion.token_loss(scores.flatten(0, -2), target_BT.flatten()), num_items_in_batch)

    def _target(self, labels_BT: Tensor, shifted_BT: Tensor | None) -> Tensor:
        """What each position is to predict."""
        if shifted_BT is not None:
            return shifted_BT
        return next_labels(labels_BT) if self.shifts else labels_BT

    def _token_loss(
        self, model: PreTrainedModel, reading: Reading | None, hidden_BTD: Tensor, target_BT: Tensor
    ) -> TokenLoss:
        assert reading is not None
        check_shapes(type(model).__name__, hidden_BTD, target_BT)
        head = model.get_output_embeddings()
        bias_V: Tensor | None = final_bias(model, head.weight)
        if head.bias is not None:
            bias_V = head.bias if bias_V is None else head.bias + bias_V
        return linear_cross_entropy(
            hidden_BTD,
            head.weight,
            target_BT.to(hidden_BTD.device),
            bias=bias_V,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            softcap=reading.softcap,
            temperature=reading.temperature,
            chunk_tokens=self.chunk_tokens,
        )


class _Using(torch.autograd.Function):
    """Hidden states, with parameters in their graph that the loss will use: DDP looks there for what was used."""

    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return hidden_BTD.view_as(hidden_BTD)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream, *[None] * ctx.parameters


def _divided(loss: TokenLoss, items: Tensor | int | None) -> Tensor:
    if items is None:
        return loss.mean
    return loss.total / (items.to(loss.total.device) if isinstance(items, Tensor) else items)
