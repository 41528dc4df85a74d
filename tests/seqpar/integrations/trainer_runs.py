"""One optimizer step of the real Trainers, for their gradients before the optimizer's step, after all reductions.

trained(rank, world, run) -> those of Seq2SeqTrainer, alone or in one of several ranks
trained_in_order(model, batches, order) -> those of Trainer, with the loss in any order
whole_step(model, batches) -> those of the model's own loss over all batches
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.transformers import SeqparLoss, apply_seqpar_loss, compute_loss_func, remove_seqpar_loss
from seqpar.integrations.transformers_model import shifts_labels
from tests.seqpar.integrations.own_loss import seeded
from tests.seqpar.integrations.tiny_models import batch_of, gradients, is_seq2seq, shifted_right, tiny

BATCH = 2
"""Sentences of one micro-batch."""
ONE_STEP: dict[str, Any] = {
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of any trainer built on transformers': a step whose gradients stay as they are, and no files."""


class Run(NamedTuple):
    model: str
    accumulation: int
    smoothing: float
    way: str
    """"stock", "applied", "function", or "both", where the Trainer smooths labels as well."""
    layout: str = "ddp"
    """Or "fsdp2", as accelerate shards; or as transformers does, "loaded-fsdp2" and "split", its tensor parallelism."""
    folder: str = ""
    """Of the model, if transformers divides it."""
    ranks: int = 0
    """If any, the batches go to them in order, and the labels of the last one are all ignored."""

    @property
    def tiny(self) -> Any:
        # Tensor parallelism gives each rank some of the heads
        return tiny(self.model, **({"num_key_value_heads": 2} if self.layout == "split" else {}))


def sentences(model: Any, count: int, ranks: int = 0) -> list[dict[str, Tensor]]:
    """Of lengths from 2 to 9, so that micro-batches differ in tokens and in padding."""
    lengths = [2 + (5 * i * i + i) % 8 for i in range(count)]
    found = [{k: v[0] for k, v in batch_of(model, [length], seed=i).items()} for i, length in enumerate(lengths)]
    for i, sentence in enumerate(found):
        if ranks and i // BATCH % ranks == ranks - 1:
            sentence["labels"] = torch.full_like(sentence["labels"], -100)
    return found


def collated(model: Any, rows: list[dict[str, Tensor]], decoder_inputs: bool = False) -> dict[str, Tensor]:
    """One batch, padded to its longest sentence."""
    fill = {"input_ids": 1, "attention_mask": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {k: pad([row[k] for row in rows], batch_first=True, padding_value=v) for k, v in fill.items()}
    if decoder_inputs and is_seq2seq(model):
        batch["decoder_input_ids"] = shifted_right(batch["labels"])
    return batch


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer is about to use."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        found = {name.removeprefix("module."): g for name, g in gradients(model).items()}
        self.seen = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in found.items()}


def forget_accelerate() -> None:
    """Let the next Trainer or Accelerator of this process begin anew."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def take_cpus_for_accelerators() -> None:
    """Let accelerate shard, which it does on accelerators only, over these processes' CPUs from here on."""
    assert PartialState(cpu=True).device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def loaded(run: Run) -> Any:
    """The model; from its folder, if transformers is to divide it over the ranks."""
    parts = {"loaded-fsdp2": {"fsdp_size": 2}, "split": {"tp_size": 2, "tp_plan": "auto"}}
    if run.layout not in parts:
        return run.tiny
    config = DistributedConfig(**parts[run.layout])
    return type(run.tiny).from_pretrained(run.folder, dtype=torch.float64, distributed_config=config).train()


def trained(rank: int, world: int, run: Run) -> dict[str, Tensor]:
    forget_accelerate()
    model = loaded(run)
    function, kept = None, Gradients()
    if run.way != "stock":
        applied = apply_seqpar_loss(model, label_smoothing=run.smoothing, chunk_tokens=5)
        function = compute_loss_func(applied) if run.way == "function" else None
    # The Trainer leaves settings of FSDP behind in the environment
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        arguments = Seq2SeqTrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=run.accumulation,
            label_smoothing_factor=run.smoothing if run.way in ("stock", "both") else 0.0,
            **ONE_STEP,
            train_sampling_strategy="sequential" if run.ranks else "random",
            fsdp=run.layout == "fsdp2",
            fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if run.layout == "fsdp2" else None,
        )
        if run.layout in ("fsdp2", "split"):
            assert arguments.device.type == "cpu"
            take_cpus_for_accelerators()
        # Ranks that split a model have the same sentences
        readers = 1 if run.layout == "split" else world
        labels_go = function is not None or (run.way in ("stock", "both") and run.smoothing > 0)
        Seq2SeqTrainer(
            model,
            arguments,
            train_dataset=sentences(model, readers * run.accumulation * BATCH, run.ranks),  # type: ignore[arg-type]
            data_collator=lambda rows: collated(model, rows, labels_go),
            compute_loss_func=function,
            callbacks=[kept],
        ).train()
    return kept.seen


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


def trained_in_order(model: Any, batches: Batches, order: Callable[..., None]) -> dict[str, Tensor]:
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
