"""The configuration files of the recipe can be read, their commands be given, and conventions are the library's."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from recipes.translation.commands import DEMO_CONFIG, main
from recipes.translation.settings.config import SCHEMA, TrainingConfig, load_config
from recipes.translation.training.objective import Objective
from seqpar.rows.conventions import CONVENTIONS, Shares
from tests.models.examples import small_transformer

ROOT = Path(__file__).parent.parent.parent.parent
CONFIGS = sorted(DEMO_CONFIG.parent.glob("*.yaml"))


def commands_in(config: Path) -> list[list[str]]:
    """The commands in the comments, whole lines that are indented."""
    comments = "\n".join(line[1:] for line in config.read_text().splitlines() if line.startswith("#"))
    joined = comments.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^ {3}(torchrun .*|python .*)$", joined, re.MULTILINE)]


COMMANDS = [command for config in CONFIGS for command in commands_in(config)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_configuration_is_valid_and_has_a_run_of_its_own(path: Path) -> None:
    config = load_config(path)
    assert Path(config.run).name == ("demo" if path == DEMO_CONFIG else path.stem)


def test_the_published_setting_comes_with_the_commands_that_reproduce_it() -> None:
    published = commands_in(DEMO_CONFIG.parent / "multi30k_en_de_published.yaml")
    assert [command[0] for command in published] == ["torchrun", "python", "python"]


def test_the_student_comes_with_the_commands_that_make_score_and_export_it() -> None:
    commands = commands_in(DEMO_CONFIG.parent / "multi30k_student.yaml")
    assert [command[3] for command in commands] == ["distil", "average", "evaluate", "export"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_in_a_comment_reaches_the_recipe_as_it_is(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if command[0] == "torchrun":
        options = parse_args(command[1:])
        words = [options.training_script, *options.training_script_args]
    else:
        assert command[1] == "-m"
        words = command[2:]
    assert words[0] == "recipes.translation"
    for name, value in itertools.pairwise(words):
        if name == "--config":
            assert (ROOT / value).is_file()
        if name == "--run":
            assert value in {load_config(path).run for path in CONFIGS}
    with pytest.raises(SystemExit) as ended:  # the options are known: the help that follows them is shown
        main([*words[1:], "--help"])
    assert ended.value.code == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*words[1:], "--no-such-option"])
    assert "unknown option --no-such-option" in capsys.readouterr().err


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
