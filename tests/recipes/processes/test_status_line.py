"""How far the work is: a line that is redrawn on a terminal, and plain lines in a pipe; stdout has results alone."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.processes.ranks import ALONE
from recipes.translation.processes.status_line import SentenceProgress
from recipes.translation.run_folder.checkpoint import TrainingState, load_translator, save_model
from recipes.translation.text.subwords import EOS
from recipes.translation.training.progress import Progress
from recipes.translation.training.validation import Validation
from recipes.translation.translating.translate import in_batches
from tests.recipes.random_translator import random_translator

SENTENCES = [f"The number is {word}." for word in ("one", "twenty two", "three", "four hundred", "five")]
PLAIN = [("NO_COLOR", "1"), ("TERM", "dumb"), ("CI", "true")]


@pytest.fixture(autouse=True)
def a_terminal_that_redraws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a usual terminal."""
    for name in ("NO_COLOR", "CI", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@contextmanager
def on_a_terminal(stream: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Connect a standard stream with a pseudo-terminal; what is yielded returns what the terminal got."""
    master, slave = pty.openpty()
    terminal = os.fdopen(slave, "w", encoding="utf-8")
    monkeypatch.setattr(sys, stream, terminal)

    def received() -> str:
        terminal.close()
        chunks = []
        with suppress(OSError):  # the end of a terminal that was closed
            while chunk := os.read(master, 65_536):
                chunks.append(chunk)
        return b"".join(chunks).decode()

    yield received
    os.close(master)
    terminal.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model translates one sentence at a time, and a file of sentences beside it."""
    folder = tmp_path_factory.mktemp("status") / "run"
    translator = random_translator(folder.parent)
    config = translator.config
    config = replace(config, decoding=replace(config.decoding, batch_sentences=1))
    with torch.no_grad():
        translator.model.generator.bias[EOS] = 50  # none is cut, which is said
    save_model(folder / "best", replace(translator, config=config), {"step": 1})
    (folder.parent / "sentences.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    return folder


def test_on_a_terminal_a_line_has_sentences_rate_and_time_left_and_is_gone_at_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_a_terminal("stderr", monkeypatch) as received:
        assert main(["translate", "--run", str(run), "--file", str(run.parent / "sentences.txt")]) == 0
        shown = received()
    assert re.search(r"\[translate\] [1-4]/5 sentences   [\d,.]+ sentences/s   0:\d\d left", shown)
    assert "5/5" not in shown
    assert shown.rstrip("\r\n\x1b[?25h").endswith("\x1b[2K")  # the line is erased
    output = capsys.readouterr().out
    assert output.count("\n") == 5
    assert "\x1b" not in output
    assert "sentences/s" not in output


@pytest.mark.parametrize(("name", "value"), PLAIN)
def test_a_terminal_that_asks_for_plain_text_gets_no_control_sequences(
    name: str, value: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with on_a_terminal("stderr", monkeypatch) as received:
        with SentenceProgress("translate", [4, 3, 2, 1]) as progress:
            clock[0] += 20
            progress.advance(1)
        shown = received()
    assert shown == "[translate] 1/4 sentences   0.1 sentences/s   0:30 left\r\n"


def test_a_pipe_gets_a_plain_line_every_ten_seconds(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stderr", piped)
    with SentenceProgress("evaluate", [2] * 30, total=60) as progress:
        for _ in range(30):
            clock[0] += 1.0
            progress.advance(1)
    assert piped.getvalue().splitlines() == [
        "[evaluate] 20/60 sentences   2.0 sentences/s   0:20 left",
        "[evaluate] 40/60 sentences   2.0 sentences/s   0:10 left",
    ]


def test_several_processes_have_as_many_sentences_as_there_are(
    run: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stderr", piped)

    def search(rows: list[int]) -> list[int]:
        clock[0] += 15
        return rows

    one_by_one = load_translator(run / "best", overrides={"decoding.batch_sentences": 1})
    in_batches(one_by_one, [[5]] * 5, search, replace(ALONE, world=2), "translate")
    # The first of two processes has three of the five
    assert [line.split("   ")[0] for line in piped.getvalue().splitlines()] == [
        "[translate] 1/5 sentences",
        "[translate] 3/5 sentences",
    ]


def test_the_time_left_counts_subwords_of_the_sentences_left(clock: list[float]) -> None:
    progress = SentenceProgress("", [60, 30, 10])
    clock[0] += 12
    progress.advance(1)
    assert progress.line().endswith("1/3 sentences   0.1 sentences/s   0:08 left")  # 12 s for 60 subwords, 40 left


def test_training_redraws_its_line_on_a_terminal_and_keeps_validations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = TrainingState()
    with on_a_terminal("stdout", monkeypatch) as received:
        with Progress(state, steps=3) as progress:
            for _ in range(3):
                state.step += 1
                progress.show_step(state, loss=2.0, tokens=5)
            progress.show_validation(state, Validation(3, {"loss": 1.5, "perplexity": 4.48}))
        shown = received()
    assert "[train] step      3/3   loss 2.000" in shown
    assert "[valid] step      3   loss 1.500   perplexity 4.48\r\n" in shown
    assert "\x1b[2K" in shown


def test_typed_and_single_sentences_show_no_progress(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_a_terminal("stderr", monkeypatch) as received:
        assert main(["translate", "--run", str(run), SENTENCES[0]]) == 0
        assert received() == ""
    assert capsys.readouterr().out.count("\n") == 1
