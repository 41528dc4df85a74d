"""A metric of any program: what it gets, what it must write, and the line that says what is wrong."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.errors import ConfigError
from recipes.translation.scores.metric_command import command_scores
from tests.recipes.command_line import refusal

TEXTS = (["one", "two ü\u2028x"], ["eine", "zwei\ry"], ["ein", "zwei"])
BY_FILES = """
import sys
s, t, r = (open(name, encoding="utf-8", newline="\\n").read().split("\\n")[:-1] for name in sys.argv[1:])
for rows in zip(s, t, r, strict=True): print(len(rows[1]) / len(rows[2]), file=sys.stdout)
"""
BY_JSON = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(len(row["translation"]) / len(row["reference"]))
"""


def program(folder: Path, code: str, *words: str) -> str:
    path = folder / "a metric.py"
    path.write_text(code)
    return " ".join([shlex.quote(sys.executable), shlex.quote(str(path)), *words])


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, text in (("s", "one\ntwo\n"), ("h", "eine\nzwei\n"), ("r", "ein\nzwei\n")):
        (tmp_path / name).write_text(text)
    return [f"--hypotheses={tmp_path / 'h'}", f"--references={tmp_path / 'r'}", f"--sources={tmp_path / 's'}"]


@pytest.mark.parametrize(
    ("code", "words"),
    [(BY_FILES, ("{sources}", "{translations}", "{references}")), (BY_JSON, ())],
    ids=["files", "JSON"],
)
def test_each_sentence_is_scored_with_its_own_texts(code: str, words: tuple[str, ...], tmp_path: Path) -> None:
    assert command_scores(program(tmp_path, code, *words), *TEXTS) == [4 / 3, 6 / 4]


def test_evaluate_shows_the_mean_with_its_interval_and_writes_it_down(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = program(tmp_path, BY_JSON)
    assert main(["evaluate", *files, "--metric-command", command]) == 0
    printed = capsys.readouterr().out
    assert f"metric command       1.17  [1.00, 1.33]      mean of the sentences, by {command}" in printed


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print(1)", "has written 1 lines for 2 sentences: it must write one number for each, one a line"),
        ("print(1); print('two')", "line 2 of what .* has written is no number: two"),
        ("print('nan'); print(1)", "line 1 of what .* has written is no number: nan"),
        ("import sys; sys.exit(3)", "failed with status 3; what it said is above"),
    ],
)
def test_a_command_that_does_not_score_is_one_line(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--metric-command: .*{message}$") as caught:
        command_scores(program(tmp_path, code), *TEXTS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-metric {sources}", "there is no program no-such-metric: install it, or give its path"),
        ("'", "cannot be divided into words: No closing quotation"),
        ("", "is empty, perhaps because a shell variable is not set"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_the_work(
    command: str, message: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "evaluate", *files, f"--metric-command={command}")


def test_without_sources_it_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "name them with --sources" in refusal(capsys, "evaluate", *files[:2], "--metric-command", "cat")


def test_scores_without_it_say_none() -> None:
    from tests.recipes.scores.scored import score

    found = json.loads(json.dumps(score(["a"], ["a"])))
    assert found["metric_command"] is found["metric_command_signature"] is None
