"""Train the recipe on Multi30k at the published setting with one seed after the other, each where it was stopped.

    SEQPAR_DATA=... python -m benchmarks.gpu.seeds
    SEQPAR_DATA=... python -m benchmarks.gpu.seeds --dry-run     # some steps on the CPU, one seed

Each run is the recipe's own `train`, `average` and `evaluate`, as in docs/results/translation.md; only the 8,192
tokens of an update are one batch here and not two. A training is told to stop in time, saves itself, and goes on with
the next call where the folder OUT is the same. Only a training that has ended is scored. The published figure is 41.02.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.figures import options_of, tell
from benchmarks.gpu.parts import RECIPE, out

CONFIG = "recipes/translation/configs/multi30k_en_de_published.yaml"
SEEDS = (1, 2, 3)
SECONDS = 100
"""After so long the training that runs is told to stop."""
TOKENS = 8192
STEPS = 8_000


def train(folder: Path, seed: int, device: str, tokens: int, steps: int, seconds: float) -> int:
    """Train with one seed from where it was stopped, at most so long; return how the process ended."""
    given = ["--config", CONFIG, "--run", str(folder), "--training.devices", f"[{device}]"]
    given += ["--training.seed", str(seed), "--training.batch_tokens", str(tokens), "--training.accumulate", "1"]
    given += ["--training.steps", str(steps)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("a") as log:
        process = subprocess.Popen([*RECIPE, "train", *given], stdout=log, stderr=log)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            return process.wait()


def steps_of(folder: Path) -> int:
    """Return how many updates a run has made."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return 0
    # A line that is being written has no end yet
    records = map(json.loads, metrics.read_text().split("\n")[:-1])
    return max((int(record["step"]) for record in records if "gradient_norm" in record), default=0)


def run_quietly(command: Sequence[str]) -> str:
    """Return what a command prints; raise SystemExit with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("".join(done.stderr.strip().splitlines()[-1:]))
    return done.stdout


def bleu_of(folder: Path) -> float:
    """Return the lower-case BLEU of a run's averaged model on the test set."""
    run_quietly([*RECIPE, "average", "--run", str(folder)])
    scores = run_quietly([*RECIPE, "evaluate", "--run", str(folder), "--checkpoint", "averaged"])
    (figure,) = (line for line in scores.splitlines() if line.split()[:2] == ["multi-bleu", "-lc"])
    return float(figure.split()[2])


def main() -> None:
    """Tell each seed's updates, and its BLEU once it has made all of them."""
    options = options_of(__doc__)
    if "SEQPAR_DATA" not in os.environ:
        raise SystemExit("SEQPAR_DATA is not set: name the folder that holds multi30k/tok")
    device, seeds, tokens, steps = "cuda:0", SEEDS, TOKENS, STEPS
    if options.dry_run:
        device, seeds, tokens, steps = "cpu", SEEDS[:1], 256, 2
    deadline = time.monotonic() + SECONDS
    for seed in seeds:
        folder = out() / f"seed-{seed}"
        if (left := deadline - time.monotonic()) < 1:
            break
        code = train(folder, seed, device, tokens, steps, left) if steps_of(folder) < steps else 0
        made = steps_of(folder)
        tell(f"Multi30k, seed {seed}", updates=made, of=steps, ended=code)
        if made == steps:
            tell(f"Multi30k, seed {seed}", bleu=bleu_of(folder))


if __name__ == "__main__":
    main()
