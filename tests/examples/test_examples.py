"""Every example runs as its first lines say, and what it trains gets better."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def command(example: Path) -> list[str]:
    """What its docstring says to run it with: `python ...` or `torchrun ...`."""
    (line,) = re.findall(r"Run it with `((?:python|torchrun) [^`]*)`", example.read_text())
    program, *arguments = line.split()
    launch = [] if program == "python" else ["-m", "torch.distributed.run"]
    return [sys.executable, *launch, *arguments]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_says_and_its_loss_falls(example: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command(example), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 2, done.stdout
    assert losses[-1] < 0.8 * losses[0], done.stdout


def test_there_is_an_example_for_each_way_to_use_it() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "annotated_2018",
        "copy_generator",
        "ddp",
        "distillation",
        "fsdp2",
        "hf_trainer",
        "language_model",
        "lightning_module",
        "own_loop",
        "vocabulary_split",
    }
