"""Measure a subject, the loss or the scores of tokens, part by part: check, time beside bare products, weigh, keep."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.loss import results as files
from benchmarks.loss.implementations import Implementation
from benchmarks.loss.memory import in_fresh_process, peak_of
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import Entry, Results
from benchmarks.loss.timing import forward_and_backward, interleaved, runs_in_a_row, seconds
from conformance.peak_memory import peak_bytes

FEWEST_ROUNDS = 3
MOST_ROUNDS = 7
BUDGET = 180.0
"""Seconds that the rounds of one problem may take, as long as the fewest rounds are run."""
TYPICAL = 1.4
"""First guess of an implementation's time over that of the products."""


class Part(NamedTuple):
    """Problems, and whether they are timed as well as weighed."""

    problems: Sequence[Problem]
    times: bool = True


class Subject:
    """What is measured: the parts, and what can be measured in each."""

    name: ClassVar[str]
    peers: ClassVar[dict[str, Sequence[str]]]
    """The packages whose versions are kept, by type of device."""
    modules: ClassVar[list[str]]
    """What a process imports before memory is measured in it."""
    parts: ClassVar[dict[str, Part]]
    """What is measured on a CPU."""
    gpu_parts: ClassVar[dict[str, Part]]
    """What is measured on a GPU."""
    ours: ClassVar[Sequence[str]]
    """Implementations that may not fail; where another one does, that is a remark on the page."""

    def ways(self, part: str, problem: Problem) -> dict[str, Implementation]:
        """Return the implementations that are wanted in a part, also those that cannot run, by name."""
        raise NotImplementedError

    def floors(self, part: str, x: Inputs) -> dict[str, Callable[[], None]]:
        """Return the bare products by name."""
        raise NotImplementedError

    def check_key(self, part: str, problem: Problem) -> str:
        """Return under what a check is kept: it is made once for each."""
        raise NotImplementedError

    def what_is_wrong(self, part: str, name: str, way: Implementation, problem: Problem, device: str) -> list[str]:
        """Return in words what is wrong at a small problem of that kind."""
        raise NotImplementedError

    def weighs(self, problem: Problem) -> bool:
        """Return whether memory is measured."""
        return True

    def uncounted_bytes(self, part: str, problem: Problem) -> int:
        """Return what is taken off each peak."""
        return 0

    def about(self, problem: Problem, device: str) -> Entry:
        """Return what an entry has beside seconds and peaks."""
        return {}

    def goals(self, results: Results) -> list[str]:
        """Return a table of what is to be reached, if there is anything."""
        return []

    def part_table(self, results: Results, part: str) -> list[str]:
        """Return the figures of one part."""
        raise NotImplementedError

    def write(self, path: Path) -> None:
        """Write the pages that show a file of measurements."""
        raise NotImplementedError


