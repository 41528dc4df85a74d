"""Fine-tune a model of a published size with all weights and with LoRA: time of a step, memory, bytes that are kept.

    python -m benchmarks.lora                           # OPUS-MT's size, rank 16, in a temporary folder
    python -m benchmarks.lora m2m100_418M --rank 8 --folder /large/disk

The model has random weights, as in `benchmarks.imports`, and is fine-tuned on sentences of the built-in corpus by the
recipe's `train`. Each run is a process of its own. The first step is not timed; of the others the median counts, in the
processor time of one thread, which other work on the machine does not change. Gradients and moments are counted at the
end of the last step, and memory is the largest resident set, once up to that step, and once of the whole run, with its
validation and what it writes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.imports import MODELS, alone, imported, make, peak
from benchmarks.loss.results import hardware
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.settings.config import load_config
from recipes.translation.train import train
from seqpar.testing.markdown_table import markdown_table

VALID = 8
"""Validation pairs: few, since it is training that is measured."""


class Step(NamedTuple):
    """The state of a process after an optimizer step."""

    seconds: float
    """Processor time so far."""
    trained: int
    """Parameters that are trained."""
    gradients: int
    """Bytes."""
    moments: int
    """Bytes."""
    peak: int
    """Bytes of the largest resident set so far."""


def main() -> None:
    """Measure both runs, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="opus-mt-en-de", choices=MODELS)
    parser.add_argument("--rank", type=int, default=16, help="of A and B (default: 16)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, the first of them untimed (default: 3)")
    parser.add_argument("--tokens", type=int, default=512, help="target tokens in a step (default: 512)")
    parser.add_argument("--folder", help="where the models are written, for as long as it takes")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}, below 2: the first step is not timed")
    settings = {"training.steps": options.steps, "training.batch_tokens": options.tokens}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        write_pairs(folder, options.steps * options.tokens)
        alone(make, options.model, folder / "published")
        alone(imported, options.model, folder / "published", folder / "base")
        rows = []
        for name, rank in (("all weights", 0), (f"LoRA, rank {options.rank}", options.rank)):
            rows.append([name, *measured(folder, {**settings, "training.lora_rank": rank})])
            print(rows[-1], flush=True)
    titles = ["", "trained", "step, CPU time", "gradients", "moments", "memory of the steps", "of the run", "`last`"]
    print(markdown_table(titles, rows))
    print(
        f"\n{options.model}, steps of about {options.tokens:,} target tokens; {date.today()}, {hardware('cpu')}, "
        f"one thread; torch {torch.__version__}"
    )


def write_pairs(folder: Path, count: int) -> None:
    """Write training and validation pairs of the built-in corpus, more than the steps need."""
    found = pairs(VALID + max(100, count // 8), 1)
    for side, language in (("source", "en"), ("target", "de")):
        lines = [f"{getattr(pair, side)}\n" for pair in found]
        (folder / f"valid.{language}").write_text("".join(lines[:VALID]), encoding="utf-8")
        (folder / f"train.{language}").write_text("".join(lines[VALID:]), encoding="utf-8")


def measured(folder: Path, settings: Mapping[str, object]) -> list[str]:
    """Return a row of the table."""
    steps, whole = alone(tuned, folder, dict(settings))
    last = steps[-1]
    seconds = [after.seconds - before.seconds for before, after in itertools.pairwise(steps)]
    size = sum(file.stat().st_size for file in (folder / "tuned" / "checkpoints").glob("*/*"))
    return [
        f"{last.trained / 1e6:.1f} M",
        f"{statistics.median(seconds):.1f} s",
        f"{last.gradients / 1e6:,.0f} MB",
        f"{last.moments / 1e6:,.0f} MB",
        f"{last.peak / 1e9:.2f} GB",
        f"{whole / 1e9:.2f} GB",
        f"{size / 1e6:,.0f} MB",
    ]


def tuned(folder: Path, settings: Mapping[str, object]) -> list[Step]:
    """Fine-tune the imported model; return the state of the process after each step."""
    steps: list[Step] = []

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        gradients = sum(each.grad.nbytes for each in trained if each.grad is not None)
        moments = sum(tensor.nbytes for kept in optimizer.state.values() for tensor in kept.values())
        size = sum(each.numel() for each in trained)
        steps.append(Step(time.process_time(), size, gradients, moments, peak()))

    os.chdir(folder)
    given = {
        "run": "tuned",
        "data.train": ["train.en", "train.de"],
        "data.valid": ["valid.en", "valid.de"],
        "data.source": "en",
        "data.target": "de",
        "training.start_from": "base",
        "training.devices": "[cpu]",
        "training.threads": 1,
        "training.validate_bleu": 0,
        "training.report": False,
        **settings,
    }
    with register_optimizer_step_post_hook(after_step):
        train(load_config("base/best/config.yaml", given), fresh=True)
    return steps


if __name__ == "__main__":
    main()
