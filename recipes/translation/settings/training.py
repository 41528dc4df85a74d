"""The settings of a run's optimisation, and of the processes that share it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from recipes.translation.errors import ConfigError
from recipes.translation.settings.metrics import METRICS
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.settings.schema import Choices, Help, Range
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
    """What `training.save_every` says; both are 0 where nothing is saved between validations."""

    steps: int = 0
    seconds: float = 0.0


def save_interval(text: str) -> SaveInterval:
    """Return what a value of `training.save_every` says; raise ConfigError if it says nothing."""
    found = re.fullmatch(r"(\d{1,9})(min)?", text)
    if found is None:
        raise ConfigError(
            f"training.save_every is {text!r}: it is a number of steps, such as 500, or of minutes, such as 30min"
        )
    if found[2]:
        return SaveInterval(seconds=60.0 * int(found[1]))
    return SaveInterval(steps=int(found[1]))


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation, and the devices it runs on."""

    devices: Annotated[
        str | tuple[str, ...],
        Help(
            "auto (every GPU of the machine; without one [cpu, cpu]) or a list such as [cuda:0, cuda:1]. Under "
            "torchrun each process takes one of them, auto its own GPU or the CPU."
        ),
    ] = "auto"
    chunk_tokens: Annotated[
        int | None,
        Help("Target tokens whose logits exist at once on a device; null chooses by bytes."),
        Range(at_least=1),
    ] = None
    batch_tokens: Annotated[
        int,
        Help("Tokens of a batch on its longer side, source or target, padding included, at most."),
        Range(at_least=1),
    ] = 4_096
    accumulate: Annotated[
        int,
        Help(
            "Batches per optimizer step; the gradient is divided by the tokens of all of them. The step is the "
            "same whatever it runs on: each process gets as many whole batches as the others, and the sentences of "
            "the remaining batches are divided among them."
        ),
        Range(at_least=1),
    ] = 1
    steps: Annotated[
        int,
        Help(
            "Optimizer steps at most; 0 leaves the end to training.epochs, as it is where these are given and no steps."
        ),
        Range(at_least=0),
    ] = 1_000
    epochs: Annotated[
        int,
        Help(
            "Passes over the training data at most, each of as many batches as the first; 0 leaves the end to "
            "training.steps. Whichever ends first."
        ),
        Range(at_least=0),
    ] = 0
    schedule: Annotated[
        str,
        Help(
            "How the learning rate falls after the warm-up: "
            + " | ".join(f"{name} ({schedule.help})" for name, schedule in SCHEDULES.items())
            + "."
        ),
        Choices(tuple(SCHEDULES)),
    ] = "inverse_sqrt"
    learning_rate: Annotated[
        float,
        Help("The rate at the end of the warm-up, from which it falls; with noam a factor of it."),
        Range(at_least=0),
    ] = 2e-3
    warmup: Annotated[int, Help("Steps of linear warm-up."), Range(at_least=0)] = 200
    betas: Annotated[tuple[float, float], Help("Adam's two decay rates."), Range(at_least=0, below=1)] = (0.9, 0.98)
    adam_eps: Annotated[
        float,
        Help("What Adam adds to the root of the second moment, by which it divides."),
        Range(at_least=1e-16, below=1),
    ] = 1e-9
    weight_decay: Annotated[
        float,
        Help(
            "AdamW: every step subtracts the learning rate times this share of each matrix and embedding, and nothing "
            "of norms and biases; 0.01 to 0.1 are usual, and 0 is Adam."
        ),
        Range(at_least=0, below=100),
    ] = 0.0
    clip: Annotated[float, Help("Largest gradient norm; 0 does not clip."), Range(at_least=0)] = 1.0
    label_smoothing: Annotated[
        float,
        Help(
            "Probability taken from the right token and shared out, by the convention that `smoothing_convention` "
            "names."
        ),
        Range(at_least=0, below=1),
    ] = 0.1
    smoothing_convention: Annotated[
        Convention,
        Help(" | ".join(f"{name} ({shares.text})" for name, shares in CONVENTIONS.items()) + "."),
    ] = "torch"
    r_drop: Annotated[
        float,
        Help(
            "R-Drop's alpha: every batch is computed twice with different dropout, and the divergence of the two "
            "predictions joins the loss; 5 is usual, and 0 computes it once."
        ),
        Range(at_least=0),
    ] = 0.0
    teacher: Annotated[
        str,
        Help(
            "Learn from the predictions of another run's model (its best), or of a checkpoint folder, and take its "
            "subwords. Empty has no teacher."
        ),
    ] = ""
    teacher_weight: Annotated[
        float,
        Help(
            "The share of the divergence from the teacher's predictions in the loss, from 0 (the teacher's subwords "
            "alone) to 1; the rest is the usual loss, which is not computed for 1."
        ),
        Range(at_least=0),
    ] = 0.9
    teacher_temperature: Annotated[
        float,
        Help("Divides the logits of teacher and student in their divergence, which is multiplied by its square."),
        Range(at_least=0.01, below=1_000),
    ] = 1.0
    precision: Annotated[
        Literal["float32", "bf16", "float64"],
        Help("float32 | bf16 (autocast) | float64 (to compare layouts: several times slower)."),
    ] = "float32"
    max_length: Annotated[
        int,
        Help(
            "Training pairs longer than this many subwords on either side are dropped (and counted in the log);"
            " validation keeps every pair."
        ),
        Range(at_least=1),
    ] = 256
    validate_every: Annotated[int, Help("Steps between validations."), Range(at_least=1)] = 200
    validate_bleu: Annotated[
        int,
        Help("Validation sentences translated greedily for BLEU at each validation; 0 leaves BLEU out."),
        Range(at_least=0),
    ] = 200
    save_every: Annotated[
        str,
        Help(
            "Save what is needed to resume between validations, too: every so many steps, such as 500, or minutes, "
            "such as 30min; 0 saves it at validations alone."
        ),
    ] = "0"
    keep_checkpoints: Annotated[
        int,
        Help("Keep the models of this many last validations in <run>/checkpoints, to be averaged; 0 keeps none."),
        Range(at_least=0),
    ] = 0
    patience: Annotated[
        int,
        Help("Stop after this many validations without a better one, by best_by; 0 never stops early."),
        Range(at_least=0),
    ] = 0
    best_by: Annotated[
        str,
        Help(
            f"{' | '.join(METRICS)}: which number of a validation decides which model is the best, and when the "
            "patience ends; "
            + " and ".join(each.label for each in METRICS.values() if each.of_translations)
            + " are those of validate_bleu sentences."
        ),
        Choices(tuple(METRICS)),
    ] = "loss"
    report: Annotated[
        bool,
        Help(
            "Draw <run>/report.html after validations and at the end of training; it takes at most about a hundredth "
            "of the time."
        ),
    ] = True
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Help(
            "tensorboard | wandb | trackio, any of them: where every number of metrics.jsonl is also sent. "
            "tensorboard writes to <run>/tensorboard; wandb and trackio go by their own environment variables "
            "(WANDB_MODE, TRACKIO_DIR, ...)."
        ),
    ] = ()
    ema: Annotated[
        float,
        Help(
            "Decay of an exponential moving average of the weights, such as 0.999, which validation and translation "
            "then use instead of the weights; 0 has none."
        ),
        Range(at_least=0, below=1),
    ] = 0.0
    start_from: Annotated[
        str,
        Help(
            "Begin with the weights and subwords of another run (its best model), or of a checkpoint folder; the data "
            "may be other data. A Transformer with fewer layers begins with some of the other's. Empty begins with "
            "random weights."
        ),
    ] = ""
    freeze: Annotated[
        tuple[str, ...],
        Help(
            "Parts that are not trained: any of encoder, decoder, source_embedding, target_embedding, generator. Parts "
            "that share a weight (model.tie) are frozen together."
        ),
    ] = ()
    lora_rank: Annotated[
        int,
        Help(
            "LoRA: train a change of this rank for every matrix of attention and feed-forward networks, and keep all "
            "weights of the model in start_from as they are; 16 is usual, and 0 trains the weights."
        ),
        Range(at_least=0),
    ] = 0
    lora_alpha: Annotated[
        float, Help("LoRA's change is multiplied by lora_alpha / lora_rank."), Range(at_least=0.01, below=1e6)
    ] = 16.0
    seed: Annotated[
        int,
        Help("Random seed of the initial weights, dropout, and the order of the data."),
        Range(at_least=0, below=2**63),
    ] = 1
    threads: Annotated[int, Help("CPU threads; 0 leaves torch's own choice."), Range(at_least=0)] = 0


@dataclass(frozen=True)
class LayoutConfig:
    """How the processes share the work; data x shard x sequence x vocab is their number."""

    data: Annotated[
        int,
        Help("Copies of the model, each with its share of the sentences; 0 makes as many as there are processes for."),
        Range(at_least=0),
    ] = 0
    shard: Annotated[
        int,
        Help(
            "Processes over which each copy's weights, gradients and moments are sharded (FSDP2), with "
            "sentences of their own."
        ),
        Range(at_least=1),
    ] = 1
    vocab: Annotated[
        int,
        Help(
            "Processes over which vocabulary, attention heads and feed-forward units are split; must divide the heads."
        ),
        Range(at_least=1),
    ] = 1
    sequence: Annotated[
        int, Help("Processes over which the time steps of each sentence are split."), Range(at_least=1)
    ] = 1
    timeout: Annotated[
        float,
        Help("Seconds that a process waits in a step for one that hangs; a save on rank 0 must take less."),
        Range(at_least=1, below=1e9),  # torch counts milliseconds in a 64-bit integer
    ] = 300.0
