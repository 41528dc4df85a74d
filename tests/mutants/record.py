"""Which tests reach which lines: recorded once, and from then on of what has changed."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.faults import Fault
from tests.mutants.reach import ROOT

RECORDED = ROOT / ".mutants"
CODE = "code"
"""The file of a record that holds the code it was made with."""
MARKS = "not hf_models and not launched and not browser and not tutorial"
MOST_SECONDS = 60.0
"""Of the tests of a fault, by what they took when they were recorded; the fastest are taken."""


class Reach(NamedTuple):
    """Which tests reach which lines."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, frozenset[str]]]

    def tests_of(self, fault: Fault) -> list[str]:
        """Return the tests of a fault, those of its wing first, and the fastest of them."""
        lines = self.lines.get(fault.path, {})
        reached: frozenset[str] = frozenset()
        tree = ast.parse((ROOT / fault.path).read_bytes())
        called = called_lines(tree)
        for first, last in blocks_around(tree, fault.line):
            within = (tests for line, tests in lines.items() if first <= line <= last and line in called)
            reached = reached or frozenset().union(*within)
        parts = [part for part in Path(fault.path).parent.parts if part != "translation"]
        folders = ["/".join(["tests", *parts[:depth]]) + "/" for depth in range(len(parts), 0, -1)]
        of_wing = next((each for each in folders if any(name.startswith(each) for name in self.seconds)), "tests/")
        # A table is often tested by those that read all of it, and call nothing of its file
        if not reached or fault.line not in called:
            reached |= frozenset(name for name in self.seconds if name.startswith(of_wing))
        chosen: list[str] = []
        total = 0.0
        for name in sorted(reached, key=lambda name: (not name.startswith(of_wing), self.seconds[name], name)):
            total += self.seconds[name]
            if chosen and total > MOST_SECONDS:
                break
            chosen.append(name)
        return chosen


def called_lines(tree: ast.Module) -> set[int]:
    """Return the lines in the bodies of functions.

    The others run while the file is imported: in no test, or in the one that happens to import it first.
    """
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)}


def blocks_around(tree: ast.Module, line: int) -> list[tuple[int, int]]:
    """Return the first and last lines of the statements around a line, from the innermost to the whole file."""
    around = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    # The innermost statement may be a whole function or loop, of which the line is the head
    return [(line, line), *sorted(around, key=lambda block: block[1] - block[0]), (1, sys.maxsize)]


def recorded(workers: int, tests: Sequence[str]) -> Reach:
    """Return which tests reach which lines; run those of which no record knows."""
    code = code_of_checkout()
    kind = hashlib.sha256(" ".join(tests).encode()).hexdigest()[:8]
    folder = RECORDED / f"{hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]}-{kind}"
    if not folder.is_dir():
        earlier = max(RECORDED.glob(f"*-{kind}"), key=lambda each: each.stat().st_mtime, default=None)
        whole = folder.with_suffix(".part")
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir(parents=True)
        (whole / CODE).write_text(json.dumps(code))
        wanted = list(tests)
        if earlier:
            wanted = take_over(earlier, whole, code, collected(tests))
        print(f"[mutants] running {len(wanted)} files or folders of tests, to see which lines they reach", flush=True)
        if wanted:
            pytest("-p", "tests.mutants.reach", "--reach", str(whole), "-n", str(workers), *wanted)
        whole.rename(folder)
    return read(folder)


def code_of_checkout() -> dict[str, str]:
    """Return what a record belongs to: the contents of all tracked Python files, by path."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split() if not name.startswith("tests/mutants/")]
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}


def take_over(earlier: Path, whole: Path, code: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Write what an earlier record knows of these tests into a new one; return the files of tests to run again.

    A file runs again if it has changed or has a test that is new. A line of the code keeps its tests wherever it moves.
    """
    before = read(earlier)
    old_code = json.loads((earlier / CODE).read_text())
    file_of = {name: name.partition("::")[0] for name in names}
    again = {file for name, file in file_of.items() if name not in before.seconds or code[file] != old_code.get(file)}
    kept = {name: place for place, name in enumerate(name for name in names if file_of[name] not in again)}
    lines: dict[str, dict[int, list[int]]] = {}
    for path in before.lines.keys() & code.keys():
        now = lines_now(old_code[path], code[path])
        for line, tests in before.lines[path].items():
            if line in now:
                lines.setdefault(path, {})[now[line]] = sorted(kept[name] for name in tests if name in kept)
    text = json.dumps({"tests": [(name, before.seconds[name]) for name in kept], "lines": lines})
    (whole / "earlier.json").write_text(text)
    return sorted(again)


def lines_now(old: str, new: str) -> dict[int, int]:
    """Return where the lines of a text are in a later one, by number, as far as they are the same."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return {
        block.a + place: block.b + place
        for block in matcher.get_matching_blocks()
        for place in range(1, block.size + 1)
    }


def collected(tests: Sequence[str]) -> list[str]:
    """Return the names of all tests."""
    return [line for line in pytest("--collect-only", *tests, quiet=True).splitlines() if "::" in line]


def pytest(*arguments: str, quiet: bool = False) -> str:
    """Run pytest over all that is recorded; return what it prints where it is to be quiet."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", MARKS, *arguments]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "dev"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, text=True, stdout=subprocess.PIPE if quiet else None
    )
    return done.stdout or ""


def read(folder: Path) -> Reach:
    """Return what a record knows."""
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = {}
    for file in folder.glob("*.json"):
        found = json.loads(file.read_text())
        names = [name for name, _ in found["tests"]]
        seconds.update(found["tests"])
        for path, numbers in found["lines"].items():
            for line, places in numbers.items():
                lines.setdefault(path, {}).setdefault(int(line), set()).update(names[place] for place in places)
    return Reach(seconds, {p: {n: frozenset(s) for n, s in each.items()} for p, each in lines.items()})
