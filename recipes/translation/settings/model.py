"""The settings of a run's model, and of what it translates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from recipes.translation.settings.schema import Help, Range


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `models.PRESETS`, and what to change in it (null keeps the preset's value)."""

    preset: Annotated[
        str,
        Help(
            "tiny | multi30k | student | small | base | big (Transformers) | lstm | decoder_only (a language model "
            "that translates by prompt; needs a joint vocabulary) | opus_mt | m2m100 | mbart (the Transformers of "
            "published models, as the command import makes them)."
        ),
    ] = "tiny"
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
    activation: Annotated[
        Literal["relu", "gelu", "swish"] | None,
        Help("relu | gelu | swish: between the two matrices of the feed-forward networks."),
    ] = None
    max_positions: Annotated[
        int | None,
        Help("Tokens of the longest sentence, for mbart, whose positions are learned; others have no limit."),
        Range(at_least=1),
    ] = None


DECODER_ONLY = ("decoder_only",)
"""Presets that read source and target as one sequence."""


@dataclass(frozen=True)
class DecodingConfig:
    """Translation.

    These are options of every command that translates, too, and of `LoadedTranslator`.
    """

    beam: Annotated[int, Help("Beam width, at most 1,000; 1 is greedy."), Range(at_least=1, below=1_001)] = 4
    length_penalty: Annotated[
        float, Help("Exponent of the length penalty; 0 has none."), Range(at_least=0, below=50)
    ] = 0.6
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
            "Most subwords of a translation; for a short sentence the limit is twice its own subwords plus 12. A "
            "longer sentence is cut to this or to training.max_length, whichever is more."
        ),
        Range(at_least=1),
    ] = 256
    min_length: Annotated[int, Help("Fewest subwords of a translation."), Range(at_least=0)] = 0
    no_repeat_ngram: Annotated[
        int,
        Help("No sequence of so many subwords occurs more than once in a translation; 0 lets all repeat."),
        Range(at_least=0),
    ] = 0
