"""Measure a subject, the loss or the scores of tokens, part by part: check, time beside bare products, weigh, keep."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.loss import results as files
from benchmarks.loss.implementations import Implementation
from benchmarks.loss.memory import in_fresh_process, peak_of
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.results import Entry, Results
from benchmarks.loss.timing import Progress, Runs, forward_and_backward, interleaved, runs_in_a_row, seconds

FEWEST_ROUNDS = 3
MOST_ROUNDS = 7
BUDGET = 180.0
"""Seconds that the rounds of one problem may take, as long as the fewest rounds are run."""
TYPICAL = 1.4
"""First guess of an implementation's time over that of the products."""
Options = dict[str, Any]
"""What implementations are made with."""


class Part(NamedTuple):
    """Groups of problems, each group in the same rounds, and what is measured of them."""

    groups: Sequence[Sequence[Problem]]
    times: bool = True
    memory: bool = True


class Subject:
    """What is measured: the parts, and what can be measured in each."""

    name: ClassVar[str]
    peers: ClassVar[dict[str, Sequence[str]]]
    """The packages whose versions are kept, by type of device."""
    modules: ClassVar[list[str]]
    """What a process imports before memory is measured in it."""
    parts: ClassVar[dict[str, Part]]

    def options(self, run: Run, problem: Problem) -> Options:
        """Return what implementations are made with."""
        return {}

    def ways(self, part: str, problem: Problem, options: Options) -> dict[str, Implementation]:
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

    def weighed(self, names: Sequence[str], problem: Problem) -> list[str]:
        """Return those of which memory is measured."""
        return list(names)

    def uncounted_bytes(self, part: str, problem: Problem) -> int:
        """Return what is taken off each peak."""
        return 0

    def about(self, problem: Problem, device: str, ways: dict[str, Implementation]) -> Entry:
        """Return what an entry has beside seconds and peaks."""
        return {}

    def on_a_gpu(self, run: Run) -> None:
        """Measure what a GPU shows, and keep or print it."""
        raise NotImplementedError

    def tried_on_the_cpu(self) -> list[str]:
        """Return the table of the same for one small problem on the CPU."""
        raise NotImplementedError

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
        again: whether to measure what the file already has.
        checked: what has been checked again.
    """

    subject: Subject
    results: Results
    path: Path
    device: str
    repeats: int | None
    only: str
    again: bool
    checked: set[tuple[str, str]]

    def todo(self, part: str, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems that were asked for and are not measured yet."""
        done = {} if self.again else self.results["parts"].get(part, {})
        return [problem for problem in problems if self.only in str(problem) and str(problem) not in done]

    def keep(self, part: str, problem: Problem, entry: Entry) -> None:
        """Write an entry to the file."""
        self.results["parts"].setdefault(part, {})[str(problem)] = {"problem": problem.as_json(), **entry}
        files.save(self.results, self.path)

    def check(self, part: str, name: str, way: Implementation, problem: Problem) -> None:
        """Check an implementation, unless that has been done."""
        key = self.subject.check_key(part, problem)
        found = self.results["checks"].setdefault(key, {})
        if name not in found or (self.again and (key, name) not in self.checked):
            found[name] = self.subject.what_is_wrong(part, name, way, problem, self.device)
            self.checked.add((key, name))


def measure(run: Run, part: str) -> None:
    """Measure what is asked for of a part, and keep it."""
    groups = [group for group in run.subject.parts[part].groups if run.todo(part, group)]
    for number, problems in enumerate(groups, 1):
        options = run.subject.options(run, problems[0])
        ways = run.subject.ways(part, problems[0], options)
        not_run = {name: reason for name, way in ways.items() if (reason := way.why_not(problems[0]))}
        ways = {name: way for name, way in ways.items() if name not in not_run}
        torch.compiler.reset()  # torch stops compiling after a few shapes of one function
        for name, way in ways.items():
            run.check(part, name, way, problems[0])
        title = f"{part}, {number} of {len(groups)}"
        entries: dict[Problem, Entry] = {
            problem: {
                **run.subject.about(problem, run.device, ways),
                "not run": not_run,
                "floor seconds": {},
                "seconds": {},
            }
            for problem in problems
        }
        if run.subject.parts[part].times:
            _time(run, part, ways, entries, title)
        for problem, entry in entries.items():
            if run.subject.parts[part].memory:
                entry["peak bytes"] = _peaks(run, part, list(ways), problem, options, title)
            run.keep(part, problem, entry)


