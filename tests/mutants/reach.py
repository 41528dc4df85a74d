"""A pytest plugin that writes down which lines of the library each test reaches, and its seconds.

    python -m pytest -p tests.mutants.reach --reach FOLDER ...

Each worker of pytest-xdist writes a file of its own. Of other processes only the ranks of `seqpar.testing.ranks` are
seen.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

from seqpar.testing.ranks import Pool

ROOT = Path(__file__).parents[2]
WINGS = ("seqpar", "models", "recipes", "conformance", "planning")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder that is written to."""
    parser.addoption("--reach", type=Path, required=True, help="where the lines that tests reach are written")


def pytest_configure(config: pytest.Config) -> None:
    """Record, except in the process that only hands out tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(config.getoption("reach")))


class InRank(NamedTuple):
    """A function for `Pool.call` that returns, beside its result, what it has reached and its seconds."""

    function: Callable[..., Any]
    test: str

    def __call__(self, *arguments: Any, **keywords: Any) -> tuple[Any, dict[str, list[int]], float]:
        """Call the function in a rank, whose fork has copied the parent's running coverage."""
        measured = coverage.Coverage.current()
        if measured is None:  # where the system refuses forks, ranks have another parent
            return self.function(*arguments, **keywords), {}, 0.0
        began = time.process_time()
        measured.switch_context(self.test)
        result = self.function(*arguments, **keywords)
        measured.switch_context("")
        seconds = time.process_time() - began
        data = measured.get_data()
        data.set_query_context(self.test)
        return result, {file: data.lines(file) or [] for file in data.measured_files()}, seconds


class Recorder:
    """Records one process's tests, and the ranks that they call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.test = ""
        self.in_ranks: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Of each test, the lines that its ranks have reached, by file."""
        self.call = Pool.call
        recorder = self

        def call(pool: Pool, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
            return recorder.called(pool, InRank(function, recorder.test), *arguments, **keywords)

        Pool.call = call  # type: ignore[method-assign]
        sources = [str(ROOT / wing) for wing in WINGS]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, source=sources)
        self.coverage.start()

    def called(self, pool: Pool, function: InRank, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a function in every rank, and record what it has reached there."""
        answers = self.call(pool, function, *arguments, **keywords)
        for _, lines, _ in answers:
            for file, numbers in lines.items():
                self.in_ranks[function.test][file].update(numbers)
        self.seconds[function.test] += max(seconds for _, _, seconds in answers)
        return [result for result, _, _ in answers]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record the lines of a test under its name."""
        began = time.process_time()
        self.test = item.nodeid
        self.seconds[self.test] = 0.0
        self.coverage.switch_context(self.test)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")
            self.seconds[self.test] += time.process_time() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that did not pass: it would notice every fault."""
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write which tests passed, in how many seconds, and for each file and line the numbers of these tests."""
        self.coverage.stop()
        self.seconds = {name: seconds for name, seconds in self.seconds.items() if name not in self.failed}
        data = self.coverage.get_data()
        number = {name: place for place, name in enumerate(self.seconds)}
        reached: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                reached[file][line].update(contexts)
        for name, files in self.in_ranks.items():
            for file, numbers in files.items():
                for line in numbers:
                    reached[file][line].add(name)
        lines = {
            str(Path(file).relative_to(ROOT)): {
                line: sorted(number[name] for name in names if name in number) for line, names in found.items()
            }
            for file, found in reached.items()
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"tests": list(self.seconds.items()), "lines": lines})
        (self.folder / f"{os.getpid()}.json").write_text(text)
