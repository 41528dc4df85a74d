"""Plant faults one at a time, run the tests that reach the line, and show the faults that no test notices.

    python -m tests.mutants --count 300 --seed 1              # over the library and the recipe
    python -m tests.mutants --count 20 --wings seqpar/rows

Which tests reach a line is recorded first, by running those of `make test`, `make test-formats` and `make test-faults`
(`tests/mutants/reach.py`): all of them once, and later the files of tests that are new or have changed. Of a line that
none of them reaches, as one of another process, those of the block around it count, or else of its wing; of one that
runs at import, both. The wing's own tests run first, each group fastest first, in a fork of a process that has torch
loaded, in a copy of the checkout. A fault that makes them run without end is noticed. At the end, the tests that failed
run once more without a fault: one that fails then, too, has noticed nothing. Faults that change nothing are listed with
the reason in `equivalent.json`, and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.mutants.faults import Fault, faults_of, parses
from tests.mutants.in_copy import FAILED, STATUS, run_tests
from tests.mutants.reach import ROOT, WINGS
from tests.mutants.record import MARKS, Reach, recorded

EQUIVALENT = Path(__file__).with_name("equivalent.json")
SLOWER = 4
"""How many times longer a run may take before it counts as one without end; and `PATIENCE` seconds more."""
PATIENCE = 60


VERDICTS = {STATUS + 0: "survived", STATUS + 1: "caught", STATUS + 2: "caught", STATUS + 4: "caught"}
"""By what a process of tests ends with; pytest's 2 is an error while importing tests, its 4 one of a conftest.py."""


class Outcome(NamedTuple):
    """What the tests said of a fault."""

    fault: Fault
    verdict: str
    """"caught", "survived", "no test", "out of time" or "not run", where the process failed before its tests."""
    seconds: float
    failed: str = ""
    """The test that failed."""


def drawn(wings: Sequence[str], count: int, seed: str) -> list[Fault]:
    """Draw faults: first a kind, then one of its faults, so that the rare kinds are among them."""
    equivalent = json.loads(EQUIVALENT.read_text())
    by_kind: dict[str, list[Fault]] = {}
    for wing in wings:
        for path in sorted((ROOT / wing).rglob("*.py")):
            for fault in faults_of(path.relative_to(ROOT).as_posix(), path.read_bytes()):
                by_kind.setdefault(fault.kind, []).append(fault)
    chance = random.Random(seed)
    for faults in by_kind.values():
        chance.shuffle(faults)
    found: list[Fault] = []
    while len(found) < count and any(by_kind.values()):
        kind = chance.choice(sorted(kind for kind, faults in by_kind.items() if faults))
        fault = by_kind[kind].pop()
        if parses(fault.planted((ROOT / fault.path).read_bytes())) and fault.key(ROOT) not in equivalent:
            found.append(fault)
    return found


@contextlib.contextmanager
def copies(number: int) -> Iterator[Queue[Path]]:
    """Within the block, lend so many copies of the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lent: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for place in range(number):
            copy = Path(folder, str(place))
            for name in filter(None, listed.splitlines()):
                if (ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy / name)
            lent.put(copy)
        yield lent


def tried(fault: Fault, reach: Reach, lent: Queue[Path]) -> Outcome:
    """Plant a fault in a copy, and run its tests."""
    tests = reach.tests_of(fault)
    began = time.monotonic()
    if not tests:
        return Outcome(fault, "no test", 0.0)
    if not all((ROOT / name.partition("::")[0]).is_file() for name in tests):
        return Outcome(fault, "not run", 0.0)
    copy = lent.get()
    source = (ROOT / fault.path).read_bytes()
    (copy / fault.path).write_bytes(fault.planted(source))
    try:
        limit = SLOWER * sum(reach.seconds[name] for name in tests) + PATIENCE
        status, failed = ended(copy, tests, "-x", "-m", MARKS, limit=limit)
    finally:
        (copy / fault.path).write_bytes(source)
        lent.put(copy)
    # By a signal, or because it runs without end
    verdict = "caught"
    if status is not None and status >= 0:
        verdict = VERDICTS.get(status, "not run")
    return Outcome(fault, verdict, time.monotonic() - began, failed[0] if failed else "")


def ended(copy: Path, tests: Sequence[str], *options: str, limit: float) -> tuple[int | None, list[str]]:
    """Run tests in a copy; return how their process ended, None after its limit of seconds, and which failed."""
    names = copy / FAILED
    names.unlink(missing_ok=True)
    process = multiprocessing.get_context("forkserver").Process(target=run_tests, args=(str(copy), tests, *options))
    process.start()
    process.join(limit)
    assert process.pid is not None
    status = process.exitcode
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return status, names.read_text().splitlines() if names.exists() else []


def confirmed(outcomes: Sequence[Outcome], reach: Reach, lent: Queue[Path]) -> list[Outcome]:
    """Return the outcomes; a fault is "not run" where the test that failed also fails without it."""
    tests = sorted({outcome.failed for outcome in outcomes if outcome.failed})
    if not tests:
        return list(outcomes)
    copy = lent.get()
    _, failing = ended(copy, tests, limit=SLOWER * sum(reach.seconds.get(name, 1.0) for name in tests) + PATIENCE)
    lent.put(copy)
    return [each._replace(verdict="not run") if each.failed in failing else each for each in outcomes]


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the survivors as diffs, and the score of each wing."""
    lines = []
    for outcome in outcomes:
        if outcome.verdict != "caught":
            lines += [f"--- {outcome.verdict}: {outcome.fault.key(ROOT)}", outcome.fault.diff(ROOT), ""]
    of_wing: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for wing in ("/".join(Path(outcome.fault.path).parts[:2]), "all"):
            of_wing.setdefault(wing, Counter())[outcome.verdict] += 1
    lines += ["| wing | faults | caught | of them |", "|---|---|---|---|"]
    for wing, verdicts in sorted(of_wing.items()):
        total = sum(verdicts.values())
        lines.append(f"| {wing} | {total} | {verdicts['caught']} | {100 * verdicts['caught'] / total:.0f} % |")
    return "\n".join(lines)


def main() -> None:
    """Draw faults, try them, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="faults (default: 300)")
    parser.add_argument("--seed", default="0", help="of the draw, any text (default: 0)")
    parser.add_argument("--wings", nargs="*", default=list(WINGS), help="folders of the code (default: all)")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files or folders of the tests (default: all)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="faults at once")
    options = parser.parse_args()
    reach = recorded(options.workers, options.tests)
    faults = drawn(options.wings, options.count, options.seed)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "pytest", "hypothesis", "numpy"])
    outcomes = []
    began = time.monotonic()
    with copies(options.workers) as lent, ThreadPoolExecutor(options.workers) as threads:
        for outcome in threads.map(lambda fault: tried(fault, reach, lent), faults):
            outcomes.append(outcome)
            minutes = (time.monotonic() - began) / 60
            left = minutes / len(outcomes) * (len(faults) - len(outcomes))
            place = f"{outcome.verdict}: {outcome.fault.path}:{outcome.fault.line}"
            print(
                f"[mutants] {len(outcomes)} of {len(faults)}, {minutes:.0f} min, {left:.0f} left, {place}", flush=True
            )
        print(report(confirmed(outcomes, reach, lent)))


if __name__ == "__main__":
    main()
