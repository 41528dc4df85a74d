"""One or two optimizer steps of TRL's own trainers, alone or in one of several ranks.

trained(rank, world, run) -> losses, metrics and gradients, with TRL's own log-probabilities ("stock"), with those of
the model's own logits, all ("plain"), with `apply_seqpar_scores` ("scores"), or with `SeqparScores` ("callback")
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import types
from typing import Any, NamedTuple
from unittest import mock

import datasets
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.distributed import DistributedConfig
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDTrainer
from trl.trainer.utils import FusedCausalLMOutput

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.trl import SeqparScores, allow_head_adapter, apply_seqpar_scores, has_scores
from tests.seqpar.integrations.tiny_models import VOCAB, tiny
from tests.seqpar.integrations.trainer_runs import ONE_STEP, Gradients, forget_accelerate, take_cpus_for_accelerators

KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "distillation": (DistillationTrainer, DistillationConfig),
}
GENERATING = ("grpo", "rloo", "distillation")
OF_KIND = {"distillation": {"max_completion_length": 5, "temperature": 0.7, "beta": 0.3}}
"""Arguments of a kind's configuration."""
BATCH = 2
ZERO_3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
    "zero3": {"deepspeed": ZERO_3},
}
"""Arguments of the trainer's configuration."""
TIMES = ("runtime", "per_second", "step_time", "flos", "epoch", "mfu", "tflops")
"""Parts of the names of logged numbers that are not functions of the scores."""


class Run(NamedTuple):
    kind: str
    way: str
    model: str = "llama"
    dtype: torch.dtype = torch.float64
    changes: dict[str, Any] = {}  # noqa: RUF012
    """Of the model's configuration."""
    lora: dict[str, Any] = {}  # noqa: RUF012
    """Arguments of `LoraConfig`; no adapter if empty."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Arguments of the trainer's configuration."""
    accumulation: int = 1
    steps: int = 1
    layout: str = ""
    """Ranks under "ddp", "fsdp2" or DeepSpeed's "zero3" take the step of one process that has their batches at once,
    "whole"; those that transformers' tensor parallelism splits the model over, "split", that of one process."""
    folder: str = ""
    """Of the model, if transformers splits it."""
    ranks: int = 2
    """Those whose batches "whole" has."""


class Outcome(NamedTuple):
    losses: list[float]
    metrics: list[dict[str, float]]
    gradients: dict[str, Tensor]


