"""A pytest plugin that writes down which lines of the library each test reaches, and its seconds.

    python -m pytest -p tests.mutants.reach --reach FOLDER ...

Each worker of pytest-xdist writes a file of its own. What other processes of a test run is not seen.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
WINGS = ("seqpar", "models", "recipes")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder that is written to."""
    parser.addoption("--reach", type=Path, required=True, help="where the lines that tests reach are written")


def pytest_configure(config: pytest.Config) -> None:
    """Record, except in the process that only hands out tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(config.getoption("reach")))


class Recorder:
    """Records one process's tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        sources = [str(ROOT / wing) for wing in WINGS]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, source=sources)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record the lines of a test under its name."""
        began = time.process_time()
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")
            self.seconds[item.nodeid] = time.process_time() - began

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
        lines: dict[str, dict[int, list[int]]] = {}
        for file in data.measured_files():
            found: dict[int, list[int]] = defaultdict(list)
            for line, contexts in data.contexts_by_lineno(file).items():
                found[line] = sorted(number[name] for name in contexts if name in number)
            lines[str(Path(file).relative_to(ROOT))] = found
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"tests": list(self.seconds.items()), "lines": lines})
        (self.folder / f"{os.getpid()}.json").write_text(text)
