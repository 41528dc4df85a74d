"""The parts that run on a GPU, without one: how long they may take, and what their summary says."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu.__main__ import Outcome, environment, run, summary
from benchmarks.gpu.kernel_errors import CASES, Finding, finding, table
from benchmarks.gpu.parts import LONGEST, SWITCHED, Step, parts
from benchmarks.gpu.trace import covered

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", parts())
def test_a_part_takes_less_than_nine_minutes(part):
    assert sum(step.seconds for step in parts()[part]) <= LONGEST


def test_the_tests_that_follow_the_switch_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = [line for line in makefile.splitlines() if line.startswith("SWITCHED")]
    assert {*line.partition(":=")[2].split()} == {*SWITCHED, "tests/recipes/training/test_accelerators.py"}
    for path in SWITCHED:
        assert path == "--ignore" or (ROOT / path).exists()


def python(code):
    return (sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("print('| a | b |')", "pass"),
        ("raise SystemExit(3)", "FAIL: ended with 3"),
        ("import time; time.sleep(60)", "FAIL: not done after 1 s"),
    ],
)
def test_a_step_passes_fails_or_is_ended_and_its_tables_are_kept(code, verdict, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    outcome = run("part", Step("a step", 1 if "sleep" in code else 60, python("never run"), python(code)), dry_run=True)
    assert outcome.verdict == verdict
    assert outcome.lines == (["| a | b |"] if verdict == "pass" else [])
    assert (tmp_path / "part-a-step.log").exists()


def test_what_a_step_has_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    start = "print('|', subprocess.Popen(['sleep', '60']).pid, '|', flush=True)"
    code = f"import subprocess, time; {start}; time.sleep(60)"
    outcome = run("part", Step("a step", 2, (), python(code)), dry_run=True)
    assert outcome.verdict == "FAIL: not done after 2 s"
    child = Path("/proc", outcome.lines[0].split()[1])
    ended = time.monotonic() + 10
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < ended, "the child lives on"
        time.sleep(0.05)


def test_failures_come_first():
    steps = [Step(name, 1, (), ()) for name in "abc"]
    outcomes = [
        Outcome(step, verdict, 1.0, []) for step, verdict in zip(steps, ("pass", "FAIL: x", "pass"), strict=True)
    ]
    lines = summary("part", outcomes).splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| ")][1:] == ["b", "a", "c"]


def test_the_switch_is_cuda_and_emulated_in_a_dry_run():
    (step,) = [step for step in parts()["tests"] if step.switch]
    assert environment(step, dry_run=False)[step.switch] == "cuda"
    assert environment(step, dry_run=True)[step.switch] == "emulated"


def test_a_kernel_that_is_wrong_is_a_failure_at_the_top_of_the_table(monkeypatch):
    case = CASES[0].small()
    right = finding(case, "cpu")
    assert not right.fails
    assert Finding(case, "weight", 2.1 * right.plain, right.plain, 0.0).fails
    lines = table([right, right._replace(error=1.0)]).splitlines()
    assert lines[2].startswith("| FAIL |")
    assert lines[3].startswith("| pass |")


def test_the_device_is_busy_where_any_of_its_kernels_runs():
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 4.0
    assert covered([]) == 0.0


def test_the_largest_problems_have_more_logits_than_an_int32_counts():
    assert max(case.rows * case.vocab_size for case in CASES) > 2**31
    assert max(case.rows * case.vocab_size for case in CASES if case.chunk_rows == case.rows) > 2**31
    assert gpu_parts.LONGEST == 9 * 60
