"""`compare` puts systems of one test set side by side, and refuses any others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.made_from import weights_digest
from recipes.translation.scores.compare import compare, compare_metrics
from recipes.translation.scores.scores import measure
from recipes.translation.train import train
from tests.recipes.command_line import refusal
from tests.recipes.random_translator import random_translator
from tests.recipes.scores.examples import damaged, references
from tests.recipes.tiny import tiny

REFERENCES = references(30)


def lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """References, a baseline and two other systems."""
    texts = [REFERENCES, *(damaged(REFERENCES, share, seed) for seed, share in enumerate((0.3, 0.25, 0.1)))]
    return [lines(tmp_path / name, some) for name, some in zip(("r", "base", "b", "c"), texts, strict=True)]


def test_the_split_of_files_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    reference, *systems = files
    told = refusal(capsys, "compare", "--references", reference, *systems, "--split", "valid")
    assert "--split selects data of a run, but only files were given; leave it out" in told


def test_each_system_is_compared_with_the_first(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    reference, *systems = files
    assert main(["compare", "--references", reference, *systems]) == 0
    printed = capsys.readouterr().out
    texts = [Path(name).read_text().splitlines() for name in systems]
    kept = ("bleu", "chrf", "ter")
    of = [[one for one in measure(some, REFERENCES) if one.name in kept] for some in texts]
    for system, name in enumerate(systems[1:], start=1):
        rows = [line for line in printed.splitlines() if line.startswith(f"  {name} ")]
        for row, found in zip(rows, compare_metrics(of[0], of[system]), strict=True):
            words = row.replace("[", " ").replace("]", " ").replace(",", " ").split()
            expected = [found.score, *found.interval, found.difference, *found.difference_interval]
            assert words[1:7] == [f"{value:.2f}" if i != 3 else f"{value:+.2f}" for i, value in enumerate(expected)]
            assert words[7:] == [f"{found.p_bootstrap:.4f}", f"{found.p_randomisation:.4f}"]
    for part in ("30 sentences", f"baseline is {systems[0]}", of[0][0].signature, "seed 12345", "TER (less is better)"):
        assert part in printed


def test_tokenised_text_is_compared_by_multi_bleu_too(files: list[str]) -> None:
    reference, *systems = files
    found = compare(systems, Path(reference), tokenize="none")
    assert [metric.measured.name for metric in found.metrics] == ["bleu", "multi_bleu_lowercase", "chrf", "ter"]
    assert "|tok:none|" in found.metrics[0].measured.signature


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["base"], "name at least two systems, the baseline first; got 1"),
        (
            ["base", "b"],
            "files of translations do not say which test set they belong to: name its references with --references",
        ),
        (["--references", "r", "base", "nowhere"], "there is no file or run nowhere"),
        (["--references", "r", "base", "short"], "short has 29 translations, but the test set has 30 sentences"),
        (["--references", "r", "base", "."], ". is not a run: it has none of best, last, averaged"),
        (["--references", "r", "base", "b", "--tokenize", "13b"], "no tokeniser '13b'"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    words: list[str], line: str, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(files[0]).parent
    lines(folder / "short", REFERENCES[1:])
    monkeypatch.chdir(folder)
    assert line in refusal(capsys, "compare", *words)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has been evaluated on a test set of eight pairs."""
    folder = tmp_path_factory.mktemp("compare")
    train(tiny(folder / "run"))
    assert main(["evaluate", "--run", str(folder / "run")]) == 0
    return folder / "run"


