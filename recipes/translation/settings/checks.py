"""Checks for settings that exclude or require each other."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.translation.errors import ConfigError
from recipes.translation.settings.data import KINDS, SubwordConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.settings.run import DECODER_ONLY, DecodingConfig, RunConfig
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.settings.training import TrainingConfig, save_interval


def check_together(config: RunConfig) -> None:
    """Raise ConfigError for settings that are valid one by one but not together."""
    check_subwords(config.subwords)
    cleaning = config.cleaning
    if not cleaning.metric_command:
        why = "cleaning.metric_command names no program to score the pairs: name one"
        check_unset("cleaning", cleaning, ("metric_least",), why)
    elif cleaning.metric_least is None:
        raise ConfigError(
            "cleaning.metric_command is set, but cleaning.metric_least is not: set the score below which pairs are "
            "removed"
        )
    check_decoding(config.decoding)
    training = config.training
    if not training.steps and not training.epochs:
        raise ConfigError("training.steps is 0 and so is training.epochs: set one of them, or training never ends")
    if METRICS[training.best_by].of_translations and not training.validate_bleu:
        raise ConfigError(
            f"training.best_by is {training.best_by}, but training.validate_bleu is 0: no validation translates "
            "anything; set it to the number of sentences to translate, or training.best_by loss"
        )
    save_interval(training.save_every)
    check_plateau(training)
    if config.model.preset in DECODER_ONLY:
        check_decoder_only(config.model.preset, config.subwords.joint, training.freeze)
    check_teacher(training)
    check_lora(training, config.layout.vocab)
    if training.compile and config.layout.vocab > 1:
        raise ConfigError(
            f"training.compile is true, but with layout.vocab {config.layout.vocab} the parts of a layer communicate, "
            "which the recipe does not compile: set layout.data or layout.shard instead, or leave training.compile out"
        )


def check_plateau(training: TrainingConfig) -> None:
    """Raise ConfigError for settings of the plateau schedule that have no effect."""
    names = ("plateau_patience", "plateau_factor")
    if not SCHEDULES[training.schedule].by_validations:
        why = f"training.schedule is {training.schedule}, which ignores validations: set training.schedule plateau"
        check_unset("training", training, names, why)
    elif 0 < training.patience <= training.plateau_patience:
        raise ConfigError(
            f"training.patience is {training.patience} and training.plateau_patience {training.plateau_patience}: the "
            "run would end before its learning rate is reduced: raise training.patience, or set it to 0"
        )


def check_decoding(decoding: DecodingConfig) -> None:
    """Raise ConfigError if translations would have to be longer than they are allowed to be."""
    if decoding.min_length >= decoding.max_length:
        raise ConfigError(
            f"decoding.min_length is {decoding.min_length}, but a translation has at most {decoding.max_length} steps "
            "(decoding.max_length), the last of them for the end: set it lower"
        )


def check_subwords(subwords: SubwordConfig) -> None:
    """Raise ConfigError for subword settings that do not go together."""
    if subwords.model:
        check_own_model(subwords)
    else:
        check_sampling(subwords.kind, subwords.sampling)
    if not subwords.sampling:
        why = "subwords.sampling is 0, which turns sampling off: set subwords.sampling"
        check_unset("subwords", subwords, ("sampled",), why)
    capitals = [symbol for symbol in subwords.symbols if symbol != symbol.lower()]
    if subwords.lowercase and capitals:
        raise ConfigError(
            f"subwords.symbols contains {', '.join(capitals)}, but subwords.lowercase is true: such a word never "
            "occurs; write it in lower case"
        )


def check_sampling(name: str, amount: float, where: str = "") -> None:
    """Raise ConfigError for an amount of sampling that this kind of subwords does not support."""
    kind = KINDS[name]
    if amount and not kind.sampling:
        raise ConfigError(
            f"subwords.sampling is {amount:g}, but the subwords are of kind {name}{where}, which divides a text in "
            "only one way: set it to 0"
        )
    if amount >= kind.below:
        raise ConfigError(
            f"subwords.sampling is {amount:g}: for subwords.kind {name}{where} it is {kind.sampling}, and must be "
            f"below {kind.below:g}"
        )


def check_own_model(subwords: SubwordConfig) -> None:
    """Raise ConfigError for settings that contradict the user's own subwords."""
    files = " ".join(subwords.model)
    if len(subwords.model) != 2 - subwords.joint:
        raise ConfigError(
            f"subwords.model names {len(subwords.model)} files ({files}), and subwords.joint is "
            f"{str(subwords.joint).lower()}: with true it takes one, with false the source's and the target's"
        )
    names = ["train_pairs", "character_coverage", "byte_fallback"]
    if not KINDS[subwords.kind].words:
        names += ["kind", "normalization"]
    why = f"subwords.model is {files}, which brings its own: leave the file out"
    check_unset("subwords", subwords, names, why)


def check_decoder_only(preset: str, joint: bool, freeze: Sequence[str]) -> None:
    """Raise ConfigError for settings that a model without an encoder cannot have."""
    if not joint:
        raise ConfigError(
            f"subwords.joint is false, but model.preset {preset} reads source and target as one sequence, with one "
            "vocabulary: set subwords.joint true, or choose another preset"
        )
    if "encoder" in freeze:
        raise ConfigError(f"training.freeze names encoder, but model.preset {preset} has none: leave it out")


def check_teacher(training: TrainingConfig) -> None:
    """Raise ConfigError for teacher settings that do not go together."""
    if training.teacher_weight > 1:
        raise ConfigError(
            f"training.teacher_weight is {training.teacher_weight:g}: it is the share of the teacher in the loss, from "
            "0 to 1"
        )
    if not training.teacher:
        why = "training.teacher names no model to learn from: name one"
        check_unset("training", training, ("teacher_weight", "teacher_temperature"), why)


def check_unset(section: str, given: object, names: Sequence[str], why: str) -> None:
    """Raise ConfigError for settings in a section that have no effect; `why` gives the reason and what to do."""
    defaults = type(given)()
    for name in names:
        value = getattr(given, name)
        if value != getattr(defaults, name):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{section}.{name} is {shown}, but {why}, or leave {section}.{name} out")


def check_lora(training: TrainingConfig, vocab: int) -> None:
    """Raise ConfigError for LoRA settings that do not go together; `vocab` is the setting `layout.vocab`."""
    rank = training.lora_rank
    if not rank:
        check_unset("training", training, ("lora_alpha",), "training.lora_rank is 0: set the rank")
    elif not training.start_from:
        raise ConfigError(
            f"training.lora_rank is {rank}, but training.start_from names no model: LoRA keeps the weights that a run "
            "begins with, which would be random; name a run, or set training.lora_rank 0"
        )
    elif training.freeze:
        raise ConfigError(
            f"training.lora_rank is {rank} and training.freeze {', '.join(training.freeze)}: LoRA keeps all weights as "
            "they are, and changes every layer; leave one of the two out"
        )
    elif vocab > 1:
        raise ConfigError(
            f"training.lora_rank is {rank} and layout.vocab {vocab}: LoRA's matrices are not split over "
            "processes; use layout.data or layout.shard, or set training.lora_rank 0"
        )