class Run(NamedTuple):
    """Hold what is asked for.

    Args:
        only: a text that a problem's name must contain.
    """

    subject: Subject
    results: Results
    path: Path
    device: str
    repeats: int | None
    only: str

    def todo(self, part: str, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems that were asked for and are not measured yet."""
        done = self.results["parts"].get(part, {})
        return [problem for problem in problems if self.only in str(problem) and str(problem) not in done]

    def keep(self, part: str, problem: Problem, entry: Entry) -> None:
        """Write an entry to the file."""
        self.results["parts"].setdefault(part, {})[str(problem)] = {"problem": problem.as_json(), **entry}
        files.save(self.results, self.path)

    def check(self, part: str, name: str, way: Implementation, problem: Problem) -> None:
        """Check an implementation, unless that has been done."""
        key = self.subject.check_key(part, problem)
        found = self.results["checks"].setdefault(key, {})
        if name not in found:
            found[name] = self.subject.what_is_wrong(part, name, way, problem, self.device)


def measure(run: Run, part: str, asked: Part) -> None:
    """Measure what is asked for of a part, and keep it."""
    problems = run.todo(part, asked.problems)
    for number, problem in enumerate(problems, 1):
        ways = run.subject.ways(part, problem)
        not_run = {name: reason for name, way in ways.items() if (reason := way.why_not(problem))}
        torch.compiler.reset()  # torch stops compiling after a few shapes of one function
        for name in [name for name in ways if name not in not_run]:
            with _tolerated(run, name, not_run):
                run.check(part, name, ways[name], problem)
        title = f"{part}, {number} of {len(problems)}"
        entry: Entry = {"not run": not_run, **run.subject.about(problem, run.device)}
        entry |= {"floor seconds": {}, "seconds": {}, "peak bytes": {}}
        if asked.times:
            _time(run, part, ways, problem, entry, title)
        if run.device == "cpu" and run.subject.weighs(problem):
            entry["peak bytes"] = _peaks(run, part, [name for name in ways if name not in not_run], problem, title)
        run.keep(part, problem, entry)


@contextmanager
def _tolerated(run: Run, name: str, not_run: dict[str, str]) -> Iterator[None]:
    """Note why an implementation fails, unless it is one of ours."""
    try:
        yield
    except Exception as error:
        if name in run.subject.ours:
            raise
        reason, *_ = [*str(error).strip().splitlines(), "no message"]
        not_run[name] = f"{type(error).__name__}: {reason[:100]}"


def _time(run: Run, part: str, ways: dict[str, Implementation], problem: Problem, entry: Entry, title: str) -> None:
    """Time the products and every implementation in turn, and add their seconds to the entry.

    Only the products, whose time decides how many rounds there are, and implementations that compile are warmed up. On
    a GPU all are, and their memory is that of the second step.
    """
    torch.compiler.reset()
    on_a_gpu = run.device != "cpu"
    x = Inputs.drawn(problem, run.device)
    # Implementations without a bias are measured with the same tensors: they never look at it
    products = run.subject.floors(part, x)
    fastest = min(seconds(product, x) for product in (*products.values(), *products.values()))
    runs = dict(products)
    for name, way in ways.items():
        if name in entry["not run"]:
            continue
        with _tolerated(run, name, entry["not run"]):
            step = forward_and_backward(way.prepare(x))
            if way.compiles or on_a_gpu:
                seconds(step, x)
                x.clear()
            if on_a_gpu:
                entry["peak bytes"][name] = peak_bytes(step, run.device)
                entry["peak bytes"][name] -= run.subject.uncounted_bytes(part, problem)
            runs[name] = step
        x.clear()
    round_seconds = fastest * runs_in_a_row(problem) * TYPICAL * (len(ways) + len(products))
    rounds = run.repeats or rounds_within_budget(round_seconds)
    with tqdm(desc=title, total=rounds * len(runs)) as progress:
        taken = interleaved(runs, x, rounds, progress.update)
    for name, found in taken.items():
        entry["floor seconds" if name in products else "seconds"][name] = found


def rounds_within_budget(round_seconds: float) -> int:
    """Return how many rounds fit into the budget, as an odd number: the median is then a measured time."""
    fitting = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(BUDGET / round_seconds)))
    return fitting - (fitting % 2 == 0)


def _peaks(run: Run, part: str, names: list[str], problem: Problem, title: str) -> dict[str, int | str]:
    """Return the peak of each in a process of its own, or what became of the process."""
    uncounted = run.subject.uncounted_bytes(part, problem)
    found: dict[str, int | str] = {}
    for name in tqdm(names, f"{title}, memory"):
        peak = in_fresh_process(run.subject.modules, peak_of, run.subject, part, name, problem)
        found[name] = peak - uncounted if isinstance(peak, int) else peak
    return found


def try_on_the_cpu(subject: Subject) -> None:
    """Print the tables of a GPU, each of one small problem on the CPU, where what needs a GPU does not run."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "tried.json")
        run = Run(subject, files.load(path, "cpu", "", []), path, "cpu", 1, "")
        for part, asked in subject.gpu_parts.items():
            small = asked.problems[0]._replace(rows=64, width=8, vocab_size=50)
            measure(run, part, Part([small]))
            print("\n".join(subject.part_table(run.results, part)))


def main(subject: Subject, description: str) -> None:
    """Measure the parts that were asked for, print a table of each, and write the pages."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{subject.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = "; ".join({**subject.parts, **subject.gpu_parts})
    parser.add_argument("parts", nargs="*", metavar="part", help=f"texts in the names of parts: {every}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--rounds", "--repeats", type=int, help="of every problem; default depends on a round's cost")
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems with this text in their name")
    parser.add_argument("--out", type=Path, help="the file; default is by subject and date, in docs/results")
    parser.add_argument("--dry-run", action="store_true", help="try what is measured on a GPU on the CPU, small")
    parser.add_argument("--render", action="store_true", help="print every table, write the page; measure nothing")
    options = parser.parse_args()
    here = subject.parts if torch.device(options.device).type == "cpu" else subject.gpu_parts
    unknown = [text for text in options.parts if not any(text in part for part in here)]
    if unknown:
        parser.error(f"no part on {options.device} has {', '.join(unknown)} in its name; there are {'; '.join(here)}")
    if options.render:
        path = options.out or files.newest_path(options.device, subject.name)
        measured = files.read(path)
        print("\n".join(subject.goals(measured)))
        for part in measured["parts"]:
            print("\n".join([f"## {part}", "", *subject.part_table(measured, part)]))
        subject.write(path)
        return
    warnings.simplefilter("ignore")  # the peers warn of what the tables already state
    if options.dry_run:
        try_on_the_cpu(subject)
        return
    path = options.out or files.default_path(options.device, subject.name)
    command = shlex.join(["python", "-m", f"benchmarks.{subject.name}", *sys.argv[1:]])
    measured = files.load(path, options.device, command, subject.peers.get(torch.device(options.device).type, []))
    run = Run(subject, measured, path, options.device, options.rounds, options.only)
    for part in [part for part in here if not options.parts or any(text in part for text in options.parts)]:
        measure(run, part, here[part])
        print("\n".join(subject.part_table(measured, part)), flush=True)
    subject.write(path)
