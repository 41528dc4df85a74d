"""Settings that exclude each other, or need each other."""

from __future__ import annotations

from operator import attrgetter

from recipes.translation.errors import ConfigError
from recipes.translation.settings.data import KINDS
from recipes.translation.settings.metrics import METRICS
from recipes.translation.settings.model import DECODER_ONLY, DecodingConfig
from recipes.translation.settings.run import RunConfig
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.settings.training import save_interval


def check_together(config: RunConfig) -> None:
    """Raise ConfigError for settings that are valid one by one but not together."""
    check_subwords(config)
    check_decoding(config.decoding)
    training = config.training
    if not training.steps and not training.epochs:
        raise ConfigError("training.steps is 0 and so is training.epochs: set one of them, or training has no end")
    if METRICS[training.best_by].of_translations and not training.validate_bleu:
        raise ConfigError(
            f"training.best_by is {training.best_by}, but training.validate_bleu is 0: no validation translates "
            "anything; set it to the number of sentences to translate, or training.best_by loss"
        )
    save_interval(training.save_every)
    check_plateau(config)
    if config.model.preset in DECODER_ONLY:
        check_decoder_only(config)
    check_teacher(config)
    check_lora(config)


def check_plateau(config: RunConfig) -> None:
    """Raise ConfigError for settings of a rate that validations reduce which do nothing."""
    training = config.training
    names = ("training.plateau_patience", "training.plateau_factor")
    if not SCHEDULES[training.schedule].by_validations:
        why = f"training.schedule is {training.schedule}, which no validation changes: set training.schedule plateau"
        check_unset(config, names, why)
    elif 0 < training.patience <= training.plateau_patience:
        raise ConfigError(
            f"training.patience is {training.patience} and training.plateau_patience {training.plateau_patience}: the "
            "run would end before its learning rate is reduced; set training.patience to more, or to 0"
        )


def check_decoding(decoding: DecodingConfig) -> None:
    """Raise ConfigError for translations that would have to be longer than they may be."""
    if decoding.min_length >= decoding.max_length:
        raise ConfigError(
            f"decoding.min_length is {decoding.min_length}, which leaves no translation of at most "
            f"{decoding.max_length} steps, decoding.max_length, the last of them for the end: ask for less"
        )


def check_subwords(config: RunConfig) -> None:
    """Raise ConfigError for settings of the subwords that do not go together."""
    subwords = config.subwords
    if subwords.model:
        check_own_model(config)
    else:
        check_sampling(subwords.kind, subwords.sampling)
    if not subwords.sampling:
        why = "subwords.sampling is 0, which draws no subwords: set subwords.sampling"
        check_unset(config, ("subwords.sampled",), why)
    capitals = [symbol for symbol in subwords.symbols if symbol != symbol.lower()]
    if subwords.lowercase and capitals:
        raise ConfigError(
            f"subwords.symbols has {', '.join(capitals)}, but subwords.lowercase is true: such a word never occurs; "
            "write it in lower case"
        )


def check_sampling(name: str, amount: float, where: str = "") -> None:
    """Raise ConfigError for an amount of sampling that subwords of this kind cannot have."""
    kind = KINDS[name]
    if amount and not kind.sampling:
        raise ConfigError(
            f"subwords.sampling is {amount:g}, but the subwords are of kind {name}{where}, which divides a text in one "
            "way: set it to 0"
        )
    if amount >= kind.below:
        raise ConfigError(
            f"subwords.sampling is {amount:g}: for subwords.kind {name}{where} it is {kind.sampling}, and must be "
            f"below {kind.below:g}"
        )


def check_own_model(config: RunConfig) -> None:
    """Raise ConfigError for settings that contradict the subwords that a user brings."""
    subwords = config.subwords
    files = " ".join(subwords.model)
    if len(subwords.model) != 2 - subwords.joint:
        raise ConfigError(
            f"subwords.model names {len(subwords.model)} files ({files}), and subwords.joint is "
            f"{str(subwords.joint).lower()}: with true it takes one, with false the source's and the target's"
        )
    names = ["train_pairs", "character_coverage", "byte_fallback"]
    if not KINDS[subwords.kind].words:
        names += ["kind", "normalization"]
    why = f"subwords.model is {files}, which has its own: leave the file out"
    check_unset(config, tuple(f"subwords.{name}" for name in names), why)


def check_decoder_only(config: RunConfig) -> None:
    """Raise ConfigError for settings that a model without an encoder cannot have."""
    preset = config.model.preset
    if not config.subwords.joint:
        raise ConfigError(
            f"subwords.joint is false, but model.preset {preset} reads source and target as one sequence, with one "
            "vocabulary: set subwords.joint true, or choose another preset"
        )
    if "encoder" in config.training.freeze:
        raise ConfigError(f"training.freeze names encoder, but model.preset {preset} has none: leave it out")


def check_teacher(config: RunConfig) -> None:
    """Raise ConfigError for settings of a teacher that do not go together."""
    training = config.training
    if training.teacher_weight > 1:
        raise ConfigError(
            f"training.teacher_weight is {training.teacher_weight:g}: it is the share of the teacher in the loss, from "
            "0 to 1"
        )
    if not training.teacher:
        why = "training.teacher names no model to learn from: name one"
        check_unset(config, ("training.teacher_weight", "training.teacher_temperature"), why)


def check_unset(config: RunConfig, names: tuple[str, ...], why: str) -> None:
    """Raise ConfigError for settings that do nothing; `why` says why, and what to do instead of leaving them out."""
    for name in names:
        value = attrgetter(name)(config)
        if value != attrgetter(name)(RunConfig()):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{name} is {shown}, but {why}, or leave {name} out")


def check_lora(config: RunConfig) -> None:
    """Raise ConfigError for settings of LoRA that do not go together."""
    training = config.training
    rank = training.lora_rank
    if not rank:
        check_unset(config, ("training.lora_alpha",), "training.lora_rank is 0: set the rank")
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
    elif config.layout.vocab > 1:
        raise ConfigError(
            f"training.lora_rank is {rank} and layout.vocab {config.layout.vocab}: LoRA's matrices are not split over "
            "processes; use layout.data or layout.shard, or set training.lora_rank 0"
        )
