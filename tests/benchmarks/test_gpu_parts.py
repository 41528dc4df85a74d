"""The parts that run on a GPU, without one: how long they may take, and what is kept of a step that dies."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import Outcome, environment, figures_of, run, summary
from benchmarks.gpu.kernel_errors import CASES, Finding, finding, table
from benchmarks.gpu.parts import LONGEST, MARKED, Step, parts
from benchmarks.gpu.trace import Span, covered, gaps

ROOT = Path(__file__).parents[2]
STEPS = [step for steps in parts().values() for step in steps]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def test_all_parts_together_take_at_most_thirteen_minutes():
    assert sum(step.seconds for step in STEPS) <= LONGEST == 13 * 60


def test_what_a_loan_should_answer_first_comes_first():
    assert [*parts()] == ["products", "kernels", "steps", "gaps", "mended", "scores", "training", "seeds"]


def python(code, seconds=60, **more):
    return Step("a step", seconds, (sys.executable, "-c", code), **more)


@pytest.mark.parametrize(
    ("code", "seconds", "verdict"),
    [
        ("", 60, "pass"),
        ("raise SystemExit(3)", 60, "FAIL: ended with 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 60, "FAIL: ended with -11"),
        ("import time; time.sleep(60)", 3, "FAIL: not done after 3 s"),
    ],
)
def test_a_step_that_dies_leaves_its_numbers_and_a_table(code, seconds, verdict, folder, capsys):
    told = 'import os, signal\nfor n in 1, 2: print(\'{"what": "x|y", "ms": %d}\' % n)\nprint("{and words")\n'
    outcome = run("part", python(told + code, seconds), dry_run=False)
    assert outcome.verdict == verdict
    assert outcome.told == [{"what": "x|y", "ms": 1}, {"what": "x|y", "ms": 2}]
    kept = [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]
    assert kept == [{"part": "part", "step": "a step", **figures} for figures in outcome.told]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == kept
    assert "{and words" in (folder / "part-a-step.log").read_text()
    text = summary("part", [outcome])
    assert f"| {verdict} | a step |" in text
    assert "| x/y | 2 |" in text


def test_a_number_is_passed_on_before_its_step_ends(folder):
    told = 'import time; print("{\\"what\\": \\"x\\"}"); time.sleep(60)'
    step = f"Step('a step', 60, (sys.executable, '-c', {told!r}))"
    code = f"import sys; from benchmarks.gpu.__main__ import Step, run; run('part', {step}, False)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert json.loads(process.stdout.readline())["what"] == "x"
        assert process.poll() is None
        assert (folder / "figures.jsonl").read_text()
    finally:
        process.terminate()
        process.communicate()


def test_what_a_step_has_started_ends_with_it():
    start = "print('{\"what\": %d}' % subprocess.Popen(['sleep', '60']).pid)"
    outcome = run("part", python(f"import subprocess, time; {start}; time.sleep(60)", 3), dry_run=False)
    assert outcome.verdict == "FAIL: not done after 3 s"
    child = Path("/proc", str(outcome.told[0]["what"]))
    ended = time.monotonic() + 10
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < ended, "the child lives on"
        time.sleep(0.05)


def test_one_implementation_is_asked_of_the_steps_that_have_several():
    echo = python("import json, sys; print(json.dumps({'what': sys.argv[1:]}))")
    assert run("part", echo, True, "plain").told == [{"what": ["--dry-run"]}]
    assert run("part", echo._replace(takes_only=True), False, "plain").told == [{"what": ["--only", "plain"]}]
    assert {step.name for step in STEPS if step.takes_only} == {"loss steps", "scores", "training steps"}


def test_the_sanitizer_is_set_for_the_step_that_needs_it():
    (ordered,) = [step for step in STEPS if step.name == "ordered streams"]
    assert environment(ordered, dry_run=False)["TORCH_CUDA_SANITIZER"] == "1"
    assert "TORCH_CUDA_SANITIZER" not in environment(ordered, dry_run=True)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tests/a.py::test_x[cpu-1] PASSED   [ 50%]", ("tests/a.py::test_x[cpu-1]", "passed")),
        ("[gw3] [ 10%] FAILED tests/a.py::test_x ", ("tests/a.py::test_x", "failed")),
        ("FAILED tests/a.py::test_x - AssertionError", ("tests/a.py::test_x", "failed")),
        ("collected 3 items", None),
        ("{'not': json", None),
    ],
)
def test_a_line_of_pytest_tells_how_a_test_ended(line, found):
    expected = found and {"what": "test", "test": found[0], "outcome": found[1]}
    assert figures_of(line) == expected


def test_a_failed_test_that_pytest_names_twice_is_told_once():
    lines = "print('tests/a.py::test_x FAILED [ 50%]'); print('FAILED tests/a.py::test_x - AssertionError')"
    outcome = run("part", python(lines), dry_run=False)
    assert outcome.told == [{"what": "test", "test": "tests/a.py::test_x", "outcome": "failed"}]


def test_failures_come_first_and_passed_tests_are_counted():
    tests = [{"what": "test", "test": name, "outcome": how} for name, how in (("a", "passed"), ("b", "failed"))]
    steps = [Step(name, 1, ()) for name in "abc"]
    outcomes = [
        Outcome(step, verdict, 1.0, tests) for step, verdict in zip(steps, ("pass", "FAIL: x", "pass"), strict=True)
    ]
    text = summary("part", outcomes)
    assert text.index("| FAIL: x | b |") < text.index("| pass | a |")
    assert "1 passed, 1 failed" in text
    assert "| test | b | failed |" in text
    assert "| test | a |" not in text


@pytest.mark.tutorial
@pytest.mark.parametrize("part", ["products", "kernels", "steps", "gaps", "scores"])
def test_every_part_of_the_loss_runs_small_on_the_cpu(part, monkeypatch):
    for step in parts()[part]:
        found = run(part, step, dry_run=True, only="" if part == "scores" else "LossCompute")
        assert found.verdict == "pass", found
        assert found.told


def test_one_implementation_that_there_is_not_is_refused():
    (step,) = parts()["steps"]
    outcome = run("steps", step, True, "Plain")
    assert outcome.verdict == "FAIL: ended with 1"


def test_the_files_with_tests_for_a_gpu_are_those_that_are_run():
    found = {path for path in (ROOT / "tests/seqpar").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    assert {ROOT / path for path in MARKED} == found


def test_a_kernel_that_is_wrong_is_a_failure_at_the_top_of_the_table():
    case = CASES[0].small()
    right = finding(case, "cpu")
    assert not right.fails
    assert Finding(case, "weight", 2.1 * right.plain, right.plain, 0.0).fails
    lines = table([right, right._replace(error=1.0)]).splitlines()
    assert lines[2].startswith("| FAIL |")
    assert lines[3].startswith("| pass |")


def test_the_device_is_busy_where_any_of_its_kernels_runs_and_waits_between_them():
    spans = [Span(0.0, 2.0, "a"), Span(1.0, 1.5, "b"), Span(3.0, 4.0, "c"), Span(6.0, 7.0, "d")]
    assert covered(spans) == 4.0
    assert gaps(spans) == [(2.0, "c", "d"), (1.0, "a", "c")]
    assert covered([]) == 0.0
    assert gaps([]) == []


def test_the_largest_problems_have_more_logits_than_an_int32_counts():
    assert max(case.rows * case.vocab_size for case in CASES) > 2**31
    assert max(case.rows * case.vocab_size for case in CASES if case.chunk_rows == case.rows) > 2**31
