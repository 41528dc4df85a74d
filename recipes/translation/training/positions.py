"""The check that a model with learned positions has one for every token of the data."""

from __future__ import annotations

from models.presets import Sizes
from recipes.translation.data.corpus import Corpus
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.positions import most_subwords


def check_positions(config: RunConfig, sizes: Sizes, corpus: Corpus) -> None:
    """Raise ConfigError or DataError where a sentence could have more tokens than the model has learned positions."""
    most = most_subwords(sizes, corpus.source.symbols)
    if most is None:
        return
    for name in ("training", "decoding"):
        given = getattr(config, name).max_length
        if given > most:
            raise ConfigError(
                f"{name}.max_length is {given}, but the model has learned positions for {most} subwords beside start "
                f"and end symbols: set it to {most} or less"
            )
    for valid in corpus.valid:
        for side, lengths in (("source", valid.batches.source_lengths), ("target", valid.batches.target_lengths)):
            if lengths.max() > most:
                raise DataError(
                    f"{valid.held_out.setting}: the {side} of pair {int(lengths.argmax()) + 1:,} has "
                    f"{int(lengths.max()):,} subwords, and the model has learned positions for {most:,}: split the "
                    "sentence, or leave it out"
                )
