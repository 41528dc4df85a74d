"""`evaluate` as a person meets it: a model on its test set or on files, or files alone."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.files.atomic_folder import sha256
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.made_from import weights_digest
from recipes.translation.scores.evaluate import Evaluation
from recipes.translation.scores.scores import scores_in_words
from recipes.translation.translating.translate import best, translate
from tests.recipes.command_line import SENTENCE, refusal
from tests.recipes.random_translator import random_translator
from tests.recipes.scores.scored import score


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights."""
    folder = tmp_path_factory.mktemp("evaluate_command")
    save_model(folder / "best", random_translator(folder), {"step": 1})
    return folder


def test_evaluate_prints_signed_scores_and_writes_them(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["evaluate", "--run", str(run), "--split", "valid", "--tokenize", "intl"]) == 0
    text = capsys.readouterr().out
    for part in ("BLEU ", "BLEU, lower-cased", "chrF", "TER", "exact match", "|tok:intl|", "case:lc"):
        assert part in text
    assert (run / "valid.scores.json").exists()


def test_scores_that_cannot_be_written_leave_the_earlier_evaluation_and_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(run, tmp_path / "run")
    (own / "valid.translations.txt").write_text("earlier\n")
    before = {path.name for path in own.iterdir()}
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if "valid.scores.json" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert main(["evaluate", "--run", str(own), "--split", "valid", "--beam", "1"]) == 2
    assert f"{own / 'valid.scores.json'}: cannot be written: No space left" in capsys.readouterr().err
    assert (own / "valid.translations.txt").read_text() == "earlier\n"
    assert {path.name for path in own.iterdir()} == before


def evaluation(texts: list[str], digests: list[str] | None = None) -> Evaluation:
    made = Evaluation("news", [], texts, [], digests=digests or [])
    object.__setattr__(made, "scores", score(["a b c d"], ["a b c d"]))
    return made


def test_results_of_two_processes_at_once_are_those_of_one(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def write(number: int) -> None:
        made = evaluation([str(number)] * 2_000, [str(number)])
        for _ in range(100):
            both.wait(20)
            made.write(tmp_path)
            both.wait(20)
            scores = json.loads((tmp_path / "news.scores.json").read_text())
            assert (tmp_path / "news.translations.txt").read_text() == f"{scores['weights'][0]}\n" * 2_000

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(write, number) for number in (1, 2)]:
            done.result()


def test_results_are_written_whoever_has_locked_the_folder(tmp_path: Path) -> None:
    """As `flock RUN python -m recipes.translation evaluate` does, for another evaluation to wait."""
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(evaluation(["a"]).write, tmp_path)
            try:
                writing.result(20)
            finally:
                fcntl.flock(folder, fcntl.LOCK_UN)
    finally:
        os.close(folder)
    assert (tmp_path / "news.translations.txt").read_text() == "a\n"


@pytest.mark.faults
def test_the_next_evaluation_leaves_nothing_of_one_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    killed = (
        "import os; from pathlib import Path; from tests.recipes.commands.test_evaluate_command import evaluation; "
        f"os.replace = lambda *_: os.kill(os.getpid(), 9); evaluation(['a b'] * 9).write(Path({str(tmp_path)!r}))"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir())
    evaluation(["a"]).write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"news.translations.txt", "news.scores.json"}
    assert (tmp_path / "news.translations.txt").read_text() == "a\n"


def test_results_of_a_file_are_not_replaced_by_those_of_another_with_its_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dev").write_text(f"{SENTENCE} {folder}\n")
        file = str(tmp_path / folder / "dev")
        words[folder] = ["evaluate", "--run", str(run), "--sources", file, "--references", file, "--beam", "1"]
    assert main(words["a"]) == 0
    before = (run / "dev.scores.json").read_text()
    capsys.readouterr()
    assert refusal(capsys, *words["b"]) == (
        f"error: --sources {tmp_path / 'b' / 'dev'} would replace {run / 'dev.scores.json'}, the scores of "
        f"{tmp_path / 'a' / 'dev'}: rename the file, or move those results away"
    )
    assert (run / "dev.scores.json").read_text() == before
    with (tmp_path / "a" / "dev").open("a") as file:  # a correction
        file.write("Two trains.\n")
    assert main(words["a"]) == 0
    shutil.copy(tmp_path / "a" / "dev", tmp_path / "dev")  # the same sentences elsewhere
    moved = ["--sources", str(tmp_path / "dev"), "--references", str(tmp_path / "dev"), "--beam", "1"]
    assert main(["evaluate", "--run", str(run), *moved]) == 0
    assert main([*words["b"], "--ensemble", str(run)]) == 0
    capsys.readouterr()
    assert "dev.ensemble.scores.json, the scores of " in refusal(capsys, *words["a"], "--ensemble", str(run))


