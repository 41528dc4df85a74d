"""Validation and test data of several corpora: a figure for each, and one for all of them together."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import seqpar
from recipes.translation.commands import main
from recipes.translation.commands.training import next_steps
from recipes.translation.data.builtin_corpus import pairs as builtin_pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import load_facts, load_translator
from recipes.translation.run_folder.resume import begin
from recipes.translation.run_folder.translator import Translator, fill_model
from recipes.translation.scores import evaluate
from recipes.translation.scores.compare import compare
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.text.pair import Pair
from recipes.translation.train import train
from recipes.translation.training import validation
from recipes.translation.training.validation import Validation
from recipes.translation.translating.translate import Translation, translate
from tests.recipes.plain_scores import plain_sums
from tests.recipes.saved import load_weights, validations_of
from tests.recipes.scores.scored import score
from tests.recipes.tiny import tiny, write_pairs

FORWARD = {"train": ["train.en", "train.de"]}
BACK = {"train": ["train.de", "train.en"], "source": "de", "target": "en", "tag": "<back>"}
FORWARD_HELD_OUT = {"valid": ["a.en", "a.de"], "test": ["c.en", "c.de"]}
BACK_HELD_OUT = {"valid": ["b.de", "b.en"], "test": ["d.de", "d.en"]}


def given(folder: Path, corpora: Any, **changes: Any) -> RunConfig:
    return tiny(
        folder / "run",
        {
            "data.path": str(folder.parent),
            "data.language_tags": True,
            "corpora": corpora,
            "training.precision": "float64",
            "training.steps": 2,
            "training.validate_every": 1,
            "training.validate_bleu": 4,
            "training.label_smoothing": 0.2,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of both directions, whose validation sets are unequal."""
    folder = tmp_path_factory.mktemp("several")
    write_pairs(folder, {"train": (0, 120), "a": (120, 131), "b": (131, 136), "c": (136, 142), "d": (142, 150)})
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[RunConfig, str]:
    """A run that validates in both directions, and what it prints."""
    corpora = {"forward": {**FORWARD, **FORWARD_HELD_OUT}, "back": {**BACK, **BACK_HELD_OUT}}
    config = given(folder / "both", corpora)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train(config)
    return config, said.getvalue()


@pytest.fixture(scope="module")
def both(trained: tuple[RunConfig, str]) -> RunConfig:
    return trained[0]


@pytest.fixture(scope="module")
def forward(folder: Path) -> RunConfig:
    """The same run with the validation and test data of one corpus alone."""
    config = given(folder / "forward", {"forward": {**FORWARD, **FORWARD_HELD_OUT}, "back": BACK})
    train(config)
    return config


def validations(config: RunConfig) -> list[dict[str, Any]]:
    return validations_of(Path(config.run))


def figures(record: dict[str, Any], suffix: str = "") -> list[Any]:
    return [record[f"valid_{name}{suffix}"] for name in METRICS]


def test_each_corpus_has_the_figures_of_a_run_with_its_validation_data_alone(
    both: RunConfig, forward: RunConfig, folder: Path
) -> None:
    back = given(folder / "back", {"forward": FORWARD, "back": {**BACK, **BACK_HELD_OUT}})
    train(back)
    for config, suffix in ((forward, ".forward"), (back, ".back")):
        assert len(validations(config)) == 2
        for alone, together in zip(validations(config), validations(both), strict=True):
            assert figures(alone) == figures(together, suffix)
            assert list(alone) == ["step", *(f"valid_{name}" for name in METRICS)]
    assert figures(validations(both)[0], ".forward") != figures(validations(both)[0], ".back")


def test_the_only_corpus_with_validation_data_gives_what_the_section_data_gives(
    forward: RunConfig, folder: Path
) -> None:
    data = given(folder / "data", {"forward": FORWARD, "back": BACK}, **{"data.valid": ["a.en", "a.de"]})
    train(data)
    written = [(Path(config.run) / "metrics.jsonl").read_bytes() for config in (forward, data)]
    assert written[0] == written[1]
    assert load_corpus(forward).fingerprint == load_corpus(data).fingerprint


