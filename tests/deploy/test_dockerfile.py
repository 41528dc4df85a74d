"""The image of `deploy/` is made by the commands of README and Makefile, from files that are enough for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.slurm import ROOT

LINES = (ROOT / "deploy/Dockerfile").read_text().splitlines()
README = (ROOT / "README.md").read_text()
CPU = "https://download.pytorch.org/whl/cpu"


def of(instruction: str) -> list[str]:
    """What follows an instruction, line by line."""
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with what the image has from the checkout."""
    for line in of("COPY"):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    return tmp_path


def test_it_installs_what_the_readme_says() -> None:
    (run,) = of("RUN")
    install, option, index = run.rsplit(" ", 2)
    assert install in README.splitlines()
    assert (option, index) == ("--extra-index-url", '"$TORCH"')
    assert of("ARG") == [f"TORCH={CPU}"]
    assert f"`{option} {CPU}`" in README


def test_it_runs_the_demo_of_the_makefile() -> None:
    (command,) = of("CMD")
    python, *words = json.loads(command)
    makefile = (ROOT / "Makefile").read_text()
    (demo,) = re.findall(r"^demo:.*\n\t@\$\(BIN\)/(.*)$", makefile, flags=re.MULTILINE)
    assert " ".join([python, *words]) == demo


def test_it_starts_from_an_oldest_python_that_is_supported() -> None:
    (base,) = of("FROM")
    assert base == "python:3.11-slim"
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()


def test_what_is_copied_is_enough_to_be_installed_and_to_start(image: Path) -> None:
    """Installed without its dependencies, since a test has no network."""
    environment = {**os.environ, "PYTHONPATH": str(image)}
    made = "import hatchling.build; print(hatchling.build.build_wheel('dist'))"
    for words in (["-c", made], ["-m", "recipes.translation", "train", "--help"]):
        subprocess.run([sys.executable, *words], cwd=image, env=environment, capture_output=True, check=True)
    code = "import seqpar, models, recipes; print(seqpar.__file__, models.__file__, recipes.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=image, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.count(str(image)) == 3
