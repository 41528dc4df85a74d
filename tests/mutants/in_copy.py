"""Run tests in a copy of the checkout, in a process forked from one that has torch loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATUS = 100
"""Added to pytest's exit status, which tells it from that of a process that has not come so far."""
FAILED = "failed-tests"
"""The file in a copy that names the tests that failed, one a line."""


def run_tests(copy: str, tests: Sequence[str], *options: str) -> None:
    """Run tests in a copy, and write down which failed; exit with STATUS and pytest's own status."""
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [copy, *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    ours = ("tests", "seqpar", "models", "recipes", "conformance", "planning")
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = copy
    sys.dont_write_bytecode = True  # a file that is changed twice in a second would be taken from the cache
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import pytest

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                with open(FAILED, "a") as file:
                    file.write(report.nodeid + "\n")

    quick = ["-q", "-p", "no:cacheprovider", "--assert=plain", "-o", "addopts="]
    os._exit(STATUS + int(pytest.main([*quick, *options, *tests], plugins=[Failures()])))
