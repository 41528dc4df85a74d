"""The workflows run what the Makefile and nox offer, on the versions that the package names."""

import ast
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
ELSEWHERE = {"test-newest", "test-trainers"}
"""Suites with environments of their own, of packages that change without a commit here."""
TOGETHER = {"test-long"}
"""What runs six of the others on one machine."""


def test_every_suite_of_the_makefile_runs():
    suites = set(re.findall(r"^(test[a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(CI["suite"]["strategy"]["matrix"]["suite"]) == suites - ELSEWHERE - TOGETHER


def test_a_suite_of_a_mark_looks_for_it_wherever_a_test_has_it():
    """But in the packages' own trainers, which are run where they can be installed."""
    commands = re.findall(r"pytest .*-m (\w+|'.*?') (.*)", (ROOT / "Makefile").read_text())
    assert len(commands) >= 8
    for marks, command in commands:
        paths = re.findall(r"tests/\S+", command)
        for mark in re.sub(" and not .*", "", marks.strip("'")).split(" or "):
            having = [
                str(file.relative_to(ROOT))
                for file in (ROOT / "tests").rglob("test_*.py")
                if f"mark.{mark}" in file.read_text() and not file.stem.endswith("_itself")
            ]
            assert having
            assert [file for file in having if not file.startswith(tuple(paths))] == [], command


def test_every_pair_of_versions_of_nox_runs():
    nox = (ROOT / "noxfile.py").read_text()
    python, torch = (ast.literal_eval(re.search(start + r"(\[.*?\])", nox)[1]) for start in ("python=", '"torch", '))
    assert CI["versions"]["strategy"]["matrix"] == {"python": python, "torch": torch}


def test_every_python_that_the_package_names_is_tested():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = [name.removeprefix("Programming Language :: Python :: ") for name in named if ":: Python ::" in name]
    assert CI["versions"]["strategy"]["matrix"]["python"] == pythons


def test_every_action_is_one_commit_and_not_a_tag_that_can_move():
    for workflow in WORKFLOWS:
        used = re.findall(r"uses: (.*)", workflow.read_text())
        assert used
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v[\d.]+", name) for name in used), workflow
