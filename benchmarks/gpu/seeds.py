"""Train the recipe on Multi30k at the published setting with three seeds, side by side on one GPU, and score each.

    SEQPAR_DATA=... python -m benchmarks.gpu.seeds
    SEQPAR_DATA=... python -m benchmarks.gpu.seeds --dry-run     # some steps on the CPU, one seed

Each run is the recipe's own `train`, `average` and `evaluate`, as in docs/results/translation.md; only the 8,192
tokens of an update are one batch here and not two. A run that has not ended in time is told to stop, saves itself, and
is scored as it is: the table says how many updates it made. The published figure is 41.02.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.parts import RECIPE, out
from benchmarks.loss.results import hardware
from seqpar.markdown_table import markdown_table

CONFIG = "recipes/translation/configs/multi30k_en_de_published.yaml"
SEEDS = (1, 2, 3)
TRAIN_SECONDS = 400
"""After so long a run is told to stop."""
SCORE_SECONDS = 100
STEPS = 8_000
TOLD_EVERY = 10
"""Seconds between two lines of progress."""


class Run(NamedTuple):
    """One seed's folder and training process."""

    seed: int
    folder: Path
    process: subprocess.Popen[bytes]


def started(folder: Path, seed: int, device: str, steps: int) -> Run:
    """Start the training with one seed."""
    run = folder / f"seed-{seed}"
    given = ["--config", CONFIG, "--run", str(run), "--fresh", "--training.devices", f"[{device}]"]
    given += ["--training.seed", str(seed), "--training.batch_tokens", "8192", "--training.accumulate", "1"]
    given += ["--training.steps", str(steps)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"seed-{seed}.log").open("w") as log:
        return Run(seed, run, subprocess.Popen([*RECIPE, "train", *given], stdout=log, stderr=log))


def wait_for(runs: Sequence[Run], seconds: float, steps: int) -> None:
    """Wait until all trainings have ended, or tell those to stop that have not."""
    deadline = time.monotonic() + seconds
    told = time.monotonic()
    while any(run.process.poll() is None for run in runs) and time.monotonic() < deadline:
        time.sleep(0.2)
        if time.monotonic() - told > TOLD_EVERY:
            told = time.monotonic()
            done = ", ".join(f"seed {run.seed}: {steps_of(run.folder):,} of {steps:,}" for run in runs)
            print(f"[seeds] {done}; at most {deadline - told:.0f} s left", file=sys.stderr)
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
    for run in runs:
        run.process.wait()


def records_of(folder: Path) -> list[dict[str, float]]:
    """Return the records of a run's steps."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return []
    # A line that is being written has no end yet
    lines = metrics.read_text().split("\n")[:-1]
    return [record for record in map(json.loads, lines) if "gradient_norm" in record]


def steps_of(folder: Path) -> int:
    """Return how many updates a run has made."""
    return len(records_of(folder))


def bleu_of(run: Run) -> str:
    """Return the lower-case BLEU of the run's averaged model on the test set, or why there is none."""
    scores = run.folder / "scores.json"
    commands = (
        [*RECIPE, "average", "--run", str(run.folder)],
        [*RECIPE, "evaluate", "--run", str(run.folder), "--checkpoint", "averaged"],
    )
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SCORE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"FAIL: {command[3]} took more than {SCORE_SECONDS} s"
        scores.with_suffix(f".{command[3]}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            return f"FAIL: {''.join(done.stderr.strip().splitlines()[-1:])[:100]}"
    (figure,) = (line for line in done.stdout.splitlines() if line.split()[:2] == ["multi-bleu", "-lc"])
    return figure.split()[2]


def row_of(run: Run, seconds: float, steps: int) -> list[str]:
    """Return a seed's row of the table."""
    records = records_of(run.folder)
    if not records:
        return [str(run.seed), "0", "", "", f"FAIL: training ended with {run.process.returncode}"]
    tokens = sum(record["tokens"] for record in records)
    made = f"{len(records):,}"
    if len(records) < steps:
        made += f" of {steps:,}, stopped"
    return [str(run.seed), made, f"{seconds / 60:.1f}", f"{tokens / seconds:,.0f}", bleu_of(run)]


def main() -> int:
    """Print the table, failures first; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="some steps on the CPU, one seed")
    parser.add_argument("--seconds", type=float, default=TRAIN_SECONDS, help="after so long a run is told to stop")
    options = parser.parse_args()
    if "SEQPAR_DATA" not in os.environ:
        parser.error("SEQPAR_DATA is not set: name the folder that holds multi30k/tok")
    folder = out()
    device = "cuda:0"
    seeds = SEEDS
    steps = STEPS
    if options.dry_run:
        device = "cpu"
        seeds = SEEDS[:1]
        steps = 2
    start = time.monotonic()
    runs = [started(folder, seed, device, steps) for seed in seeds]
    wait_for(runs, options.seconds, steps)
    seconds = time.monotonic() - start
    rows = [row_of(run, seconds, steps) for run in runs]
    rows.sort(key=lambda row: "FAIL" not in row[-1])
    header = ["seed", "updates", "minutes", "target tokens/s, side by side", "BLEU on test_2016_flickr"]
    print(f"{markdown_table(header, rows)}\n\n{hardware(device.split(':')[0])}, torch {torch.__version__}")
    return int(any("FAIL" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
