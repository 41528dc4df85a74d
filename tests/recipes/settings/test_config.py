"""Settings: what is written is what is read, and every mistake has an answer of one line."""

import dataclasses
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import (
    SCHEMA,
    CorpusConfig,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    RunConfig,
    SubwordConfig,
    TrainingConfig,
    load_config,
    save_config,
)
from recipes.translation.settings.options import overrides
from recipes.translation.settings.schedules import SCHEDULES

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
files = st.lists(texts, max_size=3).map(tuple)
counts = st.integers(1, 10**9)
shares = st.floats(0, 1, exclude_max=True)


def choice(key: str) -> st.SearchStrategy[str]:
    return st.sampled_from(SCHEMA.settings[key].choices)


configs = st.builds(
    RunConfig,
    run=texts,
    data=st.builds(
        DataConfig,
        format=choice("data.format"),
        path=texts,
        train=files,
        valid=files,
        source=texts | st.sampled_from(["no", "on", "1e-3", "null", "~", "12", "[a]"]),
        target=texts,
        builtin_pairs=counts,
    ),
    corpora=st.dictionaries(
        texts,
        st.builds(CorpusConfig, train=files, path=st.none() | texts, weight=st.floats(0, 1e8), tag=texts),
        max_size=2,
    ),
    subwords=st.builds(
        SubwordConfig, vocab_size=st.integers(261, 10**6), joint=st.just(True), kind=choice("subwords.kind")
    ),
    model=st.builds(
        ModelConfig,
        preset=texts,
        d_model=st.none() | counts,
        dropout=st.none() | shares,
        norm=st.none() | choice("model.norm"),
        tie=st.none() | choice("model.tie"),
    ),
    training=st.builds(
        TrainingConfig,
        devices=texts | files,
        learning_rate=st.floats(0, 1e300),
        betas=st.tuples(shares, shares),
        label_smoothing=shares,
        seed=st.integers(0, 2**63 - 1),
    ),
    decoding=st.builds(
        DecodingConfig,
        beam=st.integers(1, 1_000),
        length_penalty=st.floats(0, 10),
        length_norm=choice("decoding.length_norm"),
    ),
)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path | None, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_file_and_overrides_the_defaults_hold() -> None:
    assert load_config(None) == load_config(None, {}) == RunConfig()