def test_figures_together_are_those_of_all_tokens_and_bleu_is_the_mean(both: RunConfig) -> None:
    last = Path(both.run) / "last"
    model = load_translator(last).model.double()
    fill_model(model, load_weights(last), last)
    record = validations(both)[-1]
    corpus = load_corpus(both)
    sums = np.stack([plain_sums(model, valid.batches, smoothing=0.2) for valid in corpus.valid])
    for suffix, (loss, nll, correct, tokens) in ((".forward", sums[0]), (".back", sums[1]), ("", sums.sum(0))):
        found = [record[f"valid_{name}{suffix}"] for name in ("loss", "perplexity", "accuracy")]
        expected = [loss / tokens, math.exp(nll / tokens), 100 * correct / tokens]
        assert found == pytest.approx(expected, rel=1e-12)
    assert sums[0, 3] != sums[1, 3]


def test_bleu_and_chrf_together_are_the_means_of_the_corpora(both: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Translations that lack the last words of their references, more of them in one language."""
    translator = load_translator(Path(both.run) / "last")
    corpus = load_corpus(both)
    short = {
        pair.source: " ".join(pair.target.split()[: -1 - number])
        for number, valid in enumerate(corpus.valid)
        for pair in valid.pairs
    }
    monkeypatch.setattr(validation, "translate", lambda _, sentences, *__: [short[each] for each in sentences])
    one = torch.tensor(1)
    loss = seqpar.TokenLoss(one.float(), one, nll=one.float(), correct=one)
    found = validation.validate(translator, corpus.valid, lambda _: loss, 1)
    parts = []
    for valid in corpus.valid:
        texts = [short[pair.source] for pair in valid.pairs[:4]]
        parts.append(score(texts, [pair.target for pair in valid.pairs[:4]]))
    assert [(part["bleu"], part["chrf"]) for part in found.parts.values()] == [
        (part["bleu"], part["chrf"]) for part in parts
    ]
    for name, metric in METRICS.items():
        own = [part.values[name] for part in found.parts.values()]
        if metric.of_translations:
            assert found[name] == sum(own) / 2
        else:
            assert found[name] == metric.of_loss(loss + loss)
    assert parts[0]["bleu"] != parts[1]["bleu"]


def test_validations_translate_greedily_whatever_the_beam_of_the_run_is(
    both: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = load_translator(Path(both.run) / "last")
    wide = replace(both, decoding=replace(both.decoding, beam=5))
    asked = []

    def noted(greedy: Translator, *given: Any) -> Any:
        asked.append(greedy.config.decoding)
        return translate(greedy, *given)

    monkeypatch.setattr(validation, "translate", noted)
    one = torch.tensor(1)
    loss = seqpar.TokenLoss(one.float(), one, nll=one.float(), correct=one)
    validation.validate(replace(translator, config=wide), load_corpus(both).valid, lambda _: loss, 1)
    assert asked == [replace(both.decoding, beam=1)] * 2


def test_sentences_are_translated_under_the_tags_of_their_corpus(both: RunConfig) -> None:
    translator = load_translator(Path(both.run) / "last")
    newest = json.loads((Path(both.run) / "validation.json").read_text())
    prefixes = [" ".join(source.split()[:2]) for source in newest["sources"]]
    assert [prefix.split()[0] for prefix in prefixes[:4]] == ["<2de>"] * 4
    assert prefixes[4:] == ["<2en> <back>"] * 4
    assert newest["translations"] == translate(translator, newest["sources"])
    sets = load_corpus(both).valid
    for valid in sets:
        read = {" ".join(text.split()[: len(valid.held_out.tags)]) for text in decoded(both, valid.batches.sources)}
        assert read == {" ".join(valid.held_out.tags)}
    empty = sets[1].held_out
    assert empty.tagged_pairs([Pair(" ", "x")]) == [Pair(" ", "x")]


def decoded(config: RunConfig, ids: Any) -> list[str]:
    translator = load_translator(Path(config.run) / "last")
    return translator.source.decode([list(each) for each in ids])


def test_a_record_of_several_validations_comes_back_from_the_model_s_folder(both: RunConfig) -> None:
    facts = load_facts(Path(both.run) / "last")
    assert facts == validations(both)[-1]
    found = Validation.from_dict(facts)
    assert list(found.parts) == ["forward", "back"]
    assert found.as_dict() == facts


def test_each_corpus_has_a_line_under_that_of_the_validation(trained: tuple[RunConfig, str]) -> None:
    text = trained[1]
    for name in ("forward", "back"):
        assert text.count(f"[valid]   {name}: loss ") == 2
    assert text.count("[valid] step") == 2


@pytest.fixture(scope="module")
def evaluated(both: RunConfig) -> str:
    """What the command prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["evaluate", "--run", both.run]) == 0
    return said.getvalue()


