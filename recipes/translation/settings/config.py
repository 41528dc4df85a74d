"""Every setting of a translation run, as frozen dataclasses: the YAML file and the command line mirror them.

A run is described by one `RunConfig`. Its sections are read from a YAML file, overridden on the command line,
and saved, resolved, beside the run's checkpoints. The annotation of a field says everything about a setting: its
type, its choices (`Literal`), its range (`Range`), and its help text (`Help`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from recipes.translation.settings.cleaning import CleaningConfig
from recipes.translation.settings.schema import ConfigError, Help, Range, Schema

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

    format: Annotated[
        Literal["builtin", "text", "tsv", "jsonl", "parquet", "hub"],
        Help(
            "builtin | text (two line-aligned files, plain or .gz) | tsv (a header line names the columns; no "
            "quoting) | jsonl | parquet | hub (a Hugging Face data set). If it is not set, the files "
            "decide: two files are text, one file is what its name ends in, and none is builtin."
        ),
    ] = "builtin"
    path: Annotated[
        str,
        Help(
            "Folder that relative file names below start from; ${NAME} is read from the environment. For hub: "
            "the data set's name, with its subset after a colon if it has some (wmt/wmt14:de-en)."
        ),
    ] = ""
    train: Annotated[
        tuple[str, ...],
        Help(
            "Training file(s): text takes two (source, target); tsv, jsonl and parquet take one; hub takes a "
            "split name."
        ),
    ] = ()
    valid: Annotated[tuple[str, ...], Help("Validation file(s), in the same form.")] = ()
    test: Annotated[tuple[str, ...], Help("Test file(s), in the same form.")] = ()
    source: Annotated[
        str,
        Help(
            "Source language: its column or key in tsv, jsonl, parquet and hub data, and its side of the "
            "built-in corpus."
        ),
    ] = "en"
    target: Annotated[str, Help("Target language, likewise.")] = "de"
    tokenize: Annotated[
        Literal[
            "auto",
            "13a",
            "intl",
            "zh",
            "ja-mecab",
            "ko-mecab",
            "char",
            "none",
            "spm",
            "flores101",
            "flores200",
            "spBLEU-1K",
        ],
        Help(
            "sacreBLEU's tokeniser for BLEU: auto (by the target language, and where that says nothing, by the "
            "script of the references) | 13a | intl | zh | ja-mecab | ko-mecab | char | none | spm | flores101 "
            "| flores200 | spBLEU-1K."
        ),
    ] = "auto"
    builtin_pairs: Annotated[
        int, Help("Training pairs drawn from the built-in corpus (format: builtin only)."), Range(at_least=1)
    ] = 40_000


@dataclass(frozen=True)
class SubwordConfig:
    """The sentencepiece model(s)."""

    vocab_size: Annotated[
        int,
        Help(
            "Number of subwords, the four special ones (padding 0, unknown 1, start 2, end 3) and 256 bytes included."
        ),
        Range(at_least=261),  # the 4 special subwords, the 256 bytes, and one to spell with
    ] = 1_000
    joint: Annotated[bool, Help("One model for both languages (needed to share embeddings), or one for each.")] = True
    kind: Annotated[Literal["unigram", "bpe"], Help("unigram | bpe.")] = "unigram"
    lowercase: Annotated[
        bool, Help("Lower-case the text before anything else (BLEU is then computed on lower-case text too).")
    ] = False


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `models.PRESETS`, and what to change in it (None keeps the preset's value)."""

    preset: Annotated[str, Help("tiny | multi30k | small | base | big.")] = "tiny"
    d_model: Annotated[int | None, Help("Width of hidden states; even, and divisible by heads."), Range(at_least=1)] = (
        None
    )
    d_ff: Annotated[int | None, Help("Width inside the feed-forward networks."), Range(at_least=1)] = None
    heads: Annotated[int | None, Help("Attention heads."), Range(at_least=1)] = None
    encoder_layers: Annotated[int | None, Help("Layers of the encoder."), Range(at_least=1)] = None
    decoder_layers: Annotated[int | None, Help("Layers of the decoder."), Range(at_least=1)] = None
    dropout: Annotated[
        float | None, Help("Share of values dropped in training, from 0 to below 1."), Range(at_least=0, below=1)
    ] = None
    norm: Annotated[Literal["pre", "post"] | None, Help("pre | post.")] = None
    tie: Annotated[
        Literal["none", "target", "all"] | None,
        Help("none | target (target embedding = generator) | all (source too; needs a joint vocabulary)."),
    ] = None


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
    batch_tokens: Annotated[int, Help("Target tokens, padding included, in a batch."), Range(at_least=1)] = 4_096
    accumulate: Annotated[
        int,
        Help(
            "Batches per optimizer step; the gradient is divided by the tokens of all of them. The step is the "
            "same whatever it runs on: each process gets as many whole batches as the others, and the sentences of "
            "the remaining batches are divided among them."
        ),
        Range(at_least=1),
    ] = 1
    steps: Annotated[int, Help("Optimizer steps at most."), Range(at_least=1)] = 1_000
    schedule: Annotated[
        Literal["inverse_sqrt", "linear", "noam", "constant"],
        Help(
            "inverse_sqrt | linear (to 0 at the end) | noam | constant: how the learning rate falls after the warm-up."
        ),
    ] = "inverse_sqrt"
    learning_rate: Annotated[
        float, Help("The peak (inverse_sqrt, linear), the factor (noam), or the rate (constant)."), Range(at_least=0)
    ] = 2e-3
    warmup: Annotated[int, Help("Steps of linear warm-up."), Range(at_least=0)] = 200
    betas: Annotated[tuple[float, float], Help("Adam's two decay rates."), Range(at_least=0, below=1)] = (0.9, 0.98)
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
        Literal["torch", "fairseq", "harvard"],
        Help("torch (eps/V) | fairseq (eps/(V-1)) | harvard (eps/(V-2), the entropy constant subtracted)."),
    ] = "torch"
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
    keep_checkpoints: Annotated[
        int,
        Help("Keep the models of this many last validations in <run>/checkpoints, to be averaged; 0 keeps none."),
        Range(at_least=0),
    ] = 0
    patience: Annotated[
        int, Help("Stop after this many validations without a better loss; 0 never stops early."), Range(at_least=0)
    ] = 0
    seed: Annotated[
        int, Help("Of the first weights, dropout, and the order of the data."), Range(at_least=0, below=2**63)
    ] = 1
    threads: Annotated[int, Help("CPU threads; 0 leaves torch's own choice."), Range(at_least=0)] = 0