@example(RunConfig(run="$0", training=TrainingConfig(start_from="~/${x}")))
@example(RunConfig(run="\u2028", data=DataConfig(train=("\u2029", " \xa0"))))
@given(configs)
def test_a_saved_configuration_is_read_back_exactly(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        assert load_config(path) == config
        assert list(path.parent.iterdir()) == [path]


@example(RunConfig(run="$0"))
@given(configs)
def test_values_given_as_overrides_come_out_exactly(config: RunConfig) -> None:
    values: dict[str, Any] = {"run": config.run}
    for section in ("data", "subwords", "model", "training", "decoding"):
        values |= {f"{section}.{key}": value for key, value in dataclasses.asdict(getattr(config, section)).items()}
    for key in ("data.path", "data.source", "data.target", "model.preset", "training.devices"):
        if isinstance(values[key], str) and (values[key].startswith("[") or values[key] == "none"):
            del values[key]  # text that reads as a list on the command line, or as no value
    loaded = load_config(None, values)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        assert getattr(getattr(loaded, section) if section else loaded, name) == value


@pytest.mark.parametrize(
    ("typed", "symbols"),
    [
        (["[NAME]"], ("[NAME]",)),
        (["[NAME]", "[b]"], ("[NAME]", "[b]")),
        (["['[NAME]']"], ("[NAME]",)),
        (["[]"], ()),
        (["[a, '[b]']"], ("a", "[b]")),
    ],
)
def test_a_symbol_in_brackets_is_no_list_on_the_command_line(typed: list[str], symbols: tuple[str, ...]) -> None:
    options = Namespace(**{"subwords.symbols": typed, "training.devices": ["[cpu]"]})
    config = load_config(None, overrides(options))
    assert config.subwords.symbols == symbols
    assert config.training.devices == ("cpu",)


def test_a_file_changes_defaults_and_the_command_line_changes_the_file(written: Callable[[str], Path]) -> None:
    path = written("run: runs/a\ntraining:\n  steps: 5\n  warmup: 7\n")
    config = load_config(path, {"training.steps": "100", "model.preset": "small"})
    assert config == RunConfig(
        run="runs/a", model=ModelConfig(preset="small"), training=TrainingConfig(steps=100, warmup=7)
    )


def test_an_empty_file_and_empty_sections_change_nothing(written: Callable[[str], Path]) -> None:
    assert load_config(written("")) == load_config(written("training:\ndata: {}\n# nothing\n")) == RunConfig()


@pytest.mark.parametrize("given", ["1e-3", "1.0e-3", "0.001", ".001", "+1E-3"])
def test_numbers_may_be_spelled_as_people_do(given: str, written: Callable[[str], Path]) -> None:
    assert load_config(written(f"training: {{learning_rate: {given}}}")).training.learning_rate == 1e-3
    assert load_config(None, {"training.learning_rate": given}).training.learning_rate == 1e-3


def test_a_whole_number_serves_where_a_number_is_expected(written: Callable[[str], Path]) -> None:
    clip = load_config(written("training: {clip: 25}")).training.clip
    assert (clip, type(clip)) == (25.0, float)


def test_text_stays_text_where_yaml_would_change_it(written: Callable[[str], Path]) -> None:
    data = load_config(written("data: {source: no, target: 12, train: [1e3.en, on]}")).data
    assert (data.source, data.target, data.train) == ("no", "12", ("1e3.en", "on"))
    assert load_config(None, {"data.source": "no"}).data.source == "no"


def test_lists_come_as_tuples(written: Callable[[str], Path]) -> None:
    path = written("training:\n  devices: [cuda:0, cuda:1]\n  betas: [0.9, 1e-1]\ndata: {train: one.tsv}\n")
    config = load_config(path)
    assert config.training.devices == ("cuda:0", "cuda:1")
    assert config.training.betas == (0.9, 0.1)
    assert config.data.train == ("one.tsv",)
    assert load_config(None, {"training.devices": "[cpu, cpu]"}).training.devices == ("cpu", "cpu")
    assert load_config(None, {"training.devices": "cuda:0"}).training.devices == "cuda:0"


def test_null_keeps_the_preset(written: Callable[[str], Path]) -> None:
    path = written("model: {d_model: 64, tie: none}")
    assert load_config(path, {"model.d_model": "null"}).model == ModelConfig(tie="none")
    assert load_config(path, {"model.d_model": None, "model.tie": "null"}).model == ModelConfig()


def test_a_setting_that_is_gone_is_read_where_it_changed_nothing(written: Callable[[str], Path]) -> None:
    assert load_config(written("data: {source: de, streaming: false}")) == load_config(written("data: {source: de}"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("training:\n  stesp: 3", ["training.stesp", "run.yaml:2", "training.steps"]),
        ("steps: 3", ["unknown setting steps", "run.yaml:1", "training.steps"]),
        ("\ntrainig: {steps: 3}", ["trainig", "run.yaml:2", "did you mean training?"]),
        ("qqq: 1", ["qqq", "known: run, data, corpora, cleaning, subwords, model, training, layout, decoding"]),
        ("training:\n  steps: 3\n  seed: 1\n  steps: 4", ["training.steps", "run.yaml:2", "run.yaml:4", "keep one"]),
        ("training: {steps: 7}\ntraining.steps: 8", ["training.steps is given twice", "run.yaml:1", "run.yaml:2"]),
        ("training.steps: 8\ntraining: {steps: 7}", ["training.steps is given twice", "run.yaml:1", "run.yaml:2"]),
        ("data: {}\ndata: {}", ["data is given twice", "run.yaml:1", "run.yaml:2"]),
        ("corpora:\n  a: {}\n  a: {}", ["corpora.a is given twice", "run.yaml:2", "run.yaml:3"]),
        ("corpora: [a]", ["run.yaml:1) expects sections, each under a name; got a list of 1"]),
        ("corpora:\n  a:\n    trian: x", ["unknown setting corpora.a.trian", "run.yaml:3", "corpora.a.train?"]),
        ("corpora:\n  a: 3", ["corpora.a is a section, as in corpora.a: {train: ...}", "run.yaml:2", "got '3'"]),
        ('corpora: {"a\\e": {}}', ["'corpora.a\\x1b'", "run.yaml:1", "it contains the control character"]),
        ("training:\n  steps: many", ["training.steps", "run.yaml:2", "a whole number", "'many'"]),
        ("training:\n  steps: true", ["a whole number", "'true'"]),
        ("training:\n  steps: 1.0", ["a whole number", "'1.0'"]),
        ("training:\n  steps: '100'", ["a whole number", "'100'"]),
        ("training:\n  steps:", ["training.steps", "got nothing"]),
        ("training:\n  steps: [1]", ["a whole number", "a list of 1"]),
        ("training:\n  schedule: [noam]", ["one of inverse_sqrt", "a list of 1"]),
        ("training:\n  batch_tokens: 0", ["from 1 up", "'0'"]),
        ("training: {learning_rate: .nan}", ["training.learning_rate", "a number"]),
        ("training: {learning_rate: -1}", ["from 0 up"]),
        ("training: {betas: [0.9]}", ["a list of 2", "a list of 1"]),
        ("training: {betas: [0.9, 1.0]}", ["training.betas", "below 1"]),
        ("training: {betas: 0.9}", ["a list of 2"]),
        ("training: {label_smoothing: 1}", ["below 1"]),
        ("subwords: {joint: 1}", ["subwords.joint", "true or false"]),
        ("subwords: {vocab_size: 4}", ["from 5 up"]),
        ("subwords: {kind: word}", ["subwords.kind (", "run.yaml:1", "unigram, bpe"]),
        ("data: {streaming: true}", ["data.streaming (", "run.yaml:1", "of an earlier version", "`import` reads"]),
        ("layout: {sequence: 2}", ["layout.sequence (", "run.yaml:1", "of an earlier version", "leave it out"]),
        ("training: {compile: true}\nlayout: {vocab: 2}", ["training.compile is true", "with layout.vocab 2"]),
        ("data: {format: txt}", ["data.format", "builtin, text, tsv", "did you mean text?"]),
        ("data: {train: [[a]]}", ["data.train", "a list, each text"]),
        ("data: {path: null}", ["data.path", "text", "got nothing"]),
        ("training: {devices: {cpu: 1}}", ["training.devices", "text or a list", "a section of 1"]),
        ("model: {d_ff: big}", ["model.d_ff", "a whole number from 1 up or null"]),
        ("training: 3", ["training is a section", "run.yaml:1", "training: {devices: ...}"]),
        ("- a\n- b", ["run.yaml:1", "a list of 2"]),
        ("training: [1", ["run.yaml:1", "not YAML"]),
        ("run: \1", ["run.yaml is not YAML", "special characters are not allowed"]),
        ("a: b\n\tc: d", ["run.yaml:2", "not YAML"]),
        ("run: !!python/name:os.system x", ["run.yaml:1", "expects text"]),
        ("corpora: 3", ["corpora (", "run.yaml:1) expects sections, each under a name; got '3'"]),
        (
            "corpora:\n  a: [x]",
            ["run.yaml:2: corpora.a is a section, as in corpora.a: {train: ...}; got a list of 1"],
        ),
        (
            "corpora:\n  a:\n    trian: x",
            ["unknown setting corpora.a.trian (", "run.yaml:3); did you mean corpora.a.train?"],
        ),
        (
            "corpora:\n  a:\n    weight: -1",
            ["corpora.a.weight (", "run.yaml:3) expects a number from 0 to below 1e+09"],
        ),
        ("corpora:\n  a: {}\n  a: {}", ["corpora.a is given twice (", "run.yaml:2 and ", "run.yaml:3); keep one"]),
        ("corpora:\n  a: {format: csv}", ["corpora.a.format (", "run.yaml:2) expects one of builtin, text, tsv"]),
        ("subwords: {joint: false}\nmodel: {tie: all}", ["model.tie", "run.yaml:2", "subwords.joint", "run.yaml:1"]),
    ],
)
def test_a_mistake_in_a_file_is_answered_with_key_place_and_remedy(
    text: str, parts: list[str], written: Callable[[str], Path]
) -> None:
    answer = refusal(written(text))
    assert [part for part in parts if part not in answer] == [], answer


def test_settings_of_earlier_versions_that_did_nothing_are_read_as_left_out(written: Callable[[str], Path]) -> None:
    before = "data: {streaming: false}\ntraining: {r_drop: 0.0}\nnoise: {words: 0.0}\nlayout: {sequence: 1, data: 2}"
    assert load_config(written(before)) == load_config(written("layout: {data: 2}"))


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("training.step", "3", ["training.step", "command line", "did you mean training.steps?"]),
        ("steps", 3, ["did you mean training.steps?"]),
        ("model", "small", ["is a section", "model.preset"]),
        ("training.steps", True, ["command line", "a whole number", "'true'"]),
        ("training.steps", 1.5, ["a whole number", "'1.5'"]),
        ("training.steps", "[1", ["a whole number", "[1"]),
        ("training.steps", object(), ["a whole number"]),
        ("training.schedule", "inverse-sqrt", [", ".join(SCHEDULES), "did you mean inverse_sqrt?"]),
        ("training.clip", float("inf"), ["a number from 0 up"]),
        ("corpora", ["a"], ["corpora (command line) expects sections, each under a name; got a list of 1"]),
        (
            "corpora",
            "{a: {trian: x}}",
            ["unknown setting corpora.a.trian (command line:1); did you mean corpora.a.train?"],
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_likewise(key: str, value: object, parts: list[str]) -> None:
    answer = refusal(None, {key: value})
    assert [part for part in parts if part not in answer] == [], answer


@pytest.mark.parametrize("depth", [400, 1_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a: ", "}"), ("? ", ""), ("- ", "")])
def test_nesting_that_python_cannot_follow_is_answered(
    opening: str, closing: str, depth: int, written: Callable[[str], Path]
) -> None:
    text = opening * depth + "1" + closing * depth
    told = "run.yaml is nested too deeply"
    if depth < 1_000:  # as deep as Python's own recursion goes
        told = "run.yaml"
    assert told in refusal(written(text))
    assert refusal(None, {"training.devices": "[" + text}).startswith("training.devices (command line) expects text")


@pytest.mark.parametrize("key", ["training.steps", "training.seed", "model.d_model", "training.clip", "decoding.beam"])
@pytest.mark.parametrize("digits", [25, 400, 5_000])
def test_a_number_too_large_for_anything_is_refused(key: str, digits: int, written: Callable[[str], Path]) -> None:
    section, _, name = key.partition(".")
    if (key, digits) == ("training.clip", 25):
        return  # a large clip only clips nothing
    for answer in (refusal(written(f"{section}: {{{name}: {'9' * digits}}}")), refusal(None, {key: "9" * digits})):
        assert answer.startswith(f"{key} (")
        assert "number" in answer
        assert len(answer) < 300


def test_the_largest_whole_number_is_told() -> None:
    assert load_config(None, {"training.steps": 2**31 - 1}).training.steps == 2**31 - 1
    assert "a whole number from 0 up; got '2147483648': it is above 2,147,483,647" in refusal(
        None, {"training.steps": 2**31}
    )
    assert load_config(None, {"training.seed": 2**63 - 1}).training.seed == 2**63 - 1


def test_a_timeout_is_one_that_processes_can_wait() -> None:
    assert "layout.timeout" in refusal(None, {"layout.timeout": "1e300"})


@pytest.mark.parametrize("key", ["run", "data.path", "data.train", "data.source", "model.preset", "training.devices"])
@pytest.mark.parametrize(
    ("text", "spelled", "reason"),
    [
        ("a\0b", r"a\0b", "it contains a NUL"),
        ("caf\udce9", r"caf\udce9", "it is not Unicode"),
        ("a\x1b[2J", r"a\x1b[2J", r"it contains the control character '\x1b'"),
    ],
)
def test_text_that_no_file_can_be_called_is_refused(
    key: str, text: str, spelled: str, reason: str, written: Callable[[str], Path]
) -> None:
    section, _, name = key.rpartition(".")
    yaml = f'"{spelled}"'.replace("\\udce9", "\\uDCE9")
    path = written(f"{section}: {{{name}: {yaml}}}" if section else f"{name}: {yaml}")
    for answer in (refusal(path), refusal(None, {key: text})):
        assert answer.startswith(f"{key} (")
        assert answer.endswith(f": {reason}")


def test_one_file_on_the_command_line_is_called_what_it_is_called() -> None:
    for name in ("a #b.tsv", "a: b.tsv", "'a'.tsv", "*.tsv", "1.tsv"):
        assert load_config(None, {"data.train": name}).data.train == (name,)
    assert load_config(None, {"data.train": "[a.en, a.de]"}).data.train == ("a.en", "a.de")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in refusal(tmp_path / "none.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"run: \xff\xfe")
    assert "run.yaml" in refusal(tmp_path / "run.yaml")


def test_every_number_has_a_range_and_every_limit_a_setting() -> None:
    settings = SCHEMA.settings.items()
    numbers = {key for key, setting in settings if "int" in str(setting.kinds) or "float" in str(setting.kinds)}
    assert {key for key, setting in settings if setting.range is not None} == numbers
    texts = {str, tuple[str, ...]}
    assert all(texts & set(setting.kinds) for _, setting in settings if setting.choices)


def test_the_defaults_are_themselves_valid(tmp_path: Path) -> None:
    save_config(RunConfig(), tmp_path / "config.yaml")
    assert "!" not in (tmp_path / "config.yaml").read_text()  # tuples are plain lists, without a tag of Python's
    assert load_config(tmp_path / "config.yaml") == RunConfig()
