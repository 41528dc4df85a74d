"""Run everything that only a GPU can show: tests, kernels, the loss beside its peers, the recipe, and a trace.

    python -m benchmarks.gpu                        # every part, one after the other: under an hour
    python -m benchmarks.gpu tests kernels          # some of: tests, kernels, loss, recipe, seeds, trace
    python -m benchmarks.gpu --dry-run              # every part on the CPU, small

Each part takes less than nine minutes and ends in one table, failures first. Logs and figures go to the folder OUT
(runs/gpu). `seeds` and the part of `recipe` that trains on Multi30k need SEQPAR_DATA, the folder of the corpora. Other
implementations of the loss that are not installed are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import torch

from benchmarks.gpu.parts import PYTEST, Step, out, parts
from benchmarks.loss.results import hardware
from seqpar.markdown_table import markdown_table

SHOWN = re.compile(r"^(\||- |FAILED|ERROR|\d+ (passed|failed|skipped|error|deselected))")
"""Lines of a log that belong to the part's summary: tables, remarks, and what pytest says at the end."""


class Outcome(NamedTuple):
    """How a step ended."""

    step: Step
    verdict: str
    seconds: float
    lines: list[str]

    @property
    def fails(self) -> bool:
        """Return whether it failed."""
        return self.verdict != "pass"


def run(part: str, step: Step, dry_run: bool) -> Outcome:
    """Run a step, and keep what it prints in a file."""
    command = step.dry if dry_run else step.command
    print(f"[gpu] {part}, {step.name}: at most {step.seconds} s", file=sys.stderr)
    log = out() / f"{part}-{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log"
    start = time.monotonic()
    settings = {"env": environment(step, dry_run), "stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("w") as file, subprocess.Popen(_with_plugin(command), stdout=file, **settings) as process:
        try:
            code = process.wait(step.seconds)
            verdict = "pass" if code == 0 else f"FAIL: ended with {code}"
        except subprocess.TimeoutExpired:
            verdict = f"FAIL: not done after {step.seconds} s"
        finally:
            # With all that it has started, or that would go on beside the next step
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in log.read_text(errors="replace").splitlines() if SHOWN.match(line)]
    return Outcome(step, verdict, time.monotonic() - start, lines)


def environment(step: Step, dry_run: bool) -> dict[str, str]:
    """Return the variables of a step: this folder first among those of modules, and where tensors are."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [".", ".peers", found.get("PYTHONPATH", "")]))
    found["HYPOTHESIS_PROFILE"] = "dev"
    if step.switch:
        found[step.switch] = "emulated" if dry_run else "cuda"
    return found


def _with_plugin(command: tuple[str, ...]) -> list[str]:
    """Return a pytest command with seqpar's plugin named, where seqpar is not installed but only in this folder."""
    if command[: len(PYTEST)] != PYTEST:
        return [*command]
    try:
        importlib.metadata.distribution("seqpar")
    except importlib.metadata.PackageNotFoundError:
        return [*PYTEST, "-p", "seqpar.testing.plugin", *command[len(PYTEST) :]]
    return [*command]


def summary(part: str, outcomes: list[Outcome]) -> str:
    """Return one table of a part's steps, failures first, and below it the tables of the steps."""
    ordered = sorted(outcomes, key=lambda outcome: not outcome.fails)
    rows = [[outcome.verdict, outcome.step.name, f"{outcome.seconds:.0f}"] for outcome in ordered]
    blocks = [f"## {part}", markdown_table(["", "step", "s"], rows)]
    blocks += ["\n".join([f"### {each.step.name}", "", *each.lines]) for each in ordered if each.lines]
    return "\n\n".join(blocks)


def main() -> int:
    """Run the parts that are asked for; return 1 if a step of theirs fails."""
    known = parts()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(known)}; default is all")
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
        outcomes = [run(part, step, options.dry_run) for step in known[part]]
        failed |= any(outcome.fails for outcome in outcomes)
        text = summary(part, outcomes)
        (out() / f"{part}.md").write_text(f"{text}\n")
        print(f"{text}\n", flush=True)
    print(f"{hardware('cpu' if options.dry_run else 'cuda')}, torch {torch.__version__}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
