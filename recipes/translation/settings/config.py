"""Every setting of a translation run, as frozen dataclasses: the YAML file and the command line mirror them.

A run is described by one `RunConfig`. Its sections are read from a YAML file, overridden on the command line,
and saved, resolved, beside the run's checkpoints. What a value may be is said by its field's type and, beyond
that, by `CHOICES` and `RANGES` below.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.translation.settings.schema import ConfigError, Range, Schema

__all__ = [
    "ConfigError",
    "DataConfig",
    "DecodingConfig",
    "LayoutConfig",
    "ModelConfig",
    "RunConfig",
    "SubwordConfig",
    "TrainingConfig",
    "load_config",
    "save_config",
]


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs come from."""

    format: str = "builtin"
    """builtin | text (two line-aligned files, plain or .gz) | tsv (a header line names the columns; no quoting) |
    jsonl | parquet | hub (a Hugging Face data set). Where it is not given, the files tell it: two are text, one is what
    its name ends in, none is builtin."""
    path: str = ""
    """Folder that relative file names below start from; ${NAME} is read from the environment. For hub: the data
    set's name, with its subset after a colon if it has some (wmt/wmt14:de-en)."""
    train: tuple[str, ...] = ()
    """Training file(s): text takes two (source, target); tsv, jsonl and parquet take one; hub takes a split name."""
    valid: tuple[str, ...] = ()
    """Validation file(s), in the same form."""
    test: tuple[str, ...] = ()
    """Test file(s), in the same form."""
    source: str = "en"
    """Source language: its column or key in tsv, jsonl, parquet and hub data, and its side of the built-in corpus."""
    target: str = "de"
    """Target language, likewise."""
    tokenize: str = "auto"
    """sacreBLEU's tokeniser for BLEU: auto (by the target language, and where that says nothing, by the script of the
    references) | 13a | intl | zh | ja-mecab | ko-mecab | char | none | spm | flores101 | flores200 | spBLEU-1K."""
    builtin_pairs: int = 40_000
    """Training pairs drawn from the built-in corpus (format: builtin only)."""