def words() -> PreTrainedTokenizerFast:
    # Of two digits, so that no word begins with a special one, which would be cut out of it
    tokenizer = Tokenizer(models.WordLevel({f"w{i:02}": i for i in range(VOCAB)}, unk_token="w00"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w01", eos_token="w03")


def text(length: int, seed: int) -> str:
    ids = torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i:02}" for i in ids.tolist())


def examples(kind: str, count: int, prompt_lengths: int = 3) -> datasets.Dataset:
    """Of different lengths, so that batches have padding."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        prompt = text(2 + i % prompt_lengths, 10 * i)
        chosen = " " + text(2 + (5 * i * i + i) % 5, 10 * i + 1)
        if kind == "sft":
            rows.append({"prompt": prompt, "completion": chosen})
        elif kind == "dpo":
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": " " + text(3, 10 * i + 2)})
        elif kind == "kto":
            rows.append({"prompt": prompt, "completion": chosen, "label": i % 2 == 0})
        else:
            rows.append({"prompt": prompt})
    return datasets.Dataset.from_list(rows)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def policy(run: Run) -> Any:
    return tiny(run.model, run.dtype, bos_token_id=2, eos_token_id=3, **run.changes)


def loaded(run: Run) -> Any:
    """The policy; from its folder, if transformers is to split it over the ranks."""
    model = policy(run)
    if run.layout != "split":
        return model
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    return type(model).from_pretrained(run.folder, dtype=run.dtype, distributed_config=plan).train()


def reference(run: Run) -> Any:
    """A model that differs from the policy."""
    model = policy(run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def second_model(run: Run) -> str:
    """The name of the argument by which a trainer gets a model that it does not train; empty if it gets none."""
    if run.kind in ("dpo", "kto") and not run.lora:
        return "ref_model"
    return "teacher_model" if run.kind == "distillation" else ""


def made(run: Run, folder: str, world: int = 1, **keywords: Any) -> Any:
    """The trainer, before its first step."""
    trainer_class, config_class = KINDS[run.kind]
    model = loaded(run)
    world = 1 if run.layout == "split" else world
    ranks = run.ranks if run.layout == "whole" else world
    # Padding on the left moves positions, whose rotations are rounded to float32: not where layouts are compared
    prompt_lengths = 1 if run.kind in GENERATING and run.layout else 3
    if run.lora:
        torch.manual_seed(1)
        settings = LoraConfig(r=2, task_type="CAUSAL_LM", **({"init_lora_weights": False} | run.lora))
        model = get_peft_model(model, settings, autocast_adapter_dtype=False)
    options = ONE_STEP | {
        "per_device_train_batch_size": BATCH if run.kind == "kto" else BATCH * ranks // world,
        "gradient_accumulation_steps": run.accumulation,
        "max_steps": run.steps,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    if "eval_strategy" in run.options:
        keywords["eval_dataset"] = examples(run.kind, 3)
    if second := second_model(run):
        keywords[second] = reference(run)
    if run.kind in ("grpo", "rloo"):
        beta = 0.1
        if ranks > 1 and not run.lora:
            beta = 0.0  # no reference model, which only the first rank could save
        elif not run.lora:  # this trainer loads its reference model from where the configuration says it is
            reference(run).save_pretrained(f"{folder}/reference")
            model.config._name_or_path = f"{folder}/reference"
            options["model_init_kwargs"] = {"dtype": "auto"}
        options |= {"num_generations": 2, "max_completion_length": 5, "temperature": 0.7, "beta": beta}
        keywords["reward_funcs"] = reward
    options |= LAYOUTS.get(run.layout, {})
    arguments = config_class(folder, **(options | OF_KIND.get(run.kind, {}) | run.options))
    if run.layout in ("fsdp2", "split"):
        assert arguments.device.type == "cpu"
        take_cpus_for_accelerators()
    head = model.get_output_embeddings() if run.lora else None
    allowed = allow_head_adapter(model) if hasattr(head, "lora_A") else contextlib.nullcontext()
    with allowed:
        trainer = trainer_class(
            model,
            args=arguments,
            train_dataset=examples(run.kind, ranks * run.accumulation * run.steps * BATCH, prompt_lengths),
            processing_class=words(),
            **keywords,
        )
    if run.kind == "kto":
        # Only now, because it shuffles the completions for its KL within the batches of one rank
        trainer._train_batch_size = BATCH * ranks // world
    return trainer


def completed(prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
    """Completions that are functions of the prompts, where TRL's differ with the number of ranks."""
    seeds = [sum(ids) + i % 2 for i, ids in enumerate(prompt_ids)]
    return [[int(word[1:]) for word in text(1 + seed % 5, seed).split()] for seed in seeds]


def use_plain_logits(trainer: Any) -> None:
    """Replace TRL's forward by one that takes everything from the model's own logits, all of them."""
    references = [getattr(trainer, "ref_model", None), trainer.model]
    for base in map(base_of, filter(None, references)):
        base._forward_pre_hooks.clear()  # that of `allow_head_adapter`
        own = base.forward
        temperature = getattr(trainer, "temperature", 1.0)

        def forward(self: Any, *args: Any, own: Any = own, temperature: float = temperature, **kwargs: Any) -> Any:
            if not kwargs.pop("fused_lm_head", False):
                return own(*args, **kwargs)
            return plain_outputs(own, temperature, *args, **kwargs)

        base.forward = types.MethodType(forward, base)


def use_plain_divergence(trainer: Any) -> None:
    """Replace TRL's loss by its formula (`trl.experimental.gkd`) of the models' own logits, all of them."""

    def computed(student: Any, inputs: Any, num_items_in_batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        text = {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
        }
        teacher = trainer.accelerator.unwrap_model(trainer.teacher_model).eval()
        own = slice(-inputs["completion_ids"].size(1) - 1, -1)
        logits = student(**text, use_cache=False).logits[:, own]
        with torch.no_grad():
            theirs = teacher(**text, use_cache=False).logits[:, own]
        mask = inputs["completion_mask"] != 0
        loss = GKDTrainer.generalized_jsd_loss(
            logits,
            theirs,
            torch.where(mask, 0, -100),
            trainer.beta,
            trainer.temperature,
            num_items_in_batch=num_items_in_batch,
        )
        log_p = (logits.detach() / trainer.temperature).log_softmax(-1)
        return loss, -(log_p * log_p.exp()).sum(-1)[mask].sum(), mask.sum()

    trainer._compute_loss = computed


def plain_outputs(own: Any, temperature: float, *args: Any, labels: Tensor, **kwargs: Any) -> FusedCausalLMOutput:
    kwargs.pop("num_items_in_batch", None)
    outputs = own(*args, **kwargs)
    logits, labels = outputs.logits[:, :-1] / temperature, labels[:, 1:]
    mask = labels != -100
    log_p = logits.log_softmax(-1)
    target = labels.clamp(min=0)
    fields = {
        "log_probs": log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        "entropy": -(log_p * log_p.exp()).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": logits.mean(-1).detach(),
        "is_top1": logits.argmax(-1) == target,
    }
    fields = {name: field.where(mask, torch.zeros_like(field)) for name, field in fields.items()}
    return FusedCausalLMOutput(**fields, label_mask=mask, aux_loss=outputs.get("aux_loss"))


def trained(rank: int, world: int, run: Run) -> Outcome:
    forget_accelerate()
    kept = Gradients()
    losses: list[float] = []
    gc.freeze()  # the Trainer collects garbage at the start; going through all imported packages is most of its time
    # The Trainer leaves settings of FSDP behind in the environment
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        callbacks = [kept, SeqparScores(chunk_tokens=3)] if run.way == "callback" else [kept]
        trainer = made(run, folder, world, callbacks=callbacks)
        if run.layout:
            trainer._generate_single_turn = completed
            if run.kind == "grpo":
                trainer._generate_single_turn = lambda *prompts: (completed(*prompts), None)
        step = trainer.training_step

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            loss = step(*args, **kwargs)
            losses.append(float(loss))
            return loss

        trainer.training_step = recorded
        applied: Any = contextlib.nullcontext()
        if run.way == "plain":
            (use_plain_divergence if run.kind == "distillation" else use_plain_logits)(trainer)
        if run.way == "scores":
            applied = apply_seqpar_scores(trainer, chunk_tokens=3)
        with applied:
            trainer.train()
        metrics = [
            {k: float(v) for k, v in entry.items() if not any(part in k for part in TIMES)}
            for entry in trainer.state.log_history
        ]
    assert not has_scores(base_of(trainer.accelerator.unwrap_model(trainer.model)))
    return Outcome(losses, metrics, kept.seen)