def _time(run: Run, part: str, ways: dict[str, Implementation], entries: dict[Problem, Entry], title: str) -> None:
    """Time the products and every implementation in turn, and add their seconds to the entries.

    Only the products, whose time decides how many rounds there are, and implementations that compile are warmed up.
    """
    torch.compiler.reset()
    runs: Runs = {}
    inputs = []
    round_seconds = 0.0
    for problem in entries:
        x = Inputs.drawn(problem, run.device)
        inputs.append(x)
        # Implementations without a bias are measured with the same tensors: they never look at it
        products = run.subject.floors(part, x)
        fastest = min(seconds(product, [x]) for product in (*products.values(), *products.values()))
        round_seconds += fastest * runs_in_a_row(problem) * TYPICAL * (len(ways) + len(products))
        runs |= {(problem, name): product for name, product in products.items()}
        entries[problem]["floor seconds"] = dict.fromkeys(products)
        for name, way in ways.items():
            step = forward_and_backward(way.prepare(x))
            if way.compiles:
                seconds(step, [x])
            runs[problem, name] = step
    rounds = run.repeats or rounds_within_budget(round_seconds)
    progress = Progress(title, rounds * len(runs))
    for (problem, name), taken in interleaved(runs, inputs, rounds, progress.add).items():
        kind = "floor seconds" if name in entries[problem]["floor seconds"] else "seconds"
        entries[problem][kind][name] = taken


def rounds_within_budget(round_seconds: float) -> int:
    """Return how many rounds fit into the budget, as an odd number: the median is then a measured time."""
    fitting = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(BUDGET / round_seconds)))
    return fitting - (fitting % 2 == 0)


def _peaks(
    run: Run, part: str, names: list[str], problem: Problem, options: Options, title: str
) -> dict[str, int | str]:
    """Return the peak of each in a process of its own, or what became of the process."""
    names = run.subject.weighed(names, problem)
    uncounted = run.subject.uncounted_bytes(part, problem)
    progress = Progress(f"{title}, memory", len(names))
    found: dict[str, int | str] = {}
    for name in names:
        peak = in_fresh_process(run.subject.modules, peak_of, run.subject, part, name, problem, run.device, options)
        found[name] = peak - uncounted if isinstance(peak, int) else peak
        progress.add(name)
    return found


def main(subject: Subject, description: str) -> None:
    """Measure the parts that were asked for, print a table of each, and write the pages."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{subject.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [*subject.parts, "gpu"]
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {'; '.join(known)}; default is all")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only parts with this text in their name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--rounds", "--repeats", type=int, help="of every problem; default depends on a round's cost")
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems with this text in their name")
    parser.add_argument("--again", action="store_true", help="measure again what the file already has")
    parser.add_argument("--out", type=Path, help="the file; default is by subject and date, in docs/results")
    parser.add_argument("--dry-run", action="store_true", help="try the part gpu on the CPU, on one small problem")
    parser.add_argument("--render", action="store_true", help="measure nothing; write the pages from the file")
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(known))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    if options.render:
        subject.write(options.out or files.newest_path(options.device, subject.name))
        return
    warnings.simplefilter("ignore")  # the peers warn of what the tables already state
    if options.dry_run:
        print("\n".join(subject.tried_on_the_cpu()))
        return
    torch.set_num_threads(options.threads)
    path = options.out or files.default_path(options.device, subject.name)
    command = shlex.join(["python", "-m", f"benchmarks.{subject.name}", *sys.argv[1:]])
    measured = files.load(path, options.device, command, subject.peers.get(torch.device(options.device).type, []))
    run = Run(subject, measured, path, options.device, options.rounds, options.only, options.again, set())
    for part in [part for part in options.parts or known if options.cases in part]:
        if part != "gpu":
            measure(run, part)
        elif run.device != "cpu":
            subject.on_a_gpu(run)
        print("\n".join(subject.part_table(measured, part)), flush=True)
    subject.write(path)
