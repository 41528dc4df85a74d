"""Train Hugging Face models without the logits of all tokens ever existing at once.

Hooks of torch do this; the model's own code runs unchanged. In one training forward:

    before the model              labels are stored, and the model gets made-up labels of a few tokens, the window
    before its output embeddings  the loss is computed from all hidden states; only a window of them goes on
    after the model               the window's loss is replaced by that of all tokens

On the first call, and whenever arguments or settings change, the model first runs once more on such a window
(`transformers_check`), to find out whether it scales, caps or biases its logits, shifts labels or adds other losses.

Shape suffixes: B batch, T time, D hidden, V vocabulary, W tokens of the window.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.core.checks import PROVED, check_size
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.reducers import gathers_for_any
from seqpar.integrations.made_up import RefusedModelError, undisturbed, unrounded
from seqpar.integrations.transformers_call import Call, UsingParameters, divided, shortened
from seqpar.integrations.transformers_check import (
    WITHOUT,
    Examined,
    check_added,
    check_shapes,
    examine,
    made_up_labels,
    mean_loss,
    own_outputs,
)
from seqpar.integrations.transformers_head import (
    gather_in_model,
    logits_for,
    number_of_classes,
    refuse_released_head,
    refuse_sharded_head,
)
from seqpar.integrations.transformers_model import (
    IGNORED,
    Reading,
    Settings,
    decoder_inputs,
    final_bias,
    key_of,
    lacks_decoder_inputs,
    next_labels,
    plain_head,
    readings,
    refuse_adapter,
    shifts_labels,
    special_labels,
)
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.rows.criteria import LabelSmoothing
from seqpar.rows.smoothing import check_smoothing

UNLABELLED = (
    "got no labels in a training forward, so it computes all logits and does not use the loss of apply_seqpar_loss; a "
    "Trainer removes the labels for its label_smoothing_factor or a compute_loss_func: leave the first at 0 and use "
    "apply_seqpar_loss(model, label_smoothing=...), or pass compute_loss_func=compute_loss_func(applied)"
)

CALL = "seqpar_call"
"""How the names begin under which the output embeddings keep the forward that runs, one for each thread."""


def apply_seqpar_loss(
    model: PreTrainedModel, *, label_smoothing: float = 0.0, chunk_tokens: int | None = None
) -> AppliedLoss:
    """Make `model(..., labels=labels).loss` in training a chunked loss, with the same value and gradient.

    Plain equivalent: `model(...)` itself, or, with smoothing,
    `F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)` of its logits (and, for a
    decoder-only model, of labels shifted by one, as the model does).

        with apply_seqpar_loss(model, label_smoothing=0.1):
            Seq2SeqTrainer(model, arguments, train_dataset=..., data_collator=...).train()

    The loss is chunked if the model is training, gradients are enabled and labels are given; `logits` is then None.
    Evaluation (whose loss has no smoothing), `generate` and calls without labels do not change. With
    `num_items_in_batch`, which a Trainer passes to the model, the loss is sum / num_items_in_batch, so that
    accumulation and several ranks are exact; without it the loss is the mean over labels that are not -100 (0, not nan,
    if there are none). A router's auxiliary loss (Mixtral and Qwen3-MoE with `output_router_logits`) is added as the
    model adds it, once a forward, undivided. Leave the Trainer's own `label_smoothing_factor` at 0: it needs all
    logits, and a training forward without labels, as it makes them, warns once that this loss is not used.

    Args:
        model: an encoder-decoder or decoder-only model, or any other whose output embeddings are an `nn.Linear` that is
            called once per forward: Marian, BART, mBART, T5, Pegasus, M2M100, Llama, GPT-2, Gemma 2, ... Tied weights,
            `final_logits_bias`, and soft caps and factors of the logits are supported, under the names that they have
            in configurations. For a `PeftModel` the loss of its base model is replaced.
        label_smoothing: eps in [0, 1), by the convention of torch and of Hugging Face: eps/V to all V classes.
        chunk_tokens: the most tokens whose logits exist at once; None chooses by bytes.

    Returns:
        `AppliedLoss`: its `remove()`, or leaving the `with` block, restores the model.

    Raises:
        TypeError: not a Hugging Face model (a DistributedDataParallel or a Trainer around one is not), or a compiled
            one; PEFT's AdaLoRA, AdaptionPrompt and CPT; no output embeddings, or not a plain `nn.Linear` (as with
            PEFT's adapters on them); in the first training forward, a model that uses labels for more than the loss of
            its logits; in a proof of `seqpar.testing`, a model in evaluation mode, which keeps its own loss.
        ValueError: a number out of its range, a model that has the loss already, an `ignore_index` other than -100 in a
            call, or labels whose number is not that of the predictions.
        RuntimeError: in the first training forward, or the first with other arguments or settings: the model's own
            logits or loss of a few made-up tokens differ from ours (the message says by how much), or it adds something
            that depends on labels or logits, or an auxiliary loss where there is a `compute_loss_func`, which would
            lose it. In any training forward: the output embeddings have been replaced or resized, or are sharded where
            the loss needs them.

    A forward with new arguments or settings runs the model twice, for this check, or three times if it adds a loss.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from seqpar.integrations.transformers import apply_seqpar_loss
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model, tokens = LlamaForCausalLM(config).train(), torch.randint(50, (2, 9))
        >>> plain = model(tokens, labels=tokens).loss
        >>> with apply_seqpar_loss(model):
        ...     chunked = model(tokens, labels=tokens)
        >>> torch.allclose(chunked.loss, plain), chunked.logits
        (True, None)
    """
    check_smoothing(label_smoothing, "torch")
    check_size(chunk_tokens, "chunk_tokens")
    # PEFT's model puts soft prompts in front of the labels before it calls its base model
    if hasattr(model, "get_base_model"):
        refuse_adapter(model, WITHOUT)
        model = model.get_base_model()
    if hasattr(model, "_orig_mod"):
        before = "apply the loss before torch.compile, to the model inside (model._orig_mod)"
        raise TypeError(f"this {type(model._orig_mod).__name__} is compiled; {before}")
    plain_head(model)
    if any(isinstance(getattr(hook, "__self__", None), AppliedLoss) for hook in model._forward_hooks.values()):
        raise ValueError(f"this {type(model).__name__} has the loss already; remove() it before you apply another")
    return AppliedLoss(model, label_smoothing, chunk_tokens)


def compute_loss_func(applied: AppliedLoss) -> Callable[..., Tensor]:
    """Return a function for `Trainer(compute_loss_func=...)` that computes sum / num_items_in_batch in chunks.

    `apply_seqpar_loss` alone gives the same gradient, exact over accumulation and ranks; use this only for a Trainer
    that requires a loss function. Such a Trainer removes the labels before the forward. So, after this call, a training
    forward without labels returns hidden states in the field `logits`, which the function turns into the loss; and an
    encoder-decoder needs `decoder_input_ids` in the batch, as `DataCollatorForSeq2Seq(tokenizer, model=model)` makes
    them. The function must be called after each forward before the next one; it raises RuntimeError otherwise.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model, tokens = LlamaForCausalLM(config).train(), torch.randint(50, (2, 9))
        >>> logits = model(tokens).logits[:, :-1].flatten(0, 1)
        >>> loss_func = compute_loss_func(apply_seqpar_loss(model))  # Trainer(model, ..., compute_loss_func=loss_func)
        >>> loss = loss_func(model(input_ids=tokens), tokens, num_items_in_batch=16)
        >>> torch.allclose(loss, F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / 16)
        True
    """
    applied.withholds = True
    return applied.loss_of_outputs


def _of_this_thread() -> str:
    """Return the name under which the output embeddings keep this thread's forward: threads may share a model."""
    return f"{CALL}_{threading.get_ident()}"


