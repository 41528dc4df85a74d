"""Every setting of a translation run, as one frozen dataclass of sections.

A field says everything about a setting: its type and choices (`Literal`), its default, help text and range (`setting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from recipes.translation.settings.data import CleaningConfig, CorpusConfig, DataConfig, SubwordConfig
from recipes.translation.settings.schema import setting
from recipes.translation.settings.training import LayoutConfig, TrainingConfig


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `models.PRESETS`, and what to change in it (null keeps the preset's value)."""

    preset: str = setting(
        "tiny",
        "tiny | multi30k | student | small | base | big (Transformers) | decoder_only (a language model "
        "that translates by prompt; needs a joint vocabulary) | opus_mt | m2m100 | mbart (the Transformers of "
        "published models, as the command import makes them).",
    )
    d_model: int | None = setting(None, "Width of hidden states; even, and divisible by heads.", at_least=1)
    d_ff: int | None = setting(None, "Width inside the feed-forward networks.", at_least=1)
    heads: int | None = setting(None, "Attention heads.", at_least=1)
    encoder_layers: int | None = setting(None, "Layers of the encoder.", at_least=1)
    decoder_layers: int | None = setting(None, "Layers of the decoder.", at_least=1)
    dropout: float | None = setting(
        None, "Share of values dropped in training, from 0 to below 1.", at_least=0, below=1
    )
    norm: Literal["pre", "post"] | None = setting(None, "pre | post.")
    tie: Literal["none", "target", "all"] | None = setting(
        None, "none | target (target embedding = generator) | all (source too; needs a joint vocabulary)."
    )
    activation: Literal["relu", "gelu", "swish"] | None = setting(
        None, "relu | gelu | swish: between the two matrices of the feed-forward networks."
    )
    max_positions: int | None = setting(
        None,
        "Length of the longest sentence, in tokens, for mbart, whose positions are learned; other models have no "
        "limit.",
        at_least=1,
    )


DECODER_ONLY = ("decoder_only",)
"""Presets that read source and target as one sequence."""


@dataclass(frozen=True)
class DecodingConfig:
    """Translation.

    These are options of every command that translates, too, and of `LoadedTranslator`.
    """

    beam: int = setting(4, "Beam width, at most 1,000; 1 is greedy.", at_least=1, below=1_001)
    length_penalty: float = setting(0.6, "Exponent of the length penalty; 0 turns it off.", at_least=0, below=50)
    length_norm: Literal["gnmt", "length"] = setting(
        "gnmt",
        "What a hypothesis's log-probability is divided by, with the length penalty as exponent: gnmt "
        "((5 + length) / 6) | length (as in fairseq).",
    )
    batch_sentences: int = setting(
        64, "Sentences translated at a time; changes the speed, not the translations.", at_least=1
    )
    max_length: int = setting(
        256,
        "Maximum length of a translation, in subwords; for a short sentence max_ratio is the limit. A longer source "
        "sentence is cut to this or to training.max_length, whichever is more.",
        at_least=1,
    )
    max_ratio: float = setting(
        2.0,
        "Maximum length of a translation, in subwords for each subword of the sentence, plus 12. Raise it where "
        "translations are much longer than sentences, and max_length with it.",
        at_least=0,
        below=1e6,
    )
    min_length: int = setting(0, "Minimum length of a translation, in subwords.", at_least=0)
    no_repeat_ngram: int = setting(
        0, "No sequence of this many subwords occurs twice in a translation; 0 sets no limit.", at_least=0
    )


@dataclass(frozen=True)
class RunConfig:
    """One run: everything `prepare`, `train`, `evaluate` and `translate` need to know."""

    run: str = setting(
        "runs/demo", "Folder of the run: subword models, checkpoints, metrics, resolved configuration.", path=True
    )
    data: DataConfig = field(default_factory=DataConfig)
    corpora: Mapping[str, CorpusConfig] = field(
        default_factory=dict,
        metadata={
            "help": "Training corpora instead of data.train, each under a name: {news: {train: [a.en, a.de], weight: "
            "2}}. The settings of a corpus are train, valid, test, format, path, source and target, as in data; "
            "weight, for its share of an epoch; and tag, a word in front of its sources."
        },
    )
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    subwords: SubwordConfig = field(default_factory=SubwordConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def with_languages(self, source: str, target: str) -> RunConfig:
        """Return the settings with these languages, which determine the tag in front of a source sentence."""
        data = self.data
        # A corpus that names no languages has those of data, and keeps them
        corpora = {
            name: replace(corpus, source=corpus.source or data.source, target=corpus.target or data.target)
            for name, corpus in self.corpora.items()
        }
        return replace(self, data=replace(data, source=source, target=target), corpora=corpora)
