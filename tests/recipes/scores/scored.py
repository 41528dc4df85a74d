"""The scores of translations, as `evaluate` writes them to a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes.translation.scores.scores import measure, record_of


def score(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> dict[str, Any]:
    """Compare translations with one reference each."""
    return record_of(measure(hypotheses, references, **options))
