"""A metric of any program: what it gets, what it must write, and the line that says what is wrong."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.data import cleaning as cleaning_module
from recipes.translation.data.cleaning import Cleaning
from recipes.translation.errors import ConfigError
from recipes.translation.scores.evaluate import Evaluation, add_command_scores
from recipes.translation.scores.rerank import choose_by_command, choose_by_mbr_of_command
from recipes.translation.settings.data import CleaningConfig
from recipes.translation.text.metric_command import command_scores
from recipes.translation.text.pair import Pair
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


def scoring(folder: Path, number: str) -> str:
    """A program that writes this number for each row of JSON."""
    return program(folder, f"import json, sys\nfor line in sys.stdin:\n    row = json.loads(line)\n    print({number})")


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


def test_a_line_break_within_a_sentence_moves_no_score_of_another(tmp_path: Path) -> None:
    """Programs that read lines see breaks that this recipe does not."""
    code = "import sys\nfor row in zip(*(open(name).read().splitlines() for name in sys.argv[1:])): print(len(row[1]))"
    sources, translations = ["a\rb", "c", "d"], ["a\nb", "\u2028c\x85c", "d"]
    command = program(tmp_path, code, "{sources}", "{translations}")
    assert command_scores(command, sources, translations) == [3, 4, 1]


def test_evaluate_shows_the_mean_with_its_interval_and_writes_it_down(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = program(tmp_path, BY_JSON)
    assert main(["evaluate", *files, "--metric-command", command]) == 0
    printed = capsys.readouterr().out
    assert f"metric command       1.17  [1.00, 1.33]      mean of the sentences, by {command}" in printed


def test_each_test_set_has_the_mean_of_its_own_sentences_of_one_run_of_the_command(tmp_path: Path) -> None:
    command = program(tmp_path, f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{BY_JSON}")
    pairs = [Pair("s", "r" * 10)] * 6
    sets = [
        Evaluation("news", pairs[:1], ["h" * 3], []),
        Evaluation("talks", pairs[:3], ["h" * 4, "h" * 5, "h" * 9], []),
        Evaluation("web", pairs[:2], ["h", "h" * 2], []),
    ]
    found = [one.measured[-1] for one in add_command_scores(command, sets)]
    assert [one.score for one in found] == pytest.approx([0.3, 0.6, 0.15])
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print(1)", "wrote 1 lines for 2 sentences: it must write one number for each, one per line"),
        ("print(1); print('two')", "line 2 of the output of .* is not a number: two"),
        ("print('nan'); print(1)", "line 1 of the output of .* is not a number: nan"),
        ("import sys; sys.exit(3)", "failed with status 3; its own output is above"),
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
        ("'", "cannot be split into words: No closing quotation"),
        ("", "is empty, perhaps because a shell variable is not set"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_the_work(
    command: str, message: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "evaluate", *files, f"--metric-command={command}")


BY_LENGTH = "len(row['translation']) - len(row.get('reference', row['source']))"
TEXTS_OF_TWO = [["aa", "b", "cccc", "dddd"], ["eee"]]


def test_of_each_sentence_the_translation_with_the_largest_number_is_chosen(tmp_path: Path) -> None:
    command = scoring(tmp_path, BY_LENGTH)
    assert choose_by_command(["one", "two"], TEXTS_OF_TWO, command) == ["cccc", "eee"]
    assert choose_by_command([], [], command) == []


def test_minimum_bayes_risk_is_by_the_mean_of_the_numbers_against_the_others(tmp_path: Path) -> None:
    command = scoring(tmp_path, "-abs(len(row['translation']) - len(row['reference']))")
    rows = [["a", "aaaa", "aaaaa"], ["a", "bb", "bb", "cccc"], ["e"]]
    expected = []
    for row in rows:
        means = [-sum(abs(len(one) - len(other)) for other in row) for one in row]  # one's own adds 0
        expected.append(row[means.index(max(means))])
    assert choose_by_mbr_of_command(["", "", ""], rows, command) == expected == ["aaaa", "bb", "e"]


def test_a_command_is_not_asked_for_a_translation_beside_itself(tmp_path: Path) -> None:
    command = scoring(tmp_path, "float('nan') if row['translation'] == row['reference'] else len(row['translation'])")
    assert choose_by_mbr_of_command(["s", "t"], [["a", "bb"], ["c"]], command) == ["bb", "c"]


def test_repeated_translations_are_references_for_each_other_by_a_command_too(tmp_path: Path) -> None:
    """Scores that are 1 for the same text, and 0 for another: only what occurs twice has any."""
    command = scoring(tmp_path, "int(row['translation'] == row['reference'])")
    assert choose_by_mbr_of_command(["s"], [["x", "y", "z", "y"]], command) == ["y"]


@pytest.mark.parametrize("name", ["{references}", "r={references}"])
def test_a_metric_that_reads_references_is_refused_where_there_are_none(name: str, tmp_path: Path) -> None:
    command = program(tmp_path, "", "{sources}", name)
    with pytest.raises(ConfigError, match="but there are none here: name a metric that needs no references"):
        choose_by_command(["one"], [["a", "b"]], command)
    with pytest.raises(ConfigError, match=r"^cleaning\.metric_command: .* reads \{references\}"):
        Cleaning(CleaningConfig(metric_command=command, metric_least=0.0), "en", "de")


def test_pairs_that_are_scored_below_the_least_number_are_removed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs of two pairs, after the other rules, whose pairs the program never sees."""
    monkeypatch.setattr(cleaning_module, "AT_ONCE", 2)
    command = scoring(
        tmp_path, f"{BY_LENGTH})\nprint(file=sys.stderr)\nopen({str(tmp_path / 'runs')!r}, 'a').write('x'"
    )
    rules = Cleaning(CleaningConfig(metric_command=command, metric_least=-1.0, max_words=2), "en", "de")
    targets = ["aaa", "aa", "a", "", "aaaa", "a a a a a", "b"]
    kept = list(rules.clean(Pair("one", target) for target in targets))
    assert [pair.target for pair in kept] == ["aaa", "aa", "aaaa"]
    assert str(rules) == "4 of 7 pairs dropped: an empty side 1; more than 2 words 1; scored too low 2"
    assert (tmp_path / "runs").read_text() == "xxx"


def test_markup_is_counted_in_the_pairs_that_are_kept(tmp_path: Path) -> None:
    rules = Cleaning(CleaningConfig(metric_command=scoring(tmp_path, BY_LENGTH), metric_least=0.0), "en", "de")
    assert len(list(rules.clean([Pair("<b>one</b>", "eins"), Pair("<b>", "<b>")]))) == 1
    assert rules.markup == 1


def test_scores_without_it_say_none() -> None:
    from tests.recipes.scores.scored import score

    found = json.loads(json.dumps(score(["a"], ["a"])))
    assert found["metric_command"] is found["metric_command_signature"] is None