def test_evaluate_scores_each_test_set_by_itself_and_their_mean(both: RunConfig, evaluated: str) -> None:
    run = Path(both.run)
    translator = load_translator(run / "best")
    found = []
    for each in Corpora(both).held_out("test"):
        pairs = each.pairs
        texts = (run / f"test.{each.name}.translations.txt").read_text().splitlines()
        tagged = [" ".join((*each.tags, pair.source)) for pair in pairs]
        assert texts == translate(translator, tagged)
        expected = score(texts, [pair.target for pair in pairs])
        record = json.loads((run / f"test.{each.name}.scores.json").read_text())
        assert record["bleu"] == expected["bleu"]
        (row,) = [line for line in evaluated.splitlines() if line.split()[:1] == [f"test.{each.name}"]]
        assert row.split()[1] == str(len(pairs))
        assert f"{expected['chrf']:6.2f}" in row
        found.append(expected)
        assert f"BLEU of test.{each.name}: {expected['bleu_signature']}" in evaluated
    (mean,) = [line for line in evaluated.splitlines() if line.split()[:1] == ["mean"]]
    assert mean.split()[1] == str(6 + 8)
    assert f"{np.mean([each['chrf'] for each in found]):6.2f}" in mean
    assert f"{np.mean([each['ter'] for each in found]):6.2f}" in mean
    assert not (run / "test.scores.json").exists()


