"""The tutorials run as printed: every command and every block of code, in order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fenced import fenced
from tests.recipes.saved import saved_file

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(1_800)]


def blocks(page: str, language: str) -> list[str]:
    return [block.code for block in fenced(ROOT / "docs" / page) if block.language == language]


def printed(command: list[str], folder: Path) -> str:
    """What a program prints where `recipes` is installed, as `pip install -e` does it, and `python` is this one."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-2_000:]}"
    return done.stdout


def in_python(page: str, folder: Path) -> str:
    (folder / "page.py").write_text("\n".join(blocks(page, "python")))
    return printed([sys.executable, "-W", "error", "page.py"], folder)


def test_two_text_files_become_a_service_by_the_commands_as_printed(tmp_path: Path) -> None:
    install, *commands = blocks("tutorial.md", "bash")
    assert "pip install" in install  # which has been done here
    assert len(commands) >= 7
    output = printed(["bash", "-e", "-o", "pipefail", "-c", "\n".join(commands)], tmp_path)
    assert '{"translatedText":"' in output
    run = tmp_path / "runs/english-german"
    scores = json.loads((run / "test.scores.json").read_text())
    assert "averaged" in {path.name for path in run.iterdir()}
    assert scores
    assert len((tmp_path / "test.translated").read_text().splitlines()) == 100
    small = (run / "ctranslate2/model.bin").stat().st_size
    assert small < 0.5 * saved_file(run, "best", "model.safetensors").stat().st_size


def test_a_hugging_face_model_is_fine_tuned_as_printed(tmp_path: Path) -> None:
    output = in_python("tutorial-huggingface.md", tmp_path)
    assert len(re.findall(r"'loss': '?[\d.]+", output)) == 3
    assert (tmp_path / "fine-tuned/model.safetensors").is_file()


def test_an_own_criterion_and_generator_are_proved_as_printed(tmp_path: Path) -> None:
    output = in_python("tutorial-research.md", tmp_path)
    assert "so it takes a mean; the criterion must sum" in output
    assert "Likely cause: the last chunk is dropped" in output
    first, *_, last = re.findall(r"step \d+: ([\d.]+)", output)
    assert float(last) < float(first)
