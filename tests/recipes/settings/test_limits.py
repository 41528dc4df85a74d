"""Every limit of a setting and of an option: at its number, one below and one above.

Settings and options are those of the dataclasses and parsers themselves; one with a new limit fails until it is here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import pytest

from recipes.translation.commands import COMMANDS, arguments
from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import SCHEMA, CorpusConfig, load_config
from recipes.translation.settings.options import OneLineParser
from recipes.translation.settings.schema import LARGEST, Schema

CORPUS = Schema(CorpusConfig).settings
LIMITED = {name: setting for name, setting in SCHEMA.settings.items() if setting.range}

RANGES: dict[tuple[float, float], str] = {
    (1, math.inf): """
        data.temperature data.builtin_pairs cleaning.max_words cleaning.max_characters cleaning.max_ratio
        model.d_model model.d_ff model.heads model.encoder_layers model.decoder_layers
        model.max_positions training.chunk_tokens training.batch_tokens training.accumulate
        training.max_length training.validate_every training.plateau_patience layout.shard layout.vocab
        decoding.batch_sentences decoding.max_length""",
    (0, math.inf): """
        subwords.train_pairs subwords.sampling training.learning_rate training.warmup training.clip
        training.teacher_weight training.validate_bleu training.keep_checkpoints training.patience training.lora_rank
        training.threads training.steps training.epochs layout.data decoding.min_length decoding.no_repeat_ngram""",
    (0, 1): """
        model.dropout training.betas
        training.label_smoothing training.ema""",
    (1, 1_001): "decoding.beam",
    (5, math.inf): "subwords.vocab_size",
    (0.98, 1.0001): "subwords.character_coverage",
    (0, 1e6): "decoding.max_ratio",
    (0.01, 1000): "training.teacher_temperature",
    (0.01, 1e6): "training.lora_alpha",
    (0, 2**63): "training.seed",
    (1e-16, 1): "training.adam_eps",
    (1e-6, 1): "training.plateau_factor",
    (0, 100): "training.weight_decay",
    (1, 1e9): "layout.timeout",
    (0, 50): "decoding.length_penalty",
    (-1e9, 1e9): "cleaning.metric_least",
}
"""From what to below what, for each setting."""


def test_every_number_of_the_settings_has_its_range() -> None:
    expected = {name: limits for limits, names in RANGES.items() for name in names.split()}
    assert {name: tuple(setting.range or ()) for name, setting in LIMITED.items()} == expected
    numbers = {name for name, each in SCHEMA.settings.items() if {int, float, tuple[float, float]} & set(each.kinds)}
    assert numbers == set(LIMITED)
    assert {name: tuple(setting.range) for name, setting in CORPUS.items() if setting.range} == {"weight": (0, 1e9)}


def accepts(name: str, number: float) -> bool:
    """Whether a setting may be this number, given as on the command line."""
    text = repr(number)
    if SCHEMA.settings[name].kinds == (tuple[float, float],):
        text = f"[0.5, {text}]"
    try:
        SCHEMA.read_overrides({name: text})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", LIMITED)
def test_a_setting_ends_exactly_where_its_range_does(name: str) -> None:
    limits = LIMITED[name].range
    if int in LIMITED[name].kinds:
        least, above = int(limits.at_least), limits.below if limits.below < math.inf else LARGEST + 1
        edges = [least - 1, least, least + 1, int(above) - 1, int(above)]
        expected = [False, True, True, True, False]
    else:
        least, above = limits.at_least, limits.below
        edges = [math.nextafter(least, -math.inf), least, math.nextafter(least, 1e9)]
        expected = [False, True, True]
        if above < math.inf:
            edges += [math.nextafter(above, 0), above]
            expected += [True, False]
    assert [accepts(name, each) for each in edges] == expected


BELOW, ABOVE, BIT = math.nextafter(1, 0), math.nextafter(1, 2), 2.0**-20
BPE = {"subwords.kind": "bpe"}
LORA: dict[str, Any] = {"training.start_from": "run", "training.lora_rank": 4}
TEACHER: dict[str, Any] = {"training.teacher": "run"}
TOGETHER: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = [
    (BPE, "subwords.sampling", [0.0, BELOW], [1.0, ABOVE]),
    ({}, "subwords.sampling", [1.0, ABOVE], []),
    (TEACHER, "training.teacher_weight", [0.0, 1.0], [ABOVE]),
    ({}, "training.steps", [1], [0]),
    ({"training.epochs": 1}, "training.steps", [0, 1], []),
    ({"training.steps": 0}, "training.epochs", [1], [0]),
    ({"training.best_by": "bleu"}, "training.validate_bleu", [1], [0]),
    ({"decoding.max_length": 20}, "decoding.min_length", [0, 19], [20, 21]),
    (LORA, "layout.vocab", [1], [2]),
]
"""Beside these settings, the numbers that another one may have, and those that it may not."""


@pytest.mark.parametrize(("beside", "name", "good", "bad"), TOGETHER)
def test_settings_together_end_exactly_where_they_say(
    beside: dict[str, Any], name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        load_config(None, {**beside, name: value})
    for value in bad:
        with pytest.raises(ConfigError, match=name):
            load_config(None, {**beside, name: value})


OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "--last --n-best --sample --top-k": (["1", "2"], ["0", "-1", "1.0"]),
    "--seed": (["0", "1"], ["-1"]),
    "--temperature": (["5e-324", "1e308"], ["0", "-5e-324", "inf", "nan"]),
    "--top-p": (["5e-324", repr(BELOW), "1"], ["0", repr(ABOVE), "nan"]),
    "--port": (["0", "1", "65534", "65535"], ["-1", "65536"]),
}
"""Options of numbers, and the values on the good and on the bad side of their limits."""


class StoppedError(Exception):
    """A command whose options are known."""


def options_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OneLineParser, argparse.Action]]:
    """Every option of every command that converts its value."""

    def stop(parser: OneLineParser, argv: object) -> argparse.Namespace:
        raise StoppedError(parser)

    monkeypatch.setattr(OneLineParser, "parse", stop)
    for command in COMMANDS.values():
        with pytest.raises(StoppedError) as stopped:
            command([])
        parser = stopped.value.args[0]
        yield from ((parser, action) for action in parser._actions if action.type and action.option_strings)


def test_an_option_ends_exactly_where_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {name: values for names, values in OPTIONS.items() for name in names.split()}
    found = set()
    for parser, action in options_of(monkeypatch):
        if action.type is arguments.path:
            continue
        name = action.option_strings[0]
        found.add(name)
        good, bad = limits[name]
        for value in good:
            parser.parse_known_args([f"{name}={value}"])
        for value in bad:
            with pytest.raises((SystemExit, argparse.ArgumentError)):
                parser.parse_known_args([f"{name}={value}"])
    capsys.readouterr()
    assert found == set(limits)
