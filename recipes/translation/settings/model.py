"""The settings of a run's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from recipes.translation.settings.schema import Help, Range


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `models.PRESETS`, and what to change in it (None keeps the preset's value)."""

    preset: Annotated[
        str,
        Help(
            "tiny | multi30k | student | small | base | big (Transformers) | lstm | decoder_only (a language model "
            "that translates by prompt; needs a joint vocabulary)."
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


DECODER_ONLY = ("decoder_only",)
"""Presets that read source and target as one sequence."""


def _transformer(d_model: int, d_ff: int, heads: int, layers: int, dropout: float, norm: str) -> dict[str, object]:
    sizes = {"d_model": d_model, "d_ff": d_ff, "heads": heads, "encoder_layers": layers, "decoder_layers": layers}
    return {**sizes, "dropout": dropout, "norm": norm, "tie": "all"}


PRESETS: Mapping[str, Mapping[str, object]] = {
    "tiny": _transformer(128, 512, 4, 2, 0.1, "pre"),
    "multi30k": _transformer(128, 256, 4, 4, 0.3, "pre"),
    "small": _transformer(256, 512, 8, 3, 0.1, "pre"),
    "base": _transformer(512, 2048, 8, 6, 0.1, "post"),
    "big": _transformer(1024, 4096, 16, 6, 0.3, "post"),
    "lstm": {"d_model": 256, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.3, "tie": "all"},
}
"""The values of `models.PRESETS`, for help that does not wait for torch."""


def by_preset(name: str) -> str:
    """Return the value that each preset has for a setting of the model: tiny 128, multi30k 128, small 256, ..."""
    return ", ".join(f"{preset} {values[name]}" for preset, values in PRESETS.items() if name in values)
