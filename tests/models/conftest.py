"""What the searches do piece by piece for speed has several pieces in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Caches grow, and a block of logits has few sentences, so that whatever is done with it must know which."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.cache.FIRST_ROOM", 1)
        patch.setattr("models.candidates.LOGITS_BYTES", 500)
        yield