def test_runs_are_compared_by_what_evaluate_wrote(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [pair.target for pair in load_pairs(tiny(run).data, "test")]
    file = lines(tmp_path / "oracle", expected)
    found = compare([str(run), file])
    texts = (run / "test.translations.txt").read_text().split("\n")[:-1]
    assert found.metrics[0].measured.score == measure(texts, expected)[0].score
    assert found.metrics[0].comparisons[0].score == pytest.approx(100)
    other = lines(tmp_path / "others", ["something else", *expected[1:]])
    line = refusal(capsys, "compare", str(run), file, "--references", other)
    assert "the test sets differ: reference 1 of" in line
    assert "is 'something else'" in line
    fewer = lines(tmp_path / "fewer", expected[1:])
    assert "has 24 references, that of" in refusal(capsys, "compare", str(run), file, "--references", fewer)


def test_a_run_in_lower_case_takes_its_references_as_they_are_written(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {"subwords.lowercase": True})
    train(config)
    assert main(["evaluate", "--run", config.run]) == 0
    file = lines(tmp_path / "references", [pair.target for pair in load_pairs(config.data, "test")])
    found = compare([config.run, file], Path(file))
    assert found.metrics[0].measured.score == compare([config.run, file]).metrics[0].measured.score
    assert [metric.comparisons[0].score for metric in found.metrics[:2]] == pytest.approx([100, 100])


def test_translations_of_an_older_model_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "a run"
    shutil.copytree(run, other)
    for path in other.rglob("*"):  # times say nothing: copying sets them in any order
        os.utime(path, (1, 1) if path.suffix == ".txt" else None)
    compare([str(other), str(run)])
    weights = json.loads((other / "test.scores.json").read_text())
    for changed in ({**weights, "weights": ["0" * 64]}, {name: weights[name] for name in weights if name != "weights"}):
        (other / "test.scores.json").write_text(json.dumps(changed))
        line = refusal(capsys, "compare", str(run), str(other))
        assert f"{other / 'test.translations.txt'} was not translated by any model that {other} has now" in line
        assert f"evaluate --run '{other}' --split test" in line


def test_translations_of_other_sentences_than_the_run_has_now_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"en": ["the dog and the cat", "one train and two"], "de": ["der Hund, die Katze", "ein Zug; zwei"]}
    for name, some in texts.items():
        lines(tmp_path / name, some)
    files = {f"data.{split}": ["en", "de"] for split in ("train", "valid", "test")}
    run = str(tmp_path / "run")
    train(
        tiny(Path(run), {**files, "data.path": str(tmp_path), "subwords.vocab_size": 285, "training.steps": 1}),
        insist=True,
    )
    assert main(["evaluate", "--run", run]) == 0
    shutil.copytree(run, tmp_path / "again")
    lines(tmp_path / "de", [texts["de"][0], "ein Zug und zwei"])  # a correction: both are scored by it
    assert str(compare([run, str(tmp_path / "again")]))
    for name, some in texts.items():
        lines(tmp_path / name, some[::-1])
    assert main(["evaluate", "--run", str(tmp_path / "again")]) == 0
    capsys.readouterr()
    assert refusal(capsys, "compare", str(tmp_path / "again"), run) == (
        f"error: {run}/test.translations.txt has translations of sentences other than those data.test has now: "
        f"evaluate --run {run} --split test, or name the file itself"
    )


def test_a_model_other_than_the_best_is_named(run: Path, tmp_path: Path) -> None:
    """The scores of a run are those of its last evaluation, whatever its --checkpoint was."""
    shutil.copytree(run, tmp_path / "run")
    save_model(tmp_path / "run" / "averaged", random_translator(tmp_path), {"step": 1})
    scores = tmp_path / "run" / "test.scores.json"
    weights = [weights_digest(tmp_path / "run" / "averaged")]
    scores.write_text(json.dumps({**json.loads(scores.read_text()), "weights": weights}))
    assert list(compare([str(run), str(tmp_path / "run")]).names) == [str(run), f"{tmp_path / 'run'} (averaged)"]


def test_a_run_that_was_not_evaluated_is_told_how(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "compare", str(run), str(run), "--split", "valid")
    assert f"make it with evaluate --run {run} --split valid" in line


def test_runs_are_compared_by_the_tokeniser_of_their_corpus(tmp_path: Path) -> None:
    """As evaluate scores them: data.target is a default of translate, and the test set may be of another language."""
    texts = ["der Hund, die Katze", "ein Zug; zwei"]
    lines(tmp_path / "en", ["the dog and the cat", "one train and two"])
    lines(tmp_path / "de", texts)
    corpora = {"b": {"train": ["en", "de"], "target": "de", "valid": ["en", "de"], "test": ["en", "de"]}}
    changes = {"data.path": str(tmp_path), "corpora": corpora, "data.target": "zh", "training.steps": 1}
    systems = []
    for name in ("one", "other"):
        train(tiny(tmp_path / name, {**changes, "subwords.vocab_size": 285}), insist=True)
        assert main(["evaluate", "--run", str(tmp_path / name)]) == 0
        systems.append(str(tmp_path / name))
    assert "tok:13a" in str(compare(systems))
    assert "tok:zh" in str(compare(systems, tokenize="zh"))
