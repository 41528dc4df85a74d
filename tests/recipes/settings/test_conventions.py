"""The recipe knows the smoothing conventions from the library's table of them."""

from recipes.translation.settings.config import SCHEMA, TrainingConfig
from recipes.translation.training.objective import Objective
from seqpar.rows.conventions import CONVENTIONS, Shares
from tests.models.examples import small_transformer

NEW = "a convention of this test"


def test_an_entry_of_the_table_is_enough_for_the_recipe(monkeypatch):
    monkeypatch.setitem(CONVENTIONS, NEW, Shares("", True, False, True))
    training = TrainingConfig(label_smoothing=0.3, smoothing_convention=NEW)
    loss = Objective(training).loss(small_transformer(), None, None)
    assert loss.head["criterion"].smoothing_convention == NEW


def test_the_recipe_s_choices_and_help_are_the_table_s():
    setting = SCHEMA.settings["training.smoothing_convention"]
    assert [*setting.choices] == [*CONVENTIONS]
    for name, shares in CONVENTIONS.items():
        assert f"{name} ({shares.text})" in setting.help
