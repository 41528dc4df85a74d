"""Train Hugging Face models without ever holding the logits of all tokens at once, in any loop or under a Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from seqpar.core.checks import check_size
from seqpar.integrations.peft_adapters import base_of, is_peft_model
from seqpar.integrations.say_once import say_once
from seqpar.integrations.transformers_copies import owners
from seqpar.integrations.transformers_head import supported_linear
from seqpar.integrations.transformers_loss import AppliedLoss
from seqpar.integrations.transformers_model import WITHOUT, refuse_adapter
from seqpar.integrations.transformers_trainer import calling_trainer, is_trainer, model_of, refuse_options
from seqpar.rows.smoothing import check_smoothing

__all__ = ["AppliedLoss", "SeqparLoss", "apply_seqpar_loss", "compute_loss_func", "remove_seqpar_loss"]

LOG = logging.getLogger(__name__)


def apply_seqpar_loss(
    model: PreTrainedModel | Any, *, label_smoothing: float = 0.0, chunk_tokens: int | None = None
) -> AppliedLoss:
    """Make `model(..., labels=labels).loss` a chunked loss, with the same value and gradient.

    Plain equivalent: `model(...)` itself, or, with smoothing,
    `F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)` on its logits (with
    labels shifted by one for a decoder-only model, as the model does).

        trainer = Seq2SeqTrainer(model, arguments, train_dataset=..., data_collator=...)
        with apply_seqpar_loss(trainer, label_smoothing=0.1):
            trainer.train()

    In training the loss is chunked, and `logits` is None. With `num_items_in_batch`, which a Trainer passes on, the
    loss is sum / num_items_in_batch, so that accumulation and several ranks are exact; without it the loss is the
    mean over labels that are not -100 (0, not nan, if there are none). A router's auxiliary loss (Mixtral and Qwen3-MoE
    with `output_router_logits`) is added as the model adds it: once per forward, undivided. `generate` and calls
    without labels do not change.

    In evaluation the loss is the same, smoothing included, like a Trainer's own with `label_smoothing_factor`. The
    logits are the model's own; if a Trainer uses nothing but the loss (no `compute_metrics`, or
    `predict_with_generate`), they are left out and the loss is chunked.

    Leave the Trainer's own `label_smoothing_factor` at 0: it needs all logits. Because that option takes the labels out
    of training forwards, a training forward without labels warns once that this loss is not used.

    Args:
        model: an existing Trainer, or a model, either before a Trainer is created for it or for a loop of your own. If
            a Trainer was created before the loss was applied to its model alone, its first step is refused if its
            gradient would be different. The model is an encoder-decoder or decoder-only model, or any other whose
            output embeddings are an `nn.Linear` that is called once per forward: Marian, BART, mBART, T5, Pegasus,
            M2M100, Llama, GPT-2, Gemma 2, ... Tied weights, `final_logits_bias`, and soft caps and factors of the
            logits are supported, under their names in configurations; so are, on the output embeddings, PEFT's LoRA,
            `modules_to_save` and `trainable_token_indices`. For a `PeftModel` the loss of its base model is replaced.
        label_smoothing: eps in [0, 1), by the convention of torch and Hugging Face: eps/V to all V classes.
        chunk_tokens: the maximum number of tokens whose logits exist at once; None chooses it by size in bytes.

    Returns:
        `AppliedLoss`: its `remove()`, or leaving the `with` block, restores the model. Copies and pickles of the model
        do not have the loss.

    Raises:
        TypeError: not a Hugging Face model or Trainer (a model wrapped in DistributedDataParallel is not), a trainer
            from TRL, or a compiled model; PEFT's AdaLoRA, AdaptionPrompt and CPT; output embeddings that are missing or
            not a plain `nn.Linear`, alone or with the adapters above; in the first training forward, a model that uses
            labels for more than the loss of its logits, or whose forward changes a parameter; backward hooks on the
            output embeddings or on all modules; in a proof of `seqpar.testing`, a model in evaluation mode.
        ValueError: a number out of its range, a Trainer with its own loss or a `model_init` (`SeqparLoss` follows the
            model that it creates), a model that already has the loss, an
            `ignore_index` other than -100 in a call, or labels whose number differs from that of the predictions.
        RuntimeError: in the first training forward, or the first with new arguments or settings: the model's own
            logits or loss for made-up labels differ from ours (the message says by how much), or it adds something
            that depends on labels or logits, or an auxiliary loss that a `compute_loss_func` would lose. In any
            training forward: logits or a loss of a few labels that no longer agree with that check, because a hook, a
            loss function or a number in the model has changed (on an accelerator, in the forward after it); output
            embeddings that have been replaced or resized, or are sharded when the loss needs them; a Trainer that
            divides by a different number.

    For this check, a forward with new arguments or settings runs the model twice, or three times if it adds a loss. A
    model that itself communicates with other ranks needs the same arguments and settings on all of them. The check uses
    made-up labels in two rows of different lengths, some of them the batch's own, and as long as the batch if that
    takes no more memory than a chunk of the loss. It cannot see what a custom loss does to other ids, or only further
    along in longer sequences.

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
    if is_trainer(model) and model.model_init is not None:
        raise ValueError(
            f"this {type(model).__name__} has a model_init, with which train() makes a new model, without the loss; "
            "use callbacks=[SeqparLoss(...)]"
        )
    return _apply(model, label_smoothing, chunk_tokens)


