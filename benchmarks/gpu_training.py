"""Target tokens a second of the Multi30k recipe on one GPU: with the engine, with the plain loss, and by two ranks.

    python -m benchmarks.gpu_training                 # SEQPAR_DATA is the folder that holds multi30k/
    python -m benchmarks.gpu_training --steps 300

The recipe's own `train`, data loading included, at the setting whose published result is 41.02 BLEU: 4+4 layers of
d_model 128, 10,000 joint subwords, 8,192 target tokens an update, dropout 0.3, smoothing 0.1. "Plain" is the same run
whose loss has all logits at once (`F.cross_entropy`). Two ranks share the one GPU and reduce over gloo, as a test of
the way and not of its speed: each has half of the tokens. Nothing is validated; the first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import seqpar
from benchmarks.loss.results import hardware
from recipes.translation.data.prepare import prepare
from recipes.translation.settings.config import load_config
from recipes.translation.train import train

CONFIG = "recipes/translation/configs/multi30k_en_de.yaml"
PUBLISHED = {
    "subwords.vocab_size": "10000",
    "training.batch_tokens": "8192",
    "training.warmup": "2000",
    "training.validate_every": "1000000",
}
WARM_UP = 20
"""Steps that are not counted."""


def plain_loss(engine: Any, hidden: Tensor | list[Tensor], target: Tensor, **_: Any) -> seqpar.TokenLoss:
    """All logits at once, in place of `LossCompute.forward`; a list is of the one device that there is."""
    (hidden,) = [hidden] if isinstance(hidden, Tensor) else hidden
    generator, criterion = engine.head["generator"], engine.head["criterion"]
    logits, ignored = generator(hidden).flatten(0, -2), criterion.ignore_index
    options = {"ignore_index": ignored, "label_smoothing": criterion.smoothing, "reduction": "sum"}
    return seqpar.TokenLoss(F.cross_entropy(logits, target.flatten(), **options), (target != ignored).sum())


def settings(run: str, steps: int, precision: str, devices: list[str]) -> Any:
    """The published setting, for so many steps; a device for each rank."""
    given = {"run": run, "training.steps": str(steps), "training.precision": precision}
    return load_config(CONFIG, PUBLISHED | given | {"training.devices": f"[{', '.join(devices)}]"})


def rate(folder: str, steps: int, precision: str, how: str, device: str) -> float:
    """Target tokens a second over the steps after the first ones, as the lines of its metrics appear."""
    run = str(Path(folder, f"{how}-{precision}"))
    launch = ["-m"]
    if how == "two ranks":  # "--" keeps torchrun from taking --run for one of its own options
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command = [sys.executable, *launch, "benchmarks.gpu_training", "--child", how, "--run", run]
    command += ["--steps", str(100 * steps), "--precision", precision, "--device", device]
    metrics, said, started = Path(run, "metrics.jsonl"), Path(f"{run}.log"), 0.0
    with said.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while process.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if len(lines) >= WARM_UP and not started:
                started, first = time.perf_counter(), len(lines)
            if len(lines) >= steps:
                break
            time.sleep(0.002)
        seconds, done = time.perf_counter() - started, process.poll() is None
        process.terminate()  # a run that is told to stop saves itself and ends
    if not done or not started:
        end = f"training ended with {process.returncode} before step {steps}"
        raise SystemExit(f"{how}, {precision}: {end}\n{said.read_text()[-2000:]}")
    tokens = [json.loads(line)["tokens"] for line in metrics.read_text().splitlines()[:steps]]
    print(f"[training] {how}, {precision}: {sum(tokens[first:]) / seconds:,.0f} target tokens/s", file=sys.stderr)
    return sum(tokens[first:]) / seconds


def table(steps: int, device: str) -> str:
    """Markdown; ratios are to one rank with the engine in the same precision."""
    lines = ["| Multi30k recipe | dtype | target tokens/s | to one rank |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        prepare(settings(str(Path(folder, "subwords")), steps, "float32", [device]))
        for precision in ("float32", "bf16"):
            found = {}
            for how in ("one rank", "plain loss", "two ranks"):
                found[how] = rate(folder, steps, precision, how, device)
                ratio = found[how] / found["one rank"]
                lines.append(f"| {how} | {precision} | {found[how]:,.0f} | {ratio:.2f} |")
    where = hardware(device)
    return "\n".join([f"{where}, torch {torch.__version__}, {steps - WARM_UP} steps each", "", *lines])


def main() -> None:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each run, the first ones not counted")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None:
        print(table(options.steps, options.device))
        return
    devices = [options.device] * (2 if options.child == "two ranks" else 1)
    config = settings(options.run, options.steps, options.precision, devices)
    if options.child == "plain loss":
        with patch.object(seqpar.LossCompute, "forward", plain_loss):
            train(config)
    else:
        train(config)


if __name__ == "__main__":
    main()
