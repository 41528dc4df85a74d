"""Compute a Hugging Face model's loss in chunks, with torch hooks around its own code, which runs unchanged.

In one training forward:

    before the model              labels are stored, and the model gets made-up labels for a few tokens, the window
    before its output embeddings  the loss is computed from all hidden states; only a window of them is passed on
    after the model               the window's loss is replaced by the loss of all tokens

On the first call, and whenever arguments or settings change, the model first runs an extra time on such a window
(`transformers_check`), to find out whether it scales, caps or biases its logits, shifts labels or adds other losses.
In evaluation the model computes its logits if anything might use them, and the loss is computed from these.

Shape suffixes: B batch, T time, D hidden, V vocabulary, R rows and W tokens of the window.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.core.checks import PROVED
from seqpar.core.device_facts import LateNumber, is_capturing, is_on_host
from seqpar.core.graphs import outside_graphs
from seqpar.core.token_loss import TokenLoss
from seqpar.integrations.made_up import RefusedModelError
from seqpar.integrations.peft_adapters import adapter_of
from seqpar.integrations.transformers_call import (
    HIDDEN,
    Call,
    Running,
    UsingParameters,
    divide_loss,
    refuse_another_part,
    with_fields,
)
from seqpar.integrations.transformers_check import UNCALLED, Readings, are_as_read, check_shapes, mean_loss
from seqpar.integrations.transformers_copies import LeftOut, copy_as_before, leave_out_of_copies
from seqpar.integrations.transformers_head import (
    bias_of,
    gather_in_model,
    logits_for,
    number_of_classes,
    refuse_backward_hooks,
    refuse_released_head,
    refuse_sharded_head,
    supported_linear,
    with_adapter,
)
from seqpar.integrations.transformers_model import (
    IGNORED,
    WITHOUT,
    Reading,
    Settings,
    decoder_inputs,
    final_bias,
    lacks_decoder_inputs,
    signature_of,
)
from seqpar.integrations.transformers_trainer import ToldTrainers, asks_for_loss_alone
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.rows.criteria import LabelSmoothing

UNLABELLED = (
    "got no labels in a training forward, so it computes all logits and does not use the loss of apply_seqpar_loss; a "
    "Trainer removes the labels for its label_smoothing_factor or a compute_loss_func: leave the first at 0 and use "
    "apply_seqpar_loss(model, label_smoothing=...), or pass compute_loss_func=compute_loss_func(applied)"
)


class AppliedLoss(LeftOut):
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
        self.running = Running()
        self.readings = Readings(model, self.running)
        self.signature = signature_of(model)
        self.unread: list[LateNumber] = []
        self.withholds = False
        self.withheld: Reading | None = None
        self.unlabelled: dict[str, Any] | None = None
        self.warned = False
        self.by_callback = False
        head = model.get_output_embeddings()
        self.at_head = head.register_forward_pre_hook(self._at_head, with_kwargs=True)
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.at_head,
            head.register_forward_hook(self._from_head, prepend=True),
            # First, so that fully_shard's hooks see our loss and not the one it replaces
            model.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        ]
        self.hooked = (model, head)
        for module in self.hooked:
            leave_out_of_copies(module)
        self.told = ToldTrainers(model, self.readings.shifts)

    def remove(self) -> None:
        """Restore the model and its Trainers; a second call does nothing."""
        if not self.hooks:
            return
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.restored(self.model, vars(self.model))
        for module in self.hooked:
            copy_as_before(module)
        self.running.call = None
        self.told.correct()

    def restored(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Restore the flags of the model in its attributes or in those of a copy."""
        if module is self.model:
            self.told.restore_flags(state)

    @property
    def checked(self) -> dict[Settings, Reading]:
        """Return what the model was found to do, for each combination of settings in which it has been examined."""
        return self.readings.checked

    def is_on(self, model: PreTrainedModel) -> bool:
        """Return whether a model has this loss, on its current output embeddings too."""
        return bool(self.hooks) and self.hooked == (model, model.get_output_embeddings())

    def meet(self, trainer: Any) -> None:
        """Tell a Trainer that was created earlier for this model what is true of the model now."""
        self.told.meet(trainer)

    def _refuse_changed(self) -> None:
        """Raise RuntimeError if an earlier forward has shown that the model computes something different now."""
        found, self.unread = self.unread, []
        if not all(is_same.read() for is_same in found):
            raise RuntimeError(
                f"{type(self.model).__name__} no longer computes logits and loss as it did when they were checked: a "
                "hook, a loss function or a number in it has changed; call remove() and apply the loss again, or "
                f"{WITHOUT}"
            )

    def __enter__(self) -> AppliedLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @outside_graphs
    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Store the labels for the loss and give the model a window's labels instead."""
        head = model.get_output_embeddings()
        self.running.call = None
        self.withheld = None
        self._refuse_changed()
        # Labels may have been passed by position
        if args:
            kwargs = self.signature.bind_partial(*args).arguments | kwargs
        trained = model.training and torch.is_grad_enabled()
        labelled = kwargs.get("labels") is not None
        if not labelled and not self.withholds:
            if trained and not self.warned:
                self.warned = True
                warnings.warn(f"{type(model).__name__} {UNLABELLED}", stacklevel=2)
            return None
        if PROVED.get() and not model.training:
            evaluating = f"{type(model).__name__} is in evaluation mode, where its own loss stays"
            raise RefusedModelError(f"{evaluating}: call train() first, on a model whose dropout is 0")
        if not trained and not asks_for_loss_alone(labelled):
            return self._before_logits(model, kwargs)
        self.told.refuse_others(kwargs)
        self._check_head(head)
        call, kwargs = self._with_window(model, kwargs)
        self.running.call = call
        return (), kwargs

    def _before_logits(self, model: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Prepare an evaluation in which the model computes all its logits."""
        self.unlabelled = None
        unscaled = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
        if kwargs.get("labels") is None:
            self.unlabelled = None if self.readings.checked else unscaled
            return None
        # Without these, the model's own loss over all labels is the same, to the last bit
        if not self.label_smoothing and kwargs.get("num_items_in_batch") is None:
            return None
        head = model.get_output_embeddings()
        self._check_head(head)
        call, _ = self._with_window(model, kwargs)
        call.keeps_logits = True
        self.running.call = call
        if self.readings.names_outputs:
            unscaled["return_dict"] = True
        return (), unscaled

    def _check_head(self, head: Any) -> None:
        """Raise RuntimeError if the output embeddings are not the ones that were hooked."""
        refuse_backward_hooks(head, type(self.model).__name__)
        # Resized tied embeddings remain the same module, with a different weight
        classes = number_of_classes(supported_linear(self.model))
        if self._at_head not in head._forward_pre_hooks.values() or classes != self.readings.vocab_size:
            raise RuntimeError(
                "the output embeddings were replaced since apply_seqpar_loss (resize_token_embeddings does that, and "
                "an adapter of PEFT's on them); call remove() and apply it again"
            )
        # Keep ours last, after hooks registered since: the loss must use the hidden states that those return
        hooks: Any = head._forward_pre_hooks
        if next(reversed(hooks)) != self.at_head.id:
            hooks.move_to_end(self.at_head.id)
        gather_in_model(self.model, head)

    def _with_window(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """Return what the loss of this call needs, and the model's arguments with a window's labels."""
        kwargs = dict(kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        labels_BT = kwargs.get("labels")
        # The model's own loss might use it, and a window of made-up labels cannot show whether it does
        if (ignored := kwargs.get("ignore_index", IGNORED)) != IGNORED:
            raise ValueError(f"ignore_index is {ignored}, and the loss ignores only {IGNORED}: use that label")
        if labels_BT is not None and labels_BT.dim() != 2:
            raise ValueError(f"labels have shape {tuple(labels_BT.shape)}; they must be (batch, time)")
        if labels_BT is not None and labels_BT.is_floating_point():
            raise TypeError(f"labels are of {labels_BT.dtype}; they must be token ids: labels.long()")
        if lacks_decoder_inputs(model, kwargs):
            if labels_BT is None:
                raise ValueError(
                    "the batch has neither labels nor decoder_input_ids; a Trainer with a compute_loss_func takes the "
                    "labels away: use DataCollatorForSeq2Seq(tokenizer, model=model), which makes decoder_input_ids"
                )
            kwargs["decoder_input_ids"] = decoder_inputs(model, labels_BT)
        target_BT = None if labels_BT is None else self.readings.target(kwargs)
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = getattr(model.config, "return_dict", True)
        reading = self.readings.of(model, kwargs)
        if target_BT is None:
            if reading.adds:
                raise RuntimeError(
                    f"{type(model).__name__} adds an auxiliary loss to its own (output_router_logits), which a "
                    "compute_loss_func would lose; leave it out: with apply_seqpar_loss by itself the model adds it"
                )
            self.withheld = reading
        kwargs = self.readings.few_labels(model, kwargs)
        window_RW = self.readings.target(kwargs)
        call = Call(model, window_RW, target_BT, reading, certain=reading.adds, items=items, as_tuple=not return_dict)
        return call, kwargs

    @outside_graphs
    def _at_head(
        self, head: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]] | None:
        """Compute the loss of all hidden states, and pass only a window of them on to the output embeddings."""
        call = self.running.call
        if call is None or call.keeps_logits:
            return None
        name = type(call.model).__name__
        if call.hidden_BTD is not None:
            raise RefusedModelError(f"{name} called its output embeddings twice in one forward; {WITHOUT}")
        # FSDP2's own hook always comes first; if the embeddings are in one of its units, they are gathered by now
        refuse_sharded_head(head)
        # The model may have passed them by name
        (hidden_BTD,) = args or kwargs.values()
        if hidden_BTD.dim() != 3:
            shape = f"{tuple(hidden_BTD.shape)}, not (batch, time, hidden)"
            raise RefusedModelError(f"{name}'s output embeddings get hidden states of shape {shape}; {WITHOUT}")
        call.hidden_BTD = hidden_BTD
        if call.target_BT is not None:
            call.loss = self._token_loss(call.model, call.reading, hidden_BTD, call.target_BT)
        # Any rows will do as the window: its logits are replaced by random ones, or discarded with their loss
        rows_ND = hidden_BTD.detach().flatten(0, 1)
        some = torch.arange(call.window_RW.numel(), device=rows_ND.device) % max(1, len(rows_ND))
        call.window_RWD = rows_ND[some].unflatten(0, call.window_RW.shape)
        return (call.window_RWD,), {}

    @outside_graphs
    def _from_head(self, head: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the logits that the model gets for the window (`logits_for`)."""
        call = self.running.call
        return None if call is None or call.keeps_logits else logits_for(call, head, output)

    @outside_graphs
    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Replace the window's loss with the loss of all tokens."""
        head = model.get_output_embeddings()
        call, self.running.call = self.running.call, None
        # If the forward has raised an error there are no outputs, but this hook is called anyway
        if call is None or outputs is None:
            return None
        fields: dict[str, Any] = {"loss": None, "logits": None}
        if call.keeps_logits:
            fields["logits"] = outputs["logits"]
            fields["loss"] = self._loss_of_logits(outputs["logits"], call.target_BT, call.items)
        elif call.hidden_BTD is None:
            raise RuntimeError(f"{type(model).__name__} {UNCALLED}")
        elif call.loss is None:
            refuse_released_head(head)
            # The Trainer's loss function computes the loss from them
            fields[HIDDEN] = UsingParameters.apply(call.hidden_BTD, *head.parameters())
        else:
            fields["loss"] = divide_loss(call.loss, call.items)
        if not call.keeps_logits:
            self._compare(call, outputs)
        if call.certain:
            fields["loss"] = fields["loss"] + self._added_part(call, outputs).to(fields["loss"].device)
        elif isinstance(outputs, Mapping) and not call.keeps_logits:
            refuse_another_part(type(model).__name__, outputs.get("loss"))
        return with_fields(call, outputs, fields)

    def _compare(self, call: Call, outputs: Any) -> None:
        """Raise RuntimeError if the model no longer treats a window's logits as it did when it was checked.

        On an accelerator the next forward raises it, so that this one does not wait for the device.
        """
        if call.few_RWV is None or is_capturing(call.few_RWV.device):
            return
        is_same = are_as_read(call, outputs)
        self.unread.append(LateNumber(is_same.long()))
        if is_on_host(is_same):
            self._refuse_changed()

    def _added_part(self, call: Call, outputs: Any) -> Tensor:
        """Return the auxiliary loss that the model has added to the cross-entropy of its logits."""
        target = call.target_BT if call.keeps_logits else call.window_RW
        assert target is not None
        cross_entropy = mean_loss(outputs["logits"].detach(), target)
        return outputs["loss"] - cross_entropy  # type: ignore[no-any-return]

    def loss_of_outputs(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss that a Trainer asks for after the forward: from hidden states in training, else logits."""
        name = type(self.model).__name__
        target_BT = self.readings.target({"labels": labels})
        if isinstance(outputs, Mapping):
            hidden_BTD, logits_BTV = outputs.get(HIDDEN), outputs.get("logits")
        else:
            # No labels were given, so there is no loss before the logits
            logits_BTV = outputs[0]
            hidden_BTD = outputs[-1] if logits_BTV is None else None
        # A training forward returns hidden states, an evaluation forward logits
        if (hidden_BTD is None) != (self.withheld is None):
            raise RuntimeError(
                f"these outputs are not those of the latest forward of {name}: compute the loss of each forward before "
                "the next forward"
            )
        if hidden_BTD is not None:
            return divide_loss(self._token_loss(self.model, self.withheld, hidden_BTD, target_BT), num_items_in_batch)
        # Evaluated before the first training step, so the label shift has not been checked yet
        if self.unlabelled is not None:
            refuse_sharded_head(self.model.get_output_embeddings())
            self.readings.of(self.model, self.unlabelled)
            self.unlabelled = None
        return self._loss_of_logits(logits_BTV, target_BT, num_items_in_batch)

    def _loss_of_logits(self, logits_BTV: Any, target_BT: Any, items: Tensor | int | None) -> Tensor:
        """Return the loss of all logits, in evaluation."""
        check_shapes(type(self.model).__name__, logits_BTV, target_BT)
        criterion = LabelSmoothing(self.label_smoothing, "torch", ignore_index=IGNORED)
        target_N = target_BT.flatten().to(logits_BTV.device)
        return divide_loss(criterion.token_loss(logits_BTV.flatten(0, -2), target_N), items)

    def _token_loss(
        self, model: PreTrainedModel, reading: Reading | None, hidden_BTD: Tensor, target_BT: Tensor
    ) -> TokenLoss:
        """Return the chunked loss of all hidden states."""
        assert reading is not None
        check_shapes(type(model).__name__, hidden_BTD, target_BT)
        head: Any = model.get_output_embeddings()
        weight_VD: Tensor = head.weight
        bias_V, outside_V = bias_of(head), final_bias(model, weight_VD)
        if outside_V is not None:
            bias_V = outside_V if bias_V is None else bias_V + outside_V
        rows, weight = with_adapter(hidden_BTD, weight_VD, adapter_of(model))
        return linear_cross_entropy(
            rows,
            weight,
            target_BT.to(hidden_BTD.device),
            bias=bias_V,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            softcap=reading.softcap,
            temperature=reading.temperature,
            chunk_tokens=self.chunk_tokens,
        )
