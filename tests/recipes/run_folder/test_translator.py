"""How a model is built of its settings: what cannot be built is answered with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import ModelConfig


def test_sizes_that_do_not_fit_each_other_are_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"^model: d_model 30 is not divisible by heads 4"):
        model_sizes(ModelConfig(preset="tiny", d_model=30, heads=4))


def test_one_matrix_for_vocabularies_of_two_sizes_is_a_mistake_in_the_settings() -> None:
    source: Any = range(8)
    target: Any = range(9)
    sizes = replace(model_sizes(ModelConfig(preset="tiny")), tie="all")
    with torch.device("meta"), pytest.raises(ConfigError, match=r"^model: tie='all' shares one embedding, .* 8 .* 9"):
        build_model(sizes, source, target)