def test_a_test_set_of_pipes_is_known_by_its_sentences(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of `--sources <(head -100 news.en)` in a shell: a pipe can be read once only."""

    def evaluated(source: str) -> int:
        names = {side: tmp_path / side for side in ("sources", "references")}
        for name in names.values():
            os.mkfifo(name)
        feeders = [threading.Thread(target=name.write_text, args=(f"{source}\n",)) for name in names.values()]
        for feeder in feeders:
            feeder.start()
        files = [word for side, name in names.items() for word in (f"--{side}", str(name))]
        try:
            return main(["evaluate", "--run", str(run), *files, "--beam", "1"])
        finally:
            for name, feeder in zip(names.values(), feeders, strict=True):
                feeder.join(20)
                name.unlink()

    assert evaluated(SENTENCE) == 0
    noted = json.loads((run / "sources.scores.json").read_text())
    (tmp_path / "text").write_text(f"{SENTENCE}\n")
    for side in ("sources", "references"):
        assert noted[side] == {"file": str(tmp_path / side), "sha256": sha256(tmp_path / "text")}
    record = {**noted, "sources": {**noted["sources"], "file": "/proc/1/fd/pipe:[1]"}}
    (run / "sources.scores.json").write_text(json.dumps(record))  # a pipe of another process
    assert evaluated(SENTENCE) == 0
    (run / "sources.scores.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert evaluated("Two trains.") == 2
    assert "sources.scores.json, the scores of /proc/1/fd/pipe:[1]: rename the file" in capsys.readouterr().err


def test_an_ensemble_is_evaluated_under_a_name_of_its_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = random_translator(tmp_path / "other", seed=2)
    save_model(tmp_path / "other" / "best", other, {"step": 1})
    (tmp_path / "news.en").write_text(f"{SENTENCE}\nThe number is six.\n")
    (tmp_path / "news.de").write_text("Der Zug.\nDie Zahl ist sechs.\n")
    files = ["--sources", str(tmp_path / "news.en"), "--references", str(tmp_path / "news.de")]
    assert main(["evaluate", "--run", str(run), *files]) == 0
    alone = (run / "news.en.translations.txt").read_text()
    assert main(["evaluate", "--run", str(run), "--ensemble", str(tmp_path / "other"), *files]) == 0
    first = load_translator(run / "best")
    second = load_translator(tmp_path / "other" / "best")
    texts = translate(replace(first, others=(second.model,)), [SENTENCE, "The number is six."])
    found = (run / "news.en.ensemble.translations.txt").read_text()
    assert found == "".join(f"{text}\n" for text in texts)
    assert found != alone
    assert (run / "news.en.translations.txt").read_text() == alone
    capsys.readouterr()
    words = ["--hypotheses", files[1], "--references", files[3], "--ensemble", str(run)]
    assert "--ensemble is for a model, but --hypotheses names finished translations" in refusal(
        capsys, "evaluate", *words
    )


def test_files_of_equal_length_are_scored_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("one two three four\n\n")
    words = ["--hypotheses", str(tmp_path / "a"), "--references", str(tmp_path / "a")]
    for tokenize in ([], ["--tokenize", "auto"]):
        assert main(["evaluate", *words, *tokenize]) == 0
        assert "100.00  [100.00, 100.00]  of 2 sentences" in capsys.readouterr().out


def test_a_model_is_evaluated_on_any_pair_of_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wmt.en").write_text(f"{SENTENCE}\n\nThe number is six.\n")
    (tmp_path / "wmt.de").write_text("Der Zug.\n\nDie Zahl ist sechs.\n")
    files = ["--sources", str(tmp_path / "wmt.en"), "--references", str(tmp_path / "wmt.de")]
    assert main(["evaluate", "--run", str(run), *files]) == 0
    printed = capsys.readouterr().out
    translator = load_translator(run / "best")
    texts = translate(translator, [SENTENCE, "", "The number is six."])
    assert (run / "wmt.en.translations.txt").read_text() == "".join(f"{text}\n" for text in texts)
    expected = score(texts, ["Der Zug.", "", "Die Zahl ist sechs."])
    unfinished = sum(not one.finished for one in best(translator, [SENTENCE, "", "The number is six."]))
    assert unfinished == 1
    assert json.loads((run / "wmt.en.scores.json").read_text()) == {
        **expected,
        "unfinished": unfinished,
        "intervals": {name: list(bounds) for name, bounds in expected["intervals"].items()},
        "weights": [weights_digest(run / "best")],
        "sources": {"file": str(tmp_path / "wmt.en"), "sha256": sha256(tmp_path / "wmt.en")},
        "references": {"file": str(tmp_path / "wmt.de"), "sha256": sha256(tmp_path / "wmt.de")},
    }
    assert scores_in_words(expected) in printed


@pytest.mark.parametrize(
    ("option", "texts", "said"),
    [
        ("--hypotheses", ("a\nb\nc\n", "a\nb\n"), ["3 hypotheses but 2 references"]),
        ("--sources", ("one\ntwo\n", "eins\n"), ["a has 2 lines, ", "b has 1: the two must be aligned"]),
        ("--sources", ("", ""), ["a is empty; evaluate needs sentences"]),
    ],
)
def test_files_of_unequal_length_or_without_a_sentence_are_refused(
    option: str, texts: tuple[str, str], said: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / name).write_text(text)
    model = ["--run", str(run)] if option == "--sources" else []
    line = refusal(capsys, "evaluate", *model, option, str(tmp_path / "a"), "--references", str(tmp_path / "b"))
    assert all(part in line for part in said)


@pytest.mark.parametrize("options", [[], ["--beam", "3"], ["--sample", "2"]])
def test_a_model_whose_weights_are_nan_is_refused_in_one_line(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    translator = random_translator(tmp_path)
    with torch.no_grad():
        translator.model.generator.bias[20] = math.nan
    save_model(tmp_path / "best", translator, {"step": 1})
    message = refusal(capsys, "translate", "--run", str(tmp_path), *options, SENTENCE)
    assert "model.safetensors: generator.bias has values that are nan or inf, so the model cannot translate" in message
