"""Every setting of a translation run, as frozen dataclasses: the YAML file and the command line mirror them.

A run is described by one `RunConfig`. Its sections are read from a YAML file, overridden on the command line,
and saved, resolved, beside the run's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs come from."""

    format: str = "builtin"
    """builtin | text (two line-aligned files, plain or .gz) | tsv | jsonl | parquet | hub (a Hugging Face name)."""
    path: str = ""
    """Folder that relative file names below start from; ${NAME} is read from the environment. For hub: the data set's name."""
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
    builtin_pairs: int = 40_000
    """Training pairs drawn from the built-in corpus (format: builtin only)."""


@dataclass(frozen=True)
class SubwordConfig:
    """The sentencepiece model(s)."""

    vocab_size: int = 1_000
    """Number of subwords, the four special ones included (padding 0, unknown 1, start 2, end 3)."""
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
    d_model: int | None = None
    d_ff: int | None = None
    heads: int | None = None
    encoder_layers: int | None = None
    decoder_layers: int | None = None
    dropout: float | None = None
    norm: str | None = None
    """pre | post."""
    tie: str | None = None
    """none | target (target embedding = generator) | all (source too; needs a joint vocabulary)."""


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation, and the devices it runs on."""

    devices: str | tuple[str, ...] = "auto"
    """auto (every GPU of the machine; without one [cpu, cpu]) or a list such as [cuda:0, cuda:1]."""
    chunk_size: int = 32
    """Time steps whose logits exist at once (per device)."""
    batch_tokens: int = 4_096
    """Target tokens, padding included, in a batch; the batch is split over the devices."""
    accumulate: int = 1
    """Batches per optimizer step; the gradient is divided by the tokens of all of them."""
    steps: int = 1_000
    """Optimizer steps at most."""
    schedule: str = "inverse_sqrt"
    """inverse_sqrt (learning_rate is the peak) | noam (learning_rate is the factor) | constant."""
    learning_rate: float = 2e-3
    warmup: int = 200
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    label_smoothing: float = 0.1
    smoothing: str = "torch"
    """torch (eps/V) | fairseq (eps/(V-1)) | harvard (eps/(V-2), the entropy constant subtracted)."""
    precision: str = "float32"
    """float32 | bf16 (autocast)."""
    max_length: int = 256
    """Training pairs longer than this many subwords on either side are dropped (and counted in the log)."""
    validate_every: int = 200
    """Steps between validations."""
    validate_bleu: int = 200
    """Validation sentences translated greedily for BLEU at each validation; 0 leaves BLEU out."""
    patience: int = 0
    """Stop after this many validations without a better loss; 0 never stops early."""
    seed: int = 1
    threads: int = 0
    """CPU threads; 0 leaves torch's own choice."""


@dataclass(frozen=True)
class DecodingConfig:
    """Translation."""

    beam: int = 4
    """Beam width; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of the length penalty; 0 has none."""
    batch_sentences: int = 64
    max_length: int = 256


@dataclass(frozen=True)
class RunConfig:
    """One run: everything `prepare`, `train`, `evaluate` and `translate` need to know."""

    run: str = "runs/demo"
    """Folder of the run: subword models, checkpoints, metrics, resolved configuration."""
    data: DataConfig = field(default_factory=DataConfig)
    subwords: SubwordConfig = field(default_factory=SubwordConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