def _apply(model: PreTrainedModel | Any, label_smoothing: float, chunk_tokens: int | None) -> AppliedLoss:
    """Apply the loss to a model, or to that which a Trainer has now."""
    trainer = None
    if is_trainer(model):
        trainer = model
        refuse_options(trainer)
        model = model_of(trainer)
    if is_peft_model(model):
        # Its model puts soft prompts in front of the labels before it calls its base model
        refuse_adapter(model, WITHOUT)
    model = base_of(model)
    if hasattr(model, "_orig_mod"):
        before = "apply the loss before torch.compile, to the model inside (model._orig_mod)"
        raise TypeError(f"this {type(model._orig_mod).__name__} is compiled; {before}")
    supported_linear(model)
    if owners(model):
        raise ValueError(f"this {type(model).__name__} has the loss already; remove_seqpar_loss(model) removes it")
    applied = AppliedLoss(model, label_smoothing, chunk_tokens)
    if trainer is not None:
        applied.meet(trainer)
    return applied


def remove_seqpar_loss(model: PreTrainedModel | Any) -> None:
    """Restore a model, or a Trainer's model, to which `apply_seqpar_loss` or `SeqparLoss` has applied the loss, if any.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from seqpar.integrations.transformers import apply_seqpar_loss, remove_seqpar_loss
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model, tokens = LlamaForCausalLM(config).train(), torch.randint(50, (2, 9))
        >>> applied = apply_seqpar_loss(model)
        >>> remove_seqpar_loss(model)
        >>> model(tokens, labels=tokens).logits.shape
        torch.Size([2, 9, 50])
    """
    for applied in owners(model_of(model) if is_trainer(model) else base_of(model)):
        applied.remove()


def compute_loss_func(applied: AppliedLoss) -> Callable[..., Tensor]:
    """Return a function for `Trainer(compute_loss_func=...)` that computes sum / num_items_in_batch in chunks.

    `apply_seqpar_loss` alone gives the same gradient, exact over accumulation and ranks; use this only for a Trainer
    that requires a loss function. Such a Trainer removes the labels before the forward. After this call, a training
    forward without labels therefore returns None for `logits`, and in the field `hidden_for_loss` the hidden states,
    which the function turns into the loss; and an encoder-decoder needs `decoder_input_ids` in the batch, as
    `DataCollatorForSeq2Seq(tokenizer, model=model)` makes them. The function must be called after each forward and
    before the next; otherwise it raises RuntimeError. In evaluation it computes the same loss from the model's logits,
    or in chunks if the Trainer uses nothing but the loss.

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


class SeqparLoss(TrainerCallback):
    """A callback for Hugging Face's Trainer that gives its model the loss of `apply_seqpar_loss`.

    Pass it to the constructor, or add it later, before training. The loss stays on for evaluation and until
    `remove_seqpar_loss(trainer)`; a different Trainer with the same model and such a callback takes it over.

    Args:
        label_smoothing, chunk_tokens: as in `apply_seqpar_loss`, which also says what is refused.

    Example:
        >>> from transformers import Trainer
        >>> from seqpar.integrations.transformers import SeqparLoss
        >>> callbacks = [SeqparLoss(label_smoothing=0.1)]
        >>> trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=collate, callbacks=callbacks)
        >>> trainer.train().global_step == arguments.max_steps
        True
    """

    def __init__(self, *, label_smoothing: float = 0.0, chunk_tokens: int | None = None) -> None:
        check_smoothing(label_smoothing, "torch")
        check_size(chunk_tokens, "chunk_tokens")
        self.label_smoothing = label_smoothing
        self.chunk_tokens = chunk_tokens
        self.applied: AppliedLoss | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Apply the loss to the model of a Trainer that is being created."""
        self._apply()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Apply the loss to the model that is about to be trained if it does not have it: it may be a new model."""
        self._apply()

    def _apply(self) -> None:
        """Apply the loss to the model of the Trainer that calls."""
        trainer = calling_trainer("use apply_seqpar_loss(model) in a loop of your own")
        model = model_of(trainer)
        if self.applied is not None and self.applied.is_on(model):
            self.applied.meet(trainer)
            return
        for applied in owners(model):
            if applied.by_callback:
                applied.remove()
        self.applied = _apply(trainer, self.label_smoothing, self.chunk_tokens)
        self.applied.by_callback = True
        weight = model.get_output_embeddings().weight
        say_once(type(trainer).__name__, LOG.info, weight, self.chunk_tokens)