@dataclass(frozen=True)
class LayoutConfig:
    """How the processes that torchrun started share the work; their product is the number of processes."""

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
        Help("Seconds that a process waits in a step for one that does not come; rank 0 must save in less."),
        Range(at_least=1, below=1e9),  # torch counts milliseconds in a 64-bit integer
    ] = 300.0


@dataclass(frozen=True)
class DecodingConfig:
    """Translation."""

    beam: Annotated[int, Help("Beam width; 1 is greedy."), Range(at_least=1)] = 4
    length_penalty: Annotated[float, Help("Exponent of the length penalty; 0 has none."), Range(at_least=0)] = 0.6
    length_norm: Annotated[
        Literal["gnmt", "length"],
        Help(
            "What a hypothesis's log-probability is divided by, with the length penalty as exponent: gnmt "
            "((5 + length) / 6) | length (as in fairseq)."
        ),
    ] = "gnmt"
    batch_sentences: Annotated[
        int, Help("Sentences translated at a time; changes the speed, not the translations."), Range(at_least=1)
    ] = 64
    max_length: Annotated[
        int,
        Help(
            "Most subwords of a translation; that of a short sentence is twice its own, plus 12. A longer "
            "sentence is cut to this or to training.max_length, whichever is more."
        ),
        Range(at_least=1),
    ] = 256


@dataclass(frozen=True)
class RunConfig:
    """One run: everything `prepare`, `train`, `evaluate` and `translate` need to know."""

    run: Annotated[str, Help("Folder of the run: subword models, checkpoints, metrics, resolved configuration.")] = (
        "runs/demo"
    )
    data: DataConfig = field(default_factory=DataConfig)
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    subwords: SubwordConfig = field(default_factory=SubwordConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


SCHEMA = Schema(RunConfig)


def load_config(path: str | Path | None, overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Read the YAML file at `path`; `overrides` replace its settings, and defaults are used for all others.

    The key of an override is its dotted name (`training.steps`). Its text is read as in a YAML file, except that a text
    setting takes it literally. Any mistake raises ConfigError, which names the key, where it was given (file and line,
    or the command line), and what to do.
    """
    given = {}
    if path is not None:
        given = SCHEMA.read_file(Path(path))
    given |= SCHEMA.read_overrides(overrides or {})
    joint = given.get("subwords.joint")
    tie = given.get("model.tie")
    if joint and tie and tie.value == "all" and not joint.value:
        raise ConfigError(
            f"model.tie all ({tie.location}) needs one vocabulary for both languages, but subwords.joint is false "
            f"({joint.location})"
        )
    sections: dict[str, dict[str, Any]] = {}
    for key, setting in given.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = setting.value
    # After the overrides: the names of the files may have come from the command line
    if "data.format" not in given:
        sections.setdefault("data", {})["format"] = format_of(DataConfig(**sections.get("data", {})))
    config = RunConfig(**sections.pop("", {}))
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


FORMATS = {".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet"}
"""The format of a file by the end of its name."""


def named_format(name: str) -> str | None:
    """Return the format of a file by its name; None if the name does not end in a known one."""
    return FORMATS.get(Path(name.lower().removesuffix(".gz")).suffix)


def format_of(data: DataConfig) -> str:
    """Return the format of the data files, or builtin without files; raise ConfigError if their names do not tell."""
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
    """Write all settings as YAML, to a file that is replaced as a whole; `load_config` reads an equal configuration."""
    # Without allow_unicode, with which PyYAML writes U+0085 as a line break that it reads as a blank
    text = yaml.safe_dump(_with_lists(dataclasses.asdict(config)), sort_keys=False, width=1_000)
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _with_lists(value: object) -> object:
    """Replace tuples, which YAML does not have, by lists."""
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value
