"""What the tests of translating share."""

from __future__ import annotations

import pytest

from recipes.translation.run_folder.translator import Translator
from tests.recipes.random_translator import random_translator


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """A translator with random weights, of each module its own."""
    return random_translator(tmp_path_factory.mktemp("translate"))
