"""The page of verdicts is what its data give, and the data are whole."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from conformance import Case, Finding, Options, report
from conformance.__main__ import main
from conformance.checks import problems
from conformance.finding import shown
from conformance.parts import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def data(part):
    return report.read(PAGE.with_name(f"conformance-{part}.json"))


def test_the_page_is_what_its_data_give():
    assert report.fill(PAGE) == PAGE.read_text()
    assert re.findall(r"<!-- (\w+): made by page -->", PAGE.read_text()) == [*PARTS]


@pytest.mark.parametrize("name", PARTS)
def test_the_data_have_every_check_of_every_implementation_that_is_not_left_out(name):
    part, found = PARTS[name], data(name)
    left_out = {"cce"} if name == "scores" else set()  # it recompiles for each shape on a CPU
    assert {*found} == {*part.known} - left_out
    for of in found.values():
        assert {*of} == {check.name for check in part.checks}, "a check was added or renamed: run the page's command"


@pytest.mark.parametrize("name", PARTS)
def test_every_failure_in_the_data_has_a_figure_and_lines_that_compile(name):
    failed = [(check, f) for of in data(name).values() for check, f in of.items() if f.verdict == "fail"]
    assert failed
    for check, finding in failed:
        assert finding.figure, check
        assert 1 < len(finding.reproduction.splitlines()) <= 5, check
        compile(finding.reproduction, check, "exec")


@pytest.mark.parametrize("part", ["losses", "scores"])
def test_the_lines_of_a_failure_in_the_data_are_those_that_its_check_would_give(part):
    checks = {check.name: check for check in PARTS[part].checks}
    for name, of in data(part).items():
        for check, finding in of.items():
            judge, settings = checks[check].run.args
            asked = [shown(judge, x) for x in problems(settings, PARTS[part].known[name])]
            assert finding.verdict != "fail" or finding.reproduction in asked, (check, name)


def test_options_that_are_not_given_ask_for_the_plain_loss_and_the_log_probability_alone():
    assert Options() == Options(
        ignore_index=-100, label_smoothing=0.0, softcap=None, reduction="sum", chunk=None, dtype=torch.float32,
        temperature=1.0, entropy=False, top_k=None, ids=None,
    )  # fmt: skip


def test_the_right_loss_of_a_layout_is_that_of_its_reproduction():
    checked = 0
    for of in data("layouts").values():
        for finding in of.values():
            for right in re.findall(r"\(([\d.]+) is right\)", finding.figure):
                (case,) = re.findall(r", (Case\(.*\))\)\)$", finding.reproduction)
                assert f"{eval(case, {'Case': Case}).right().loss:.4g}" == right, case
                checked += 1
    assert checked


@pytest.mark.parametrize(
    ("check", "finding", "mark"),
    [
        ("float32", Finding("pass", "bias 1e-7"), "✓"),
        ("float32", Finding("fail", "bias gradient off by 0.3"), "**✗ silent**"),
        ("float32", Finding("fail", "KeyError: 3", is_raised=True), "✗"),
        ("memory by rows", Finding("fail", "9 to 90 MiB"), "✗"),
        ("float32", Finding("not offered"), "-"),
        ("float32", Finding("not measured", "not installed"), "?"),
    ],
)
def test_a_cell_tells_a_wrong_number_from_an_error_and_from_a_cost(check, finding, mark):
    rows = report.table(PARTS["losses"], {"mine": {check: finding}}).splitlines()
    assert f"| {check} | {mark} |" in rows
    assert len(rows) == 3


def test_the_command_makes_the_tables_of_a_page_from_the_files_beside_it(tmp_path):
    mine = tmp_path / "conformance.md"
    text = PAGE.read_text()
    mine.write_text(text.replace("| **✗ silent**", "| ✓"))
    for name in PARTS:
        mine.with_name(f"conformance-{name}.json").write_bytes(PAGE.with_name(f"conformance-{name}.json").read_bytes())
    main(["page", str(mine)])
    assert mine.read_text() == text


def test_a_finding_is_kept_as_json_that_every_reader_takes(tmp_path):
    path, adapter = tmp_path / "mine.json", PARTS["losses"].known["torch"]
    finding = Finding("fail", "loss: none, or not a number", "import torch\nprint(3)", of_allowed=math.inf)
    assert report.keep(path, {"torch": {"float32": finding}}, [adapter]) == {"torch": {"float32": finding}}
    (kept,) = json.loads(path.read_text(), parse_constant=pytest.fail)["torch"]["checks"].values()
    assert kept == {"verdict": "fail", "figure": finding.figure, "reproduction": finding.reproduction}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no table", r"mine\.md has no table to make: none is between <!-- losses:"),
        ("<!-- losses: made by page -->\n\n<!-- end -->\n", r"No such file.*mine-losses\.json"),
        (None, r"No such file or directory: '.*mine\.md'$"),
    ],
)
def test_a_page_that_is_not_there_or_has_no_table_or_no_data_is_refused_in_one_line(text, said, tmp_path):
    mine = tmp_path / "mine.md"
    if text is not None:
        mine.write_text(text)
    with pytest.raises(SystemExit, match=rf"^conformance: .*{said}"):
        main(["page", str(mine)])
