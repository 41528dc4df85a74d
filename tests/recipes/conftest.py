"""What the recipe's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recipes.tiny import few_held_out


@pytest.fixture(scope="module")
def short_validations() -> Iterator[None]:
    """Eight validation and eight test pairs for all tests of a module."""
    with few_held_out():
        yield
