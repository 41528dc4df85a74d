"""How long a sentence may be for a model whose positions are learned."""

from __future__ import annotations

from models import TransformerConfig
from models.presets import ARCHITECTURES, Sizes
from recipes.translation.text.subwords import Symbols


def most_subwords(sizes: Sizes, symbols: Symbols) -> int | None:
    """Return the most subwords of a sentence beside its symbols; None where positions are not learned."""
    if not isinstance(sizes, TransformerConfig) or ARCHITECTURES[sizes.architecture].positions != "learned":
        return None
    return sizes.max_positions - max(len(symbols.source([])), len(symbols.target([])) - 1)
