"""Measure what only a GPU can show, in thirteen minutes: what is asked first comes first, and each number is kept.

    python -m benchmarks.gpu                        # every part, one after the other
    python -m benchmarks.gpu steps --only plain     # some parts, and one implementation of those that have several
    python -m benchmarks.gpu --dry-run              # every part on the CPU, small; a step may take four times its limit

The parts are products, kernels, steps, gaps, mended (tests), scores, training and seeds. Each step of a part is a
process with a limit, and what it measures is a line of JSON as soon as it is known, on the standard output and in
OUT/figures.jsonl (OUT is runs/gpu unless it is set). A part ends in a table, OUT/<part>.md, also of a step that died.
`seeds` needs SEQPAR_DATA, the folder of the corpora. Losses that are not installed are said to be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.parts import PYTEST, Step, out, parts
from benchmarks.loss.results import hardware
from seqpar.markdown_table import markdown_table

TESTED = re.compile(r"(?:.* )?(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+)|(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED)")
"""A line of pytest's about one test, with several workers or with one."""
PATIENCE = 4
"""A CPU may take so many times as long in a dry run."""
Figures = dict[str, Any]


class Outcome(NamedTuple):
    """How a step ended, and what it had told by then."""

    step: Step
    verdict: str
    seconds: float
    told: list[Figures]

    @property
    def fails(self) -> bool:
        """Return whether it failed."""
        return self.verdict != "pass"


def figures_of(line: str) -> Figures | None:
    """Return what a line of a step tells: its JSON, or a test's outcome; None if it tells nothing."""
    if line.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            found: Figures = json.loads(line)
            return found
    if match := TESTED.match(line):
        return {"what": "test", "test": match[2] or match[3], "outcome": (match[1] or match[4]).lower()}
    return None


def run(part: str, step: Step, dry_run: bool, only: str = "") -> Outcome:
    """Run a step, keep what it prints in a file, and pass on what it tells as it comes."""
    command = [*step.command, *(step.dry if dry_run else ())]
    if only and step.takes_only:
        command += ["--only", only]
    limit = step.seconds * (PATIENCE if dry_run else 1)
    print(f"[gpu] {part}, {step.name}: at most {limit} s", file=sys.stderr, flush=True)
    start = time.monotonic()
    settings: Any = {
        "env": environment(step, dry_run),
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
        "text": True,
    }
    stem = f"{part}-{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}"
    told: list[Figures] = []
    ended_by_us = threading.Event()
    with (
        (out() / f"{stem}.log").open("w") as log,
        (out() / "figures.jsonl").open("a") as kept,
        subprocess.Popen(_with_plugin(command), stdout=subprocess.PIPE, errors="replace", **settings) as process,
    ):

        def end() -> None:
            ended_by_us.set()
            _end_group(process.pid)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                # pytest names a failed test again at its end
                if (figures := figures_of(line)) and figures not in told:
                    told.append(figures)
                    text = json.dumps({"part": part, "step": step.name, **figures})
                    print(text, file=kept, flush=True)
                    print(text, flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            # With all that it has started, or that would go on beside the next step
            _end_group(process.pid)
    verdict = "pass" if code == 0 else f"FAIL: ended with {code}"
    if ended_by_us.is_set():
        verdict = f"FAIL: not done after {limit} s"
    return Outcome(step, verdict, time.monotonic() - start, told)


def _end_group(pid: int) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def environment(step: Step, dry_run: bool) -> dict[str, str]:
    """Return the variables of a step: this folder first among those of modules, and its own on a GPU."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [".", ".peers", found.get("PYTHONPATH", "")]))
    found["HYPOTHESIS_PROFILE"] = "dev"
    # Of a step that dies, what is still in a buffer would be lost
    found["PYTHONUNBUFFERED"] = "1"
    return found if dry_run else found | dict(step.variables)


def _with_plugin(command: list[str]) -> list[str]:
    """Return a pytest command with seqpar's plugin named, where seqpar is not installed but only in this folder."""
    if command[: len(PYTEST)] != [*PYTEST]:
        return command
    try:
        importlib.metadata.distribution("seqpar")
    except importlib.metadata.PackageNotFoundError:
        return [*PYTEST, "-p", "seqpar.testing.plugin", *command[len(PYTEST) :]]
    return command


def summary(part: str, outcomes: list[Outcome]) -> str:
    """Return one table of a part's steps, failures first, and below it what each has told."""
    ordered = sorted(outcomes, key=lambda outcome: not outcome.fails)
    rows = [[outcome.verdict, outcome.step.name, f"{outcome.seconds:.0f}"] for outcome in ordered]
    blocks = [f"## {part}", markdown_table(["", "step", "s"], rows)]
    for each in ordered:
        if each.told:
            blocks += [f"### {each.step.name}", *tables(each.told)]
    return "\n\n".join(blocks)


def tables(told: list[Figures]) -> list[str]:
    """Return a table for each set of columns, and of tests their number and those that did not pass."""
    tests = [figures for figures in told if figures["what"] == "test"]
    found = []
    if tests:
        outcomes = [figures["outcome"] for figures in tests]
        found.append(", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes)))
    by_columns: dict[tuple[str, ...], list[Figures]] = {}
    for figures in told:
        if figures.get("outcome") not in ("passed", "skipped"):
            by_columns.setdefault(tuple(figures), []).append(figures)
    for columns, rows in by_columns.items():
        cells = [[str(figures[column]).replace("|", "/") for column in columns] for figures in rows]
        found.append(markdown_table(["", *columns[1:]], cells))
    return found


def main() -> int:
    """Run the parts that are asked for; return 1 if a step of theirs fails."""
    known = parts()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(known)}; default is all")
    parser.add_argument("--only", default="", metavar="NAME", help="the one implementation of parts that have several")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small")
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(known))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry-run tries every part on the CPU")
    out().mkdir(parents=True, exist_ok=True)
    failed = False
    for part in options.parts or known:
        outcomes = [run(part, step, options.dry_run, options.only) for step in known[part]]
        failed |= any(outcome.fails for outcome in outcomes)
        text = summary(part, outcomes)
        (out() / f"{part}.md").write_text(f"{text}\n")
        print(f"{text}\n", flush=True)
    print(f"{hardware('cpu' if options.dry_run else 'cuda')}, torch {torch.__version__}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