def test_test_sets_are_translated_under_their_tags_and_scored_in_their_languages(
    both: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def repeated(_: Any, sentences: list[str], *__: Any) -> list[Translation]:
        seen.extend(sentences)
        return [Translation(sentence, 0.0, 0.0) for sentence in sentences]

    monkeypatch.setattr(evaluate, "best", repeated)
    forward, back = Corpora(both).held_out("test")
    chinese = replace(forward, name="zh", data=replace(forward.data, target="zh"), tags=("<2zh>",))
    translator = load_translator(Path(both.run) / "last")
    found = evaluate.evaluate_each(translator, [forward, back, chinese])
    assert [" ".join(text.split()[:2]) for text in seen[6:14]] == ["<2en> <back>"] * 8
    assert {text.split()[0] for text in seen[:6]} == {"<2de>"}
    assert {text.split()[0] for text in seen[14:]} == {"<2zh>"}
    assert [text.removeprefix("<2en> <back> ") for text in seen[6:14]] == [pair.source for pair in back.pairs]
    assert found[1].pairs == back.pairs
    assert ["|tok:zh|" in each.scores["bleu_signature"] for each in found] == [False, False, True]


def test_the_only_test_set_keeps_its_name(forward: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--run", forward.run]) == 0
    assert (Path(forward.run) / "test.scores.json").exists()
    assert "exact match" in capsys.readouterr().out


def test_a_comparison_of_runs_with_several_test_sets_names_the_files_to_compare(both: RunConfig) -> None:
    with pytest.raises(DataError, match=r"test data of several corpora \(test\.forward, test\.back\).*name the files"):
        compare([both.run, both.run])


def refused(folder: Path, corpora: Any, **changes: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        load_corpus(given(folder / "refused", corpora, **changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


VALID = ["a.en", "a.de"]


@pytest.mark.parametrize(
    ("corpora", "changes", "message"),
    [
        ({"a": FORWARD}, {}, "there is no valid data: name its files as data.valid, or as valid of one of the corpora"),
        (
            {"a": {**FORWARD, "valid": VALID}},
            {"data.valid": VALID},
            "data.valid (a.en a.de) and corpora.a.valid are both given",
        ),
        ({"a": {"valid": VALID}}, {}, "no corpus of corpora (a) has train"),
        ({"a": FORWARD, "b": {"valid": VALID, "weight": 2}}, {}, "corpora.b.weight is 2, but corpora.b has no train"),
        ({"a/b": {**FORWARD, "valid": VALID}}, {}, "corpora has the name 'a/b', which would become part of file names"),
        ({"a": {**FORWARD, "valid": ["a.en"]}}, {}, "corpora.a: data.valid takes two files"),
        ({"a": {**FORWARD, "valid": ["a.en", "x.de"]}}, {}, "corpora.a: there is no file "),
        ({"a": {**FORWARD, "valid": VALID, "test": ["x.en", "c.de"]}}, {}, "corpora.a: there is no file "),
        ({"a": {**FORWARD, "valid": "a.tsv"}}, {}, "data.format is text, but data.valid names a.tsv"),
        ({"a": FORWARD, "b": {"valid": "a"}}, {}, "corpora.b.valid (a) does not show its format"),
    ],
)
def test_a_mistake_in_held_out_data_is_one_line(corpora: Any, changes: Any, message: str, folder: Path) -> None:
    assert message in refused(folder, corpora, **changes)


def test_a_corpus_may_have_validation_data_alone(folder: Path) -> None:
    corpora = {"a": FORWARD, "new": {"valid": ["b.de", "b.en"], "source": "de", "target": "en"}}
    corpus = load_corpus(given(folder / "alone", corpora))
    assert len(corpus.train.sources) == 120
    (valid,) = corpus.valid
    assert (valid.held_out.name, len(valid.pairs)) == ("new", 5)
    assert valid.pairs[0].source.startswith("<2en> ")


def test_corpora_without_test_data_are_not_tested_on_the_built_in_corpus(folder: Path) -> None:
    config = given(folder / "untested", {"a": {**FORWARD, "valid": VALID}})
    with pytest.raises(DataError, match=r"^there is no test data: .*; without it, evaluate --split valid "):
        Corpora(config).held_out("test")
    assert "--split valid" in next_steps(Corpora(config))
    with_test = given(folder / "untested", {"a": {**FORWARD, **FORWARD_HELD_OUT}})
    assert "--split valid" not in next_steps(Corpora(with_test))


def test_the_test_files_of_a_corpus_may_change_on_resuming_and_the_others_may_not(
    both: RunConfig, folder: Path
) -> None:
    corpora = {"forward": {**FORWARD, **FORWARD_HELD_OUT}, "back": {**BACK, **BACK_HELD_OUT}}
    for forward in ({"test": ["d.en", "d.de"]}, {"test": []}):
        changed = given(folder / "both", {**corpora, "forward": {**corpora["forward"], **forward}})
        with pytest.raises(ConfigError, match=r"^corpora\.forward\.test is .* has finished its 2 steps, and"):
            begin(changed, False)
        assert begin(replace(changed, training=replace(changed.training, steps=3)), False) is not None
    for forward in ({"valid": ["d.en", "d.de"]}, {"train": ["d.en", "d.de"]}):
        changed = given(folder / "both", {**corpora, "forward": {**corpora["forward"], **forward}})
        with pytest.raises(ConfigError, match=r"^corpora\.forward is .* was trained with .* --fresh$"):
            begin(changed, False)


@pytest.mark.parametrize(("translated", "refused"), [(20, False), (21, True), (50, True)])
def test_a_validation_sentence_with_the_tag_of_no_language_is_refused_before_the_first_step(
    translated: int, refused: bool, tmp_path: Path
) -> None:
    sides = [[pair.source for pair in builtin_pairs(20, 3)], [pair.target for pair in builtin_pairs(20, 3)]]
    for name, lines, last in zip("ab", sides, ["<2nd> edition", "2. Auflage"], strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in [*lines, last]))
        (tmp_path / f"train.{name}").write_text("".join(f"{line}\n" for line in [*lines, "7"]))
    train_files, files = ([str(tmp_path / f"{name}{side}") for side in "ab"] for name in ("train.", ""))
    given = {"data.train": train_files, "data.valid": files, "data.language_tags": True, "subwords.vocab_size": 320}
    config = tiny(tmp_path / "run", {**given, "training.validate_bleu": translated, "training.validate_every": 1})
    wrong = pytest.raises(DataError, match=r"^data\.valid: .* pair 21 begins with <2nd>")
    with wrong if refused else contextlib.nullcontext():
        train(config)
    assert (tmp_path / "run" / "last").exists() is not refused
