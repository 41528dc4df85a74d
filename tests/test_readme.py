"""The README's code runs when pasted, and the file map of CONTRIBUTING is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fenced import fenced

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks():
    """Return the README's Python: a program for torchrun, and eight lines for one process."""
    return [block.code for block in fenced(README) if block.language == "python"]


def test_the_first_program_runs_on_two_ranks(tmp_path):
    (tmp_path / "train.py").write_text(blocks()[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"(\d\.\d\d) nats a token over all 2 ranks", done.stdout)
    assert len(said) == 2
    assert said[0] == said[1]


def test_the_eight_lines_are_eight_and_run(capsys):
    code = blocks()[1]
    assert len([line for line in code.splitlines() if line.strip()]) == 8
    exec(compile(code, str(README), "exec"), {})
    assert re.match(r"\d+\.\d\d nats a token, \d+ of \d+ right\n", capsys.readouterr().out)


def test_every_path_in_the_file_map_exists():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## What is where")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_public_names_are_documented_with_what_they_raise_or_return():
    import seqpar

    for name in seqpar.__all__:
        assert len((getattr(seqpar, name).__doc__ or "").strip()) > 40, name
