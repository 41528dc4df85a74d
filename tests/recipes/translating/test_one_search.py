"""A setting of decoding is one entry, which every way to a translation follows.

What validation does with it is in `settings/test_every_setting.py`, and what exports do in `export/`.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.translation.commands import COMMANDS, main, serving
from recipes.translation.commands.serving import models_of
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError
from recipes.translation.files.lines import read_lines
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.settings.options import OneLineParser
from recipes.translation.training.student_data import write_translations
from recipes.translation.translating.loaded import LoadedTranslator
from recipes.translation.translating.translate import best, translate
from tests.recipes.random_translator import random_translator

PAIRS = pairs(6, 5, "test")
SENTENCES = [pair.source for pair in PAIRS]
RULES = {"--no-repeat-ngram": "1", "--min-length": "12"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with the same subwords."""
    folder = tmp_path_factory.mktemp("one_search")
    made = []
    for seed in (1, 6):
        translator = random_translator(folder / str(seed), seed)
        config = dataclasses.replace(translator.config, decoding=DecodingConfig(beam=2, max_length=20))
        save_model(folder / str(seed) / "best", dataclasses.replace(translator, config=config), {"step": 1})
        made.append(folder / str(seed))
    (folder / "news.en").write_text("".join(f"{pair.source}\n" for pair in PAIRS))
    (folder / "news.de").write_text("".join(f"{pair.target}\n" for pair in PAIRS))
    return made


def expected(runs: list[Path], settings: dict[str, str]) -> list[str]:
    """What the runs translate together under these settings of decoding."""
    overrides: dict[str, object] = {f"decoding.{field_of(name)}": value for name, value in settings.items()}
    first, *others = (load_translator(run / "best", overrides=overrides) for run in runs)
    together = dataclasses.replace(first, others=tuple(other.model for other in others))
    return translate(together, SENTENCES)


def field_of(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def words_of(runs: list[Path], settings: dict[str, str]) -> list[str]:
    """The options that name the runs and the settings."""
    ensemble = [word for run in runs[1:] for word in ("--ensemble", str(run))]
    return ["--run", str(runs[0]), *ensemble, *itertools.chain.from_iterable(settings.items())]


def by_translate(runs: list[Path], settings: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["translate", *words_of(runs, settings), "--file", str(runs[0].parent / "news.en")]) == 0
    return capsys.readouterr().out.splitlines()


def by_evaluate(runs: list[Path], settings: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    sources = runs[0].parent / "news.en"
    files = ["--sources", str(sources), "--references", str(sources.with_suffix(".de"))]
    assert main(["evaluate", *words_of(runs, settings), *files]) == 0
    name = "news.en.ensemble" if runs[1:] else "news.en"
    return read_lines(runs[0] / f"{name}.translations.txt")


WAYS: list[Callable[[list[Path], dict[str, str], pytest.CaptureFixture[str]], list[str]]] = [by_translate, by_evaluate]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("beam", ["1", "2"])
def test_evaluate_takes_the_same_models_and_settings_as_translate_and_finds_the_same(
    way: Callable[[list[Path], dict[str, str], pytest.CaptureFixture[str]], list[str]],
    models: int,
    beam: str,
    runs: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    some = runs[:models]
    plain = way(some, {"--beam": beam}, capsys)
    assert plain == expected(some, {"--beam": beam})
    for rule, value in RULES.items():
        found = way(some, {"--beam": beam, rule: value}, capsys)
        assert found == expected(some, {"--beam": beam, rule: value})
        assert found != plain


@pytest.mark.parametrize(("rule", "value"), RULES.items())
def test_the_service_a_teacher_and_python_follow_a_setting_as_translate_does(
    rule: str, value: str, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = runs[:1]
    wanted = expected(alone, {rule: value})
    assert wanted != expected(alone, {})
    parser, _ = parser_of("serve", monkeypatch)
    options, _ = parser.parse_known_args([str(runs[0]), rule, value])
    (model,) = models_of(str(runs[0]), options)
    assert [line.translations[0].text for line in model.translate(SENTENCES, 1, False)] == wanted
    teacher: Translator = load_translator(runs[0] / "best", overrides={f"decoding.{field_of(rule)}": value})
    _, translations = write_translations(teacher, SENTENCES, tmp_path, "1")
    kept = [one.text if one.finished else "" for one in best(teacher, SENTENCES)]  # what is cut is not taught
    assert [text for text in kept if text] == [text for text, taught in zip(wanted, kept, strict=True) if taught]
    assert any(kept)
    assert read_lines(translations) == kept
    loaded = LoadedTranslator(load_translator(runs[0] / "best"))
    assert loaded.translate(SENTENCES, **{field_of(rule): int(value)}) == wanted


def test_that_an_export_is_older_than_its_run_is_printed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Into a pipe, which is else written when it is full or the service ends."""
    (tmp_path / "ctranslate2").mkdir()
    (tmp_path / "ctranslate2" / "model.bin").touch()
    served = SimpleNamespace(engine="ctranslate2", source="en", target="de", beam=4)
    monkeypatch.setattr(serving, "load_exported", lambda *given: None)
    monkeypatch.setattr("recipes.translation.commands.served_models.served_models", lambda *given: [served])
    monkeypatch.setattr(serving, "outdated_export", lambda run: "older")
    parser, _ = parser_of("serve", monkeypatch)
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe))
    assert models_of(str(tmp_path), parser.parse_args([str(tmp_path)])) == [served]
    *_, first, last = pipe.getvalue().decode().splitlines()
    assert first == f"[serve] {tmp_path}: en to de, with ctranslate2, beam 4"
    assert last == "[serve] older, or add --engine torch"


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[OneLineParser, set[str]]:
    """The parser of a command, and the names of its options."""
    found: list[OneLineParser] = []

    def stop(parser: OneLineParser, argv: object) -> None:
        found.append(parser)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OneLineParser, "parse", stop)
        with pytest.raises(KeyboardInterrupt):
            COMMANDS[command]([])
    return found[0], {name for action in found[0]._actions for name in action.option_strings}


@pytest.mark.parametrize("command", ["translate", "evaluate", "serve"])
def test_every_setting_of_decoding_is_an_option_of_each_command_that_translates(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(DecodingConfig)}
    assert settings - parser_of(command, monkeypatch)[1] == set()


def test_a_translation_that_must_be_longer_than_it_may_is_refused_in_every_way(runs: list[Path]) -> None:
    loaded = LoadedTranslator(load_translator(runs[0] / "best"))
    with pytest.raises(ConfigError, match=r"^decoding\.min_length is 20, but a translation has at most 20"):
        loaded.translate(SENTENCES, min_length=20)
    with pytest.raises(ConfigError, match=r"^decoding\.min_length is 9, but a translation has at most 9"):
        load_translator(runs[0] / "best", overrides={"decoding.min_length": 9, "decoding.max_length": 9})
