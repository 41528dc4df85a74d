"""The settings of a run's optimisation, and of the processes that share it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recipes.translation.errors import ConfigError
from recipes.translation.settings.metrics import METRICS
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.settings.schema import setting
from seqpar.rows.conventions import CONVENTIONS, Convention

PARTS = {
    "encoder": "encoder",
    "decoder": "decoder",
    "source_embedding": "src_embed",
    "target_embedding": "tgt_embed",
    "generator": "generator",
}
"""The parts of a model that `training.freeze` can name, and what the model calls them."""


class SaveInterval(NamedTuple):
    """What `training.save_every` says; both are 0 if nothing is saved between validations."""

    steps: int
    seconds: float


def save_interval(text: str) -> SaveInterval:
    """Parse a value of `training.save_every`; raise ConfigError if it has no meaning."""
    found = re.fullmatch(r"(\d{1,9})(min)?", text)
    if found is None:
        raise ConfigError(
            f"training.save_every is {text!r}: it is a number of steps, such as 500, or of minutes, such as 30min"
        )
    if found[2]:
        return SaveInterval(0, 60.0 * int(found[1]))
    return SaveInterval(int(found[1]), 0.0)


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation, and the devices it runs on."""

    devices: str | tuple[str, ...] = setting(
        "auto",
        "auto (every GPU of the machine; without one [cpu, cpu]) or a list such as [cuda:0, cuda:1]. Under "
        "torchrun each process takes one of them, auto its own GPU or the CPU.",
    )
    chunk_tokens: int | None = setting(
        None, "Target tokens whose logits a device holds at a time; null chooses by their size in bytes.", at_least=1
    )
    batch_tokens: int = setting(
        4_096,
        "Maximum number of tokens in a batch, counted on its longer side, source or target, padding included.",
        at_least=1,
    )
    accumulate: int = setting(
        1,
        "Batches per optimizer step; the gradient is divided by the tokens of all of them. The step is the "
        "same whatever it runs on: each process gets as many whole batches as the others, and the sentences of "
        "the remaining batches are divided among them.",
        at_least=1,
    )
    steps: int = setting(
        1_000,
        "Maximum number of optimizer steps; 0 leaves the end to training.epochs, the default if only epochs are given.",
        at_least=0,
    )
    epochs: int = setting(
        0,
        "Maximum number of passes over the training data, each of as many batches as the first; 0 leaves the end to "
        "training.steps. If both are set, the first to be reached ends the training.",
        at_least=0,
    )
    schedule: str = setting(
        "inverse_sqrt",
        "How the learning rate falls after the warm-up: "
        + " | ".join(f"{name} ({schedule.help})" for name, schedule in SCHEDULES.items())
        + ".",
        choices=tuple(SCHEDULES),
    )
    learning_rate: float = setting(
        2e-3, "The rate at the end of the warm-up, from which it falls; with noam, a factor of the rate.", at_least=0
    )
    plateau_patience: int = setting(
        3,
        "With schedule plateau: validations without a better one, by best_by, after which the rate is reduced; after "
        "as many more it is reduced again.",
        at_least=1,
    )
    plateau_factor: float = setting(
        0.5, "With schedule plateau: what the rate is then multiplied by.", at_least=1e-6, below=1
    )
    warmup: int = setting(200, "Steps of linear warm-up.", at_least=0)
    betas: tuple[float, float] = setting((0.9, 0.98), "Adam's two decay rates.", at_least=0, below=1)
    adam_eps: float = setting(
        1e-9, "What Adam adds to the root of the second moment, by which it divides.", at_least=1e-16, below=1
    )
    weight_decay: float = setting(
        0.0,
        "AdamW: every step subtracts the learning rate times this share of each matrix and embedding, and nothing "
        "of norms and biases; 0.01 to 0.1 are usual, and 0 is Adam.",
        at_least=0,
        below=100,
    )
    clip: float = setting(1.0, "Largest gradient norm; 0 turns clipping off.", at_least=0)
    label_smoothing: float = setting(
        0.1,
        "Probability taken from the right token and shared out, by the convention that `smoothing_convention` names.",
        at_least=0,
        below=1,
    )
    smoothing_convention: Convention = setting(
        "torch", " | ".join(f"{name} ({shares.text})" for name, shares in CONVENTIONS.items()) + "."
    )
    teacher: str = setting(
        "",
        "Learn from the predictions of another run's model (its best), or of a checkpoint folder, and take its "
        "subwords. Empty means no teacher.",
        path=True,
    )
    teacher_weight: float = setting(
        0.9,
        "The share of the divergence from the teacher's predictions in the loss, from 0 (only its subwords are used) "
        "to 1; the rest is the usual loss, which is not computed for 1.",
        at_least=0,
    )
    teacher_temperature: float = setting(
        1.0,
        "Divides the logits of teacher and student in their divergence, which is multiplied by its square.",
        at_least=0.01,
        below=1_000,
    )
    precision: Literal["float32", "bf16", "fp16", "float64"] = setting(
        "float32",
        "float32 | bf16 (autocast) | fp16 (autocast with a dynamic loss scale, for GPUs without bfloat16: V100, T4) | "
        "float64 (to compare layouts: several times slower).",
    )
    compile: bool = setting(
        False,
        "Compile the layers of the model for training steps (torch.compile), whose kernels then do several operations "
        "at once; dropout draws different numbers. On a CPU the steps are no faster.",
    )
    max_length: int = setting(
        256,
        "Training pairs longer than this many subwords on either side are dropped (and counted in the log);"
        " validation keeps every pair.",
        at_least=1,
    )
    validate_every: int = setting(200, "Steps between validations.", at_least=1)
    validate_bleu: int = setting(
        200, "Validation sentences translated greedily for BLEU at each validation; 0 leaves BLEU out.", at_least=0
    )
    save_every: str = setting(
        "0",
        "Also save what is needed to resume between validations: every given number of steps, such as 500, or "
        "minutes, such as 30min; 0 saves it only at validations.",
    )
    keep_checkpoints: int = setting(
        0,
        "Keep the models of this many of the latest validations in <run>/checkpoints, to be averaged; 0 keeps none.",
        at_least=0,
    )
    patience: int = setting(
        0, "Stop after this many validations without a better one, by best_by; 0 never stops early.", at_least=0
    )
    best_by: str = setting(
        "loss",
        f"{' | '.join(METRICS)}: which number of a validation decides which model is the best, and when the "
        "patience ends; "
        + " and ".join(each.label for each in METRICS.values() if each.of_translations)
        + " are those of validate_bleu sentences.",
        choices=tuple(METRICS),
    )
    report: bool = setting(
        True,
        "Draw <run>/report.html after validations and at the end of training; it takes at most about a hundredth "
        "of the time.",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = setting(
        (),
        "tensorboard | wandb | trackio, any of them: where every number of metrics.jsonl is also sent. "
        "tensorboard writes to <run>/tensorboard; wandb and trackio go by their own environment variables "
        "(WANDB_MODE, TRACKIO_DIR, ...).",
    )
    ema: float = setting(
        0.0,
        "Decay of an exponential moving average of the weights, such as 0.999, which validation and translation "
        "then use instead of the weights; 0 turns it off.",
        at_least=0,
        below=1,
    )
    start_from: str = setting(
        "",
        "Begin with the weights and subwords of another run (its best model), or of a checkpoint folder; the data may "
        "differ. A Transformer with fewer layers begins with some of the other's. Empty begins with random weights.",
        path=True,
    )
    freeze: tuple[str, ...] = setting(
        (),
        f"Parts that are not trained: any of {', '.join(PARTS)}. Parts that share a weight (model.tie) are frozen "
        "together.",
        choices=tuple(PARTS),
    )
    lora_rank: int = setting(
        0,
        "LoRA: train a change of this rank for every matrix of attention and feed-forward networks, and keep all "
        "weights of the model in start_from as they are; 16 is usual, and 0 trains the weights.",
        at_least=0,
    )
    lora_alpha: float = setting(
        16.0, "LoRA's change is multiplied by lora_alpha / lora_rank.", at_least=0.01, below=1e6
    )
    seed: int = setting(
        1, "Random seed of the initial weights, dropout, and the order of the data.", at_least=0, below=2**63
    )
    threads: int = setting(0, "CPU threads; 0 leaves torch's own choice.", at_least=0)


@dataclass(frozen=True)
class LayoutConfig:
    """How the processes share the work; data x shard x vocab is their number."""

    data: int = setting(
        0,
        "Copies of the model, each with its share of the sentences; 0 uses as many as the number of processes allows.",
        at_least=0,
    )
    shard: int = setting(
        1,
        "Processes over which each copy's weights, gradients and moments are sharded (FSDP2), with "
        "sentences of their own.",
        at_least=1,
    )
    vocab: int = setting(
        1,
        "Processes over which vocabulary, attention heads and feed-forward units are split; must divide the heads.",
        at_least=1,
    )
    timeout: float = setting(
        300.0,
        "Seconds that a process waits in a step for one that hangs; a save on rank 0 must take less.",
        at_least=1,
        below=1e9,  # torch counts milliseconds in a 64-bit integer
    )
