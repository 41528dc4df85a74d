"""One optimizer step of the stock Trainer with the loss in any order, for its gradients.

trained(model, batches, order) -> the gradients before the optimizer's step
whole_step(model, batches) -> those of the model's own loss over all batches
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.transformers import SeqparLoss, apply_seqpar_loss, remove_seqpar_loss
from seqpar.integrations.transformers_model import shifts_labels
from tests.seqpar.integrations.own_loss import seeded
from tests.seqpar.integrations.tiny_models import gradients
from tests.seqpar.integrations.trainer_runs import ONE_STEP, Gradients

Batches = list[dict[str, Tensor]]


def micro_batches(batch: dict[str, Tensor]) -> Batches:
    """The batch, and three of which fewer and fewer labels are predicted."""
    found = [batch]
    for first in (1, 2, 4):
        labels = batch["labels"].clone()
        labels[0, -first:] = -100
        found.append(batch | {"labels": labels})
    return found


def whole_step(model: Any, batches: Batches) -> dict[str, Tensor]:
    first = int(shifts_labels(base_of(model)))
    counts = [int((b["labels"][:, first:] != -100).sum()) for b in batches]
    for batch, count in zip(batches, counts, strict=True):
        seeded()
        (model(**batch).loss * (count / sum(counts))).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def made(model: Any, batches: Batches, folder: str, kind: type[Trainer] = Trainer, **more: Any) -> Any:
    given: dict[str, Any] = {"gradient_accumulation_steps": len(batches), "learning_rate": 0.0}
    given |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    settings = more.pop("settings", {})
    arguments = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    return kind(
        model,
        arguments(folder, remove_unused_columns=False, logging_strategy="no", **(ONE_STEP | given | settings)),
        train_dataset=batches,  # type: ignore[arg-type]
        eval_dataset=batches,  # type: ignore[arg-type]
        data_collator=lambda rows: rows[0],
        **more,
    )


def trainer_first(model: Any, make: Callable[..., Trainer]) -> None:
    trainer = make()
    with apply_seqpar_loss(trainer, chunk_tokens=5):
        trainer.train()


def model_first(model: Any, make: Callable[..., Trainer]) -> None:
    with apply_seqpar_loss(model, chunk_tokens=5):
        make().train()


def callback(model: Any, make: Callable[..., Trainer]) -> None:
    trainer = make(callbacks=[SeqparLoss(chunk_tokens=5)])
    trainer.train()
    remove_seqpar_loss(trainer)


def callback_later(model: Any, make: Callable[..., Trainer]) -> None:
    trainer = make()
    trainer.add_callback(SeqparLoss(chunk_tokens=5))
    trainer.train()
    remove_seqpar_loss(model)


def again(model: Any, make: Callable[..., Trainer]) -> None:
    """A Trainer that was made with the loss, in another block."""
    with apply_seqpar_loss(model, chunk_tokens=5):
        trainer = make()
        trainer.train()
    model.zero_grad()
    with apply_seqpar_loss(model, chunk_tokens=5):
        trainer.train()


def model_last(model: Any, make: Callable[..., Trainer]) -> None:
    trainer = make()
    with apply_seqpar_loss(model, chunk_tokens=5):
        trainer.train()


ORDERS = {order.__name__: order for order in (trainer_first, model_first, callback, callback_later, again)}
"""All but that of a Trainer which was made before the loss was applied to its model alone."""


def trained(model: Any, batches: Batches, order: Callable[..., None]) -> dict[str, Tensor]:
    kept = Gradients()
    repeat = model.register_forward_pre_hook(lambda *_: seeded(), prepend=True)
    try:
        with tempfile.TemporaryDirectory() as folder:

            def make(callbacks: tuple[Any, ...] | list[Any] = (), **more: Any) -> Any:
                return made(model, batches, folder, callbacks=[kept, *callbacks], **more)

            order(model, make)
    finally:
        repeat.remove()
        model.zero_grad()
    return kept.seen
