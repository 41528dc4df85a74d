"""Measure target tokens a second of the Multi30k recipe on one GPU: the engine, the plain loss, and two ranks.

    python -m benchmarks.gpu.training                 # SEQPAR_DATA is the folder that holds multi30k/
    python -m benchmarks.gpu.training --steps 300

The recipe's own `train` runs, data loading included, at the setting whose published result is 41.02 BLEU: 4+4 layers of
d_model 128, 10,000 joint subwords, 8,192 target tokens an update, dropout 0.3, smoothing 0.1. "Plain loss" is the same
with all logits at once (`F.cross_entropy`). Two ranks share the one GPU and reduce over gloo, each with half of the
tokens: that shows that it works, not how fast it could be. Nothing is validated; the first steps do not count.
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
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.prepare import prepare
from recipes.translation.settings.config import load_config
from recipes.translation.train import train
from seqpar.testing.markdown_table import markdown_table

CONFIG = "recipes/translation/configs/multi30k_en_de.yaml"
PUBLISHED = {
    "subwords.vocab_size": "10000",
    "training.warmup": "2000",
    "training.validate_every": "1000000",
}
WARM_UP = 20
"""Steps that are not counted."""


def plain_loss(engine: Any, hidden: Tensor | list[Tensor], target: Tensor, **_: Any) -> seqpar.TokenLoss:
    """Compute all logits at once, in place of `LossCompute.forward`; scattered hidden states have one part."""
    if not isinstance(hidden, Tensor):
        (hidden,) = hidden
    criterion = engine.head["criterion"]
    ignored = criterion.ignore_index
    logits = engine.head["generator"](hidden).flatten(0, -2)
    total = F.cross_entropy(
        logits, target.flatten(), ignore_index=ignored, label_smoothing=criterion.label_smoothing, reduction="sum"
    )
    return seqpar.TokenLoss(total, (target != ignored).sum())


def settings(run: str, steps: int, batch_tokens: int, precision: str, devices: list[str]) -> Any:
    """Return the published setting for so many steps and tokens of a step, with a device for each rank."""
    given = {"run": run, "training.steps": str(steps), "training.precision": precision}
    given["training.batch_tokens"] = str(batch_tokens)
    return load_config(CONFIG, PUBLISHED | given | {"training.devices": f"[{', '.join(devices)}]"})


def rate(folder: str, steps: int, batch_tokens: int, precision: str, how: str, device: str) -> float:
    """Return target tokens a second over the steps after the first ones, timed by the lines of the run's metrics."""
    run = str(Path(folder, f"{how}-{precision}"))
    launch = ["-m"]
    if how == "two ranks":  # "--" keeps torchrun from taking --run for one of its own options
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command = [sys.executable, *launch, "benchmarks.gpu.training", "--child", how, "--run", run]
    # It never reaches its last step: it is stopped when enough steps are timed
    command += ["--steps", str(100 * steps), "--precision", precision, "--device", device]
    command += ["--batch-tokens", str(batch_tokens)]
    metrics = Path(run, "metrics.jsonl")
    output = Path(f"{run}.log")
    started = 0.0
    with output.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while process.poll() is None:
            lines: list[str] = []
            if metrics.exists():
                lines = metrics.read_text().splitlines()
            # The clock starts at the first look that finds the warm-up done; only the lines after that look are counted
            if len(lines) >= WARM_UP and not started:
                started = time.perf_counter()
                first = len(lines)
            if len(lines) >= steps:
                break
            time.sleep(0.002)
        seconds = time.perf_counter() - started
        done = process.poll() is None
        process.terminate()  # a run that is told to stop saves itself and ends
    if not done or not started:
        end = f"training ended with {process.returncode} before step {steps}"
        raise SystemExit(f"{how}, {precision}: {end}\n{output.read_text()[-2000:]}")
    counted = metrics.read_text().splitlines()[first:steps]
    found = sum(json.loads(line)["tokens"] for line in counted) / seconds
    print(f"[training] {how}, {precision}: {found:,.0f} target tokens/s", file=sys.stderr)
    return found


def table(steps: int, batch_tokens: int, device: str) -> str:
    """Return the table, with ratios to one rank with the engine in the same precision, and what it was measured on."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Corpora(settings(str(Path(folder, "subwords")), steps, batch_tokens, "float32", [device])))
        for precision in ("float32", "bf16"):
            found: dict[str, float] = {}
            for how in ("one rank", "plain loss", "two ranks"):
                found[how] = rate(folder, steps, batch_tokens, precision, how, device)
                rows.append([how, precision, f"{found[how]:,.0f}", f"{found[how] / found['one rank']:.2f}"])
    lines = markdown_table(["Multi30k recipe", "dtype", "target tokens/s", "to one rank"], rows)
    return f"{lines}\n\n{hardware(device)}, torch {torch.__version__}, {steps - WARM_UP} steps each"


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help=f"of each run; the first {WARM_UP} do not count")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="target tokens of a step")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, some steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        options.device = "cpu"
        options.steps = WARM_UP + 2
        options.batch_tokens = 256
    if options.child is None:
        print(table(options.steps, options.batch_tokens, options.device))
        return
    devices = [options.device]
    if options.child == "two ranks":
        devices = 2 * devices
    config = settings(options.run, options.steps, options.batch_tokens, options.precision, devices)
    if options.child == "plain loss":
        with patch.object(seqpar.LossCompute, "forward", plain_loss):
            train(config)
    else:
        train(config)


if __name__ == "__main__":
    main()
