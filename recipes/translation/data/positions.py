"""How long a sentence may be for a model whose positions are learned."""

from __future__ import annotations

from collections.abc import Mapping

from models import TransformerConfig
from models.presets import ARCHITECTURES, Sizes
from recipes.translation.data.corpus import Corpus
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.text.subwords import Symbols


def most_subwords(sizes: Sizes, symbols: Symbols) -> int | None:
    """Return the most subwords a sentence may have besides its symbols; None if positions are not learned."""
    if not isinstance(sizes, TransformerConfig) or ARCHITECTURES[sizes.architecture].positions != "learned":
        return None
    return sizes.max_positions - max(len(symbols.source([])), len(symbols.target([])) - 1)


def check_length(name: str, given: int, most: int | None) -> None:
    """Raise ConfigError for a setting, the most subwords of a sentence, above what a model has (`most_subwords`)."""
    if most is not None and given > most:
        raise ConfigError(
            f"{name} is {given}, but the model has learned positions for {most} subwords beside start and end symbols: "
            f"set it to {most} or less"
        )


def check_positions(lengths: Mapping[str, int], sizes: Sizes, corpus: Corpus) -> None:
    """Raise ConfigError or DataError if a sentence could have more tokens than the model has learned positions.

    `lengths` are the most subwords of a sentence, keyed by the settings that allow them.
    """
    most = most_subwords(sizes, corpus.source.symbols)
    for name, given in lengths.items():
        check_length(name, given, most)
    if most is None:
        return
    for valid in corpus.valid:
        for side, found in (("source", valid.batches.source_lengths), ("target", valid.batches.target_lengths)):
            if found.max() > most:
                raise DataError(
                    f"{valid.held_out.setting}: the {side} of pair {int(found.argmax()) + 1:,} has "
                    f"{int(found.max()):,} subwords, and the model has learned positions for {most:,}: split the "
                    "sentence, or leave it out"
                )