@dataclass(frozen=True)
class SubwordConfig:
    """The sentencepiece model(s)."""

    vocab_size: int = 1_000
    """Number of subwords, the four special ones (padding 0, unknown 1, start 2, end 3) and 256 bytes included."""
    joint: bool = True
    """One model for both languages (needed to share embeddings), or one for each."""
    kind: str = "unigram"
    """unigram | bpe."""
    lowercase: bool = False
    """Lower-case the text before anything else (BLEU is then computed on lower-case text too)."""


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `models.PRESETS`, and what to change in it (None keeps the preset's value)."""

    preset: str = "tiny"
    """tiny | multi30k | small | base | big."""
    d_model: int | None = None
    """Width of hidden states; even, and divisible by heads."""
    d_ff: int | None = None
    """Width inside the feed-forward networks."""
    heads: int | None = None
    """Attention heads."""
    encoder_layers: int | None = None
    """Layers of the encoder."""
    decoder_layers: int | None = None
    """Layers of the decoder."""
    dropout: float | None = None
    """Share of values dropped in training, from 0 to below 1."""
    norm: str | None = None
    """pre | post."""
    tie: str | None = None
    """none | target (target embedding = generator) | all (source too; needs a joint vocabulary)."""


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation, and the devices it runs on."""

    devices: str | tuple[str, ...] = "auto"
    """auto (every GPU of the machine; without one [cpu, cpu]) or a list such as [cuda:0, cuda:1]. Under torchrun each
    process takes one of them, auto its own GPU or the CPU."""
    chunk_tokens: int | None = None
    """Target tokens whose logits exist at once on a device; null chooses by bytes."""
    batch_tokens: int = 4_096
    """Target tokens, padding included, in a batch."""
    accumulate: int = 1
    """Batches per optimizer step; the gradient is divided by the tokens of all of them. The step is the same whatever
    it runs on: processes share its batches out, a batch that does not go round is split like those of one process over
    its devices."""
    steps: int = 1_000
    """Optimizer steps at most."""
    schedule: str = "inverse_sqrt"
    """inverse_sqrt | linear (to 0 at the end) | noam | constant: how the learning rate falls after the warm-up."""
    learning_rate: float = 2e-3
    """The peak (inverse_sqrt, linear), the factor (noam), or the rate (constant)."""
    warmup: int = 200
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's two decay rates."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    label_smoothing: float = 0.1
    """Probability taken from the right token and shared out, by the convention that `smoothing` names."""
    smoothing_convention: str = "torch"
    """torch (eps/V) | fairseq (eps/(V-1)) | harvard (eps/(V-2), the entropy constant subtracted)."""
    precision: str = "float32"
    """float32 | bf16 (autocast) | float64 (to compare layouts: several times slower)."""
    max_length: int = 256
    """Training pairs longer than this many subwords on either side are dropped (and counted in the log); validation
    keeps every pair."""
    validate_every: int = 200
    """Steps between validations."""
    validate_bleu: int = 200
    """Validation sentences translated greedily for BLEU at each validation; 0 leaves BLEU out."""
    patience: int = 0
    """Stop after this many validations without a better loss; 0 never stops early."""
    seed: int = 1
    """Of the first weights, dropout, and the order of the data."""
    threads: int = 0
    """CPU threads; 0 leaves torch's own choice."""


@dataclass(frozen=True)
class LayoutConfig:
    """How the processes that torchrun started share the work; their product is the number of processes."""

    data: int = 0
    """Copies of the model, each with its share of the sentences; 0 is as many as the others leave processes for."""
    shard: int = 1
    """Processes over which each copy's weights, gradients and moments are sharded (FSDP2), with sentences of their
    own."""
    vocab: int = 1
    """Processes over which vocabulary, attention heads and feed-forward units are split; must divide the heads."""
    sequence: int = 1
    """Processes over which the time steps of each sentence are split."""
    timeout: float = 300.0
    """Seconds that a process waits in a step for one that does not come; rank 0 must save in less."""


@dataclass(frozen=True)
class DecodingConfig:
    """Translation."""

    beam: int = 4
    """Beam width; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of the length penalty; 0 has none."""
    batch_sentences: int = 64
    """Sentences translated at a time; changes the speed, not the translations."""
    max_length: int = 256
    """Most subwords of a translation; that of a short sentence is twice its own, plus 12. A longer sentence is cut to
    this or to training.max_length, whichever is more."""


@dataclass(frozen=True)
class RunConfig:
    """One run: everything `prepare`, `train`, `evaluate` and `translate` need to know."""

    run: str = "runs/demo"
    """Folder of the run: subword models, checkpoints, metrics, resolved configuration."""
    data: DataConfig = field(default_factory=DataConfig)
    subwords: SubwordConfig = field(default_factory=SubwordConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


CHOICES = {
    "data.format": ("builtin", "text", "tsv", "jsonl", "parquet", "hub"),
    "data.tokenize": (
        *("auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"),
        *("spm", "flores101", "flores200", "spBLEU-1K"),
    ),
    "subwords.kind": ("unigram", "bpe"),
    "model.norm": ("pre", "post"),
    "model.tie": ("none", "target", "all"),
    "training.schedule": ("inverse_sqrt", "linear", "noam", "constant"),
    "training.smoothing_convention": ("torch", "fairseq", "harvard"),
    "training.precision": ("float32", "bf16", "float64"),
}

AT_LEAST_0, AT_LEAST_1, SHARE = Range(0), Range(1), Range(0, 1)
RANGES = {
    "data.builtin_pairs": AT_LEAST_1,
    "subwords.vocab_size": Range(261),  # the special subwords, the bytes, and one to spell with
    **dict.fromkeys(("model.d_model", "model.d_ff", "model.heads"), AT_LEAST_1),
    **dict.fromkeys(("model.encoder_layers", "model.decoder_layers"), AT_LEAST_1),
    "model.dropout": SHARE,
    **dict.fromkeys(("training.chunk_tokens", "training.batch_tokens", "training.accumulate"), AT_LEAST_1),
    **dict.fromkeys(("training.steps", "training.max_length", "training.validate_every"), AT_LEAST_1),
    **dict.fromkeys(("training.learning_rate", "training.warmup", "training.clip"), AT_LEAST_0),
    **dict.fromkeys(("training.betas", "training.label_smoothing"), SHARE),
    **dict.fromkeys(("training.validate_bleu", "training.patience", "training.threads"), AT_LEAST_0),
    "training.seed": Range(0, 2**63),
    "layout.data": AT_LEAST_0,
    **dict.fromkeys(("layout.shard", "layout.vocab", "layout.sequence"), AT_LEAST_1),
    "layout.timeout": Range(1, 1e9),  # in milliseconds it must be a number that torch can take
    **dict.fromkeys(("decoding.beam", "decoding.batch_sentences", "decoding.max_length"), AT_LEAST_1),
    "decoding.length_penalty": AT_LEAST_0,
}


SCHEMA = Schema(RunConfig, CHOICES, RANGES)


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The defaults, changed by the YAML file at `path`, changed by `overrides`.

    An override is named by its dotted key (`training.steps`); text is read as YAML reads it in a file, except
    that a setting which is itself text takes it as it stands. Whatever is wrong raises ConfigError, which
    names the key, the place (file and line, or the command line) and the way out.
    """
    given = {**(SCHEMA.read_file(Path(path)) if path is not None else {}), **SCHEMA.read_overrides(overrides or {})}
    joint, tie = given.get("subwords.joint"), given.get("model.tie")
    if joint and tie and tie.value == "all" and not joint.value:
        raise ConfigError(
            f"model.tie all ({tie.place}) needs one vocabulary for both languages, but subwords.joint is false "
            f"({joint.place})"
        )
    sections: dict[str, dict[str, Any]] = {}
    for key, setting in given.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = setting.value
    if "data.format" not in given:
        sections.setdefault("data", {})["format"] = format_of(DataConfig(**sections.get("data", {})))
    config = RunConfig(**sections.pop("", {}))
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


FORMATS = {".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet"}
"""What the end of a file's name says of its format."""


def named_format(name: str) -> str | None:
    """The format that a file's name tells; None where it tells none."""
    return FORMATS.get(Path(name.lower().removesuffix(".gz")).suffix)


def format_of(data: DataConfig) -> str:
    """The format of the files that are named; builtin where none is. ConfigError where they do not tell it."""
    splits = {split: getattr(data, split) for split in ("train", "valid", "test") if getattr(data, split)}
    if data.path and not splits:
        raise ConfigError(
            f"data.path is {data.path}, but no file is named: set data.train and data.valid, or leave data.path out "
            "to train on the built-in corpus"
        )
    found = {split: _format_of(split, names) for split, names in splits.items()}
    for split, format in found.items():
        first = next(iter(found))
        if format != found[first]:
            raise ConfigError(
                f"data.{first} looks like {found[first]}, data.{split} like {format}: all data has one format; "
                "convert one of them, or set data.format"
            )
    return next(iter(found.values()), "builtin")


def _format_of(split: str, names: tuple[str, ...]) -> str:
    formats = {named_format(name) for name in names}
    if formats == {None} and len(names) == 2:
        return "text"
    (format, *others) = formats
    if format is None or others:
        raise ConfigError(
            f"data.{split} ({', '.join(names)}) does not tell its format: set data.format (text takes two files; tsv, "
            "jsonl and parquet take one; hub takes a split name), or end the name in .tsv, .jsonl or .parquet"
        )
    return format


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write every setting as YAML, whole or not at all; `load_config` reads back an equal configuration."""
    # without allow_unicode: PyYAML writes U+0085 in a way that it reads as a blank
    text = yaml.safe_dump(_with_lists(dataclasses.asdict(config)), sort_keys=False, width=1_000)
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _with_lists(value: Any) -> Any:
    """The value with lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