class AppliedLoss:
    """The chunked loss of a model, until `remove()`; `apply_seqpar_loss` returns it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from seqpar.integrations.transformers import apply_seqpar_loss
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model, tokens = LlamaForCausalLM(config).train(), torch.randint(50, (2, 9))
        >>> applied = apply_seqpar_loss(model)
        >>> applied.remove()
        >>> model(tokens, labels=tokens).logits.shape
        torch.Size([2, 9, 50])
    """

    def __init__(self, model: PreTrainedModel, label_smoothing: float, chunk_tokens: int | None) -> None:
        self.model = model
        self.label_smoothing = label_smoothing
        self.chunk_tokens = chunk_tokens
        self.shifts = shifts_labels(model)
        self.signature = inspect.signature(model.forward)
        self.withholds = False
        self.withheld: Reading | None = None
        self.unlabelled: dict[str, Any] | None = None
        self.warned = False
        self.checked: dict[Settings, Reading] = {}
        head = model.get_output_embeddings()
        self.vocab_size = number_of_classes(head)
        self.window_1W = made_up_labels(special_labels(model, self.vocab_size), self.vocab_size)
        self.at_head = head.register_forward_pre_hook(self._at_head)
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.at_head,
            head.register_forward_hook(self._from_head, prepend=True),
            # First, so that hooks of fully_shard see our loss and not the one it replaces
            model.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        ]
        # A Trainer reads these: they leave the division to the model and make it count only the predicted labels
        flags: dict[str, Any] = {"accepts_loss_kwargs": True}
        if self.shifts:
            flags["loss_type"] = "ForCausalLM"
        self.flags_before = {name: model.__dict__[name] for name in flags if name in model.__dict__}
        self.flags = tuple(flags)
        model.__dict__.update(flags)

    def remove(self) -> None:
        """Restore the model; a second call does nothing."""
        if not self.hooks:
            return
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for name in self.flags:
            del self.model.__dict__[name]
        self.model.__dict__.update(self.flags_before)
        # Ctrl-C leaves it behind, and with it the graph of a whole step
        attributes = self.model.get_output_embeddings().__dict__
        for name in [name for name in attributes if name.startswith(CALL)]:
            del attributes[name]

    def __enter__(self) -> AppliedLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Store the labels for the loss and give the model those of a window."""
        head = model.get_output_embeddings()
        head.__dict__[_of_this_thread()] = None
        self.withheld = None
        # Labels may have been passed by position
        if args:
            kwargs = self.signature.bind_partial(*args).arguments | kwargs
        if kwargs.get("labels") is None and not self.withholds:
            if model.training and torch.is_grad_enabled() and not self.warned:
                self.warned = True
                warnings.warn(f"{type(model).__name__} {UNLABELLED}", stacklevel=2)
            return None
        if PROVED.get() and not model.training:
            evaluating = f"{type(model).__name__} is in evaluation mode, where its own loss stays"
            raise RefusedModelError(f"{evaluating}: call train() first, on a model whose dropout is 0")
        if not (model.training and torch.is_grad_enabled()):
            self.unlabelled = None
            if kwargs.get("labels") is None and not self.checked:
                self.unlabelled = kwargs
            return None
        if kwargs.get("fused_lm_head"):
            raise TypeError(
                f"TRL's trainer computes the loss of {type(model).__name__} itself; pass it "
                "compute_loss_func=compute_loss_func(applied), or use seqpar.integrations.trl.apply_seqpar_scores"
            )
        self._check_head(head)
        call, kwargs = self._with_window(model, kwargs)
        call.reading = self._reading(model, kwargs)
        if call.target_BT is None:
            if call.reading.adds:
                raise RuntimeError(
                    f"{type(model).__name__} adds an auxiliary loss to its own (output_router_logits), which a "
                    "compute_loss_func would lose; leave it out: with apply_seqpar_loss by itself the model adds it"
                )
            self.withheld = call.reading
        # In the head's __dict__, past nn.Module.__setattr__: the head's hooks and the model's share it for this forward
        head.__dict__[_of_this_thread()] = call
        kwargs = shortened(kwargs)
        call.window_1W = self._window_target(kwargs)
        call.certain = call.reading.adds
        return (), kwargs

    def _check_head(self, head: nn.Linear) -> None:
        """Raise RuntimeError if the output embeddings are not the ones that were hooked."""
        # Tied ones remain the same module, with another weight
        if self._at_head not in head._forward_pre_hooks.values() or number_of_classes(head) != self.vocab_size:
            raise RuntimeError(
                "the output embeddings were replaced since apply_seqpar_loss (resize_token_embeddings does that); call "
                "remove() and apply it again"
            )
        # Last, after hooks that were registered since: the loss is that of what they make of the hidden states
        hooks: Any = head._forward_pre_hooks
        if next(reversed(hooks)) != self.at_head.id:
            hooks.move_to_end(self.at_head.id)
        gather_in_model(self.model, head)

    def _with_window(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """Return what the loss of this call needs, and the model's arguments with the labels of a window."""
        kwargs = dict(kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        labels_BT = kwargs.get("labels")
        # The model's own loss would take it, and a window of made-up labels cannot show whether it does
        if (ignored := kwargs.get("ignore_index", IGNORED)) != IGNORED:
            raise ValueError(f"ignore_index is {ignored}, and the loss ignores only {IGNORED}: use that label")
        if labels_BT is not None and labels_BT.dim() != 2:
            raise ValueError(f"labels have shape {tuple(labels_BT.shape)}; they must be (batch, time)")
        if lacks_decoder_inputs(model, kwargs):
            if labels_BT is None:
                raise ValueError(
                    "the batch has neither labels nor decoder_input_ids; a Trainer with a compute_loss_func takes the "
                    "labels away: use DataCollatorForSeq2Seq(tokenizer, model=model), which makes decoder_input_ids"
                )
            kwargs["decoder_input_ids"] = decoder_inputs(model, labels_BT)
        target_BT = None
        if labels_BT is not None:
            target_BT = self._target(labels_BT, kwargs.get("shift_labels"))
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = getattr(model.config, "return_dict", True)
        kwargs |= self._window(model, kwargs)
        return Call(model, self._window_target(kwargs), target_BT, items=items, as_tuple=not return_dict), kwargs

    def _window(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the labels of the window, and the argument that gives the outputs their names."""
        labels_1W = self.window_1W.to(model.get_output_embeddings().weight.device)
        window: dict[str, Any] = {"labels": labels_1W}
        if kwargs.get("shift_labels") is not None:
            # Other labels than the unshifted ones, so that it shows which of the two the model uses
            window["shift_labels"] = labels_1W.flip(1)
        parameters = self.signature.parameters
        if "return_dict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            window["return_dict"] = True
        return window

    def _reading(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reading:
        """Return what the model does to its logits; settings that are new are checked first."""
        # Checked once for each combination, because any of them may choose another branch of the forward
        settings = key_of(model, kwargs)
        if gathers_for_any(model, settings not in self.checked):
            self.checked[settings] = self._checked_reading(model, kwargs)
        return self.checked[settings]

    def _checked_reading(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reading:
        """Run the model on the window and return what it does to logits and adds to their loss, or raise an error."""
        random = self._examined(model, kwargs)
        if gathers_for_any(model, random.adds):
            check_added(type(model).__name__, random, self._examined(model, shortened(kwargs), certain=True))
        return random.reading._replace(adds=random.adds)

    def _examined(self, model: PreTrainedModel, kwargs: dict[str, Any], certain: bool = False) -> Examined:
        """Run the model on the window and return what it made of it (`examine`)."""
        name = type(model).__name__
        head = model.get_output_embeddings()
        call = Call(model, self._window_target(kwargs), examined=True, certain=certain)
        head.__dict__[_of_this_thread()] = call
        # Behind all other hooks, also those that `fully_shard` has added since
        widening = head.register_forward_hook(self._unrounded)
        try:
            # With gradients, so that a loss that needs one is noticed
            with undisturbed(model, head.weight.device), torch.enable_grad(), graph_of_its_own():
                outputs = own_outputs(model, kwargs, lambda: setattr(call, "hidden_BTD", None))
        finally:
            widening.remove()
            head.__dict__[_of_this_thread()] = None
        if call.made_up is None:
            raise RefusedModelError(f"{name} did not call its output embeddings, {type(head).__name__}; {WITHOUT}")
        bias_V = final_bias(model, head.weight)
        return examine(name, readings(model), call.made_up, bias_V, call.window_1W, outputs)

    def _at_head(self, head: Any, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """Compute the loss of all hidden states, and let only a window of them go on to the output embeddings."""
        call: Call | None = head.__dict__.get(_of_this_thread())
        if call is None:
            return None
        name = type(call.model).__name__
        if call.hidden_BTD is not None:
            raise RefusedModelError(f"{name} called its output embeddings twice in one forward; {WITHOUT}")
        # FSDP2's own hook, which is always the first one, has gathered them by now where they are a unit or part of one
        refuse_sharded_head(head)
        (hidden_BTD,) = args
        if hidden_BTD.dim() != 3:
            shape = f"{tuple(hidden_BTD.shape)}, not (batch, time, hidden)"
            raise RefusedModelError(f"{name}'s output embeddings get hidden states of shape {shape}; {WITHOUT}")
        call.hidden_BTD = hidden_BTD
        if call.target_BT is not None:
            call.loss = self._token_loss(call.model, call.reading, hidden_BTD, call.target_BT)
        # Any rows serve as the window: its logits are replaced by random ones, or thrown away with their loss
        rows_ND = hidden_BTD.detach().flatten(0, 1)
        some_W = torch.arange(call.window_1W.numel(), device=rows_ND.device) % max(1, len(rows_ND))
        call.window_1WD = rows_ND[some_W].unsqueeze(0)
        return (call.window_1WD,)

    def _from_head(self, head: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the logits that the model gets for the window (`logits_for`)."""
        call: Call | None = head.__dict__.get(_of_this_thread())
        return None if call is None else logits_for(call, head, output)

    def _unrounded(self, head: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the made-up logits in full where another hook has only rounded them, as `output_dtype` of FSDP2."""
        call: Call | None = head.__dict__.get(_of_this_thread())
        if call is None or call.made_up is None:
            return None
        return unrounded(output, call.made_up).clone()

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Replace the window's loss by that of all tokens."""
        head = model.get_output_embeddings()
        call: Call | None = head.__dict__.pop(_of_this_thread(), None)
        # Without outputs the forward has raised an error, and this hook is called all the same
        if call is None or outputs is None:
            return None
        name = type(model).__name__
        if call.hidden_BTD is None:
            raise RuntimeError(f"{name} did not call its output embeddings, {type(head).__name__}")
        added = None
        if call.certain:
            added = outputs["loss"] - mean_loss(outputs["logits"].detach(), call.window_1W)
        elif isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor) and outputs["loss"].requires_grad:
            raise RuntimeError(f"{name} adds something to its own loss, and did not when it was checked; {WITHOUT}")
        fields: dict[str, Any] = {"loss": None, "logits": None}
        if call.loss is None:
            refuse_released_head(head)
            # A Trainer's loss function gets hidden states as logits, and computes the loss of them
            fields["logits"] = UsingParameters.apply(call.hidden_BTD, *head.parameters())
        else:
            fields["loss"] = divided(call.loss, call.items)
        if added is not None:
            fields["loss"] = fields["loss"] + added.to(fields["loss"].device)
        if not call.as_tuple:
            return type(outputs)(**{**outputs, **fields})
        # As the model does it: a loss that is None is left out of the tuple
        return tuple((outputs | fields)[key] for key in outputs if key != "loss" or call.loss is not None)

    def loss_of_outputs(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss that a Trainer asks for after the forward: of hidden states in training, else of logits."""
        if isinstance(outputs, Mapping):
            scores: Tensor = outputs["logits"]
        else:
            # Labels were not given, so there is no loss in front of the logits
            scores = outputs[0]
        target_BT = self._target(labels, None)
        head = self.model.get_output_embeddings()
        # In the order of the forwards: hidden states after one in training, logits after one in evaluation
        expected = number_of_classes(head) if self.withheld is None else head.in_features
        if scores.size(-1) != expected:
            raise RuntimeError(
                f"the outputs have a last size of {scores.size(-1)}, but those of the latest forward of "
                f"{type(self.model).__name__} have {expected}: compute the loss of each forward before the next forward"
            )
        if self.withheld is not None:
            loss = self._token_loss(self.model, self.withheld, scores, target_BT)
            return divided(loss, num_items_in_batch)
        # Evaluated before its first training step, so the label shift is unchecked
        if self.unlabelled is not None:
            refuse_sharded_head(head)
            self._reading(self.model, self.unlabelled | self._window(self.model, self.unlabelled))
            self.unlabelled = None
        criterion = LabelSmoothing(self.label_smoothing, "torch", ignore_index=IGNORED)
        check_shapes(type(self.model).__name__, scores, target_BT)
        return divided(criterion.token_loss(scores.flatten(0, -2), target_BT.flatten()), num_items_in_batch)

    def _window_target(self, kwargs: dict[str, Any]) -> Tensor:
        """Return the label that each position of the window predicts."""
        return self._target(kwargs["labels"], kwargs.get("shift_labels"))

    def _target(self, labels_BT: Tensor, shifted_BT: Tensor | None) -> Tensor:
        """Return the label that each position predicts."""
        if shifted_BT is not None:
            return shifted_BT
        if self.shifts:
            return next_labels(labels_BT)
        return labels_BT

    def _token_loss(
        self, model: PreTrainedModel, reading: Reading | None, hidden_BTD: Tensor, target_BT: Tensor
    ) -> TokenLoss:
        """Return the chunked loss of all hidden states."""
        assert reading is not None
        check_shapes(type(model).__name__, hidden_BTD, target_BT)
        head = model.get_output_embeddings()
        bias_V: Tensor | None = final_bias(model, head.weight)
        if bias_V is None:
            bias_V = head.bias
        elif head.bias is not None:
            bias_V = head.bias + bias_V
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
