"""Measure what a layout of two processes costs on one machine, against one process with the same batch of each step.

    python -m benchmarks.layouts [--rounds 3] [--steps 20] [--precision float32]

Every layout trains the recipe's model on the built-in corpus through `recipes.translation.train`, in processes of its
own. Layouts take turns, and a figure is the median over all timed steps of all rounds. One process has two threads, two
processes have one each: the same two cores. The weights of the last round are compared with those of the first layout:
without dropout they differ by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from benchmarks.loss.results import hardware
from recipes.translation.run_folder.checkpoint import load_weights
from seqpar.testing.markdown_table import markdown_table
from seqpar.testing.peak_memory import process_peak_bytes

WARM_UP = 4
"""Steps at the start that are not timed."""
BATCH: dict[str, Any] = {
    "data.builtin_pairs": 10_000,
    "model.preset": "small",
    "model.dropout": 0.0,
    "training.batch_tokens": 2_048,
    "training.accumulate": 2,
    "training.validate_bleu": 0,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, [cpu]": (1, {"training.devices": "[cpu]"}),
    "one process, [cpu, cpu]": (1, {"training.devices": "[cpu, cpu]"}),
    "data 2 (DDP)": (2, {}),
    "shard 2 (FSDP2)": (2, {"layout.shard": 2}),
    "vocab 2": (2, {"layout.vocab": 2}),
    "sequence 2": (2, {"layout.sequence": 2}),
}


def rank(number: int, world: int, port: int, settings: dict[str, Any], answers: str) -> None:
    """Run one process of a training; write the times of its steps and its peak memory to a file."""
    os.environ.update(OMP_NUM_THREADS=str(2 // world), OMP_WAIT_POLICY="PASSIVE")
    torch.set_num_threads(2 // world)
    if world > 1:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    from recipes.translation import train as training
    from recipes.translation.settings.config import load_config

    times: list[float] = []

    class Timed(training.Progress):
        def step_done(self, state: Any, **values: Any) -> None:
            times.append(time.perf_counter())

        def validated(self, *_: object) -> None:
            pass

    # Only the steps are of interest: no progress line, no validation, no summary
    training.Progress = Timed
    training.summarize = lambda *_: None
    training.validate = lambda *_: training.Validation(0, {"loss": 0.0})
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        training.train(load_config(None, settings), fresh=True)
    steps = [after - before for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    Path(answers, f"{number}.json").write_text(json.dumps({"steps": steps, "peak": process_peak_bytes()}))


class Measured(NamedTuple):
    """Hold one round of a layout: seconds of each step, bytes of the largest process at its peak, and the weights."""

    seconds: list[float]
    peak: int
    weights: dict[str, torch.Tensor]


def measure(layout: str, steps: int, precision: str) -> Measured:
    """Train once in processes of its own."""
    world, changes = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        settings = {**BATCH, **changes, "run": f"{folder}/run", "training.steps": steps}
        settings |= {"training.validate_every": steps, "training.precision": precision}
        # New processes each time: peak memory never falls within one
        mp.spawn(rank, (world, _free_port(), settings, folder), nprocs=world)
        found = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(world)]
        weights = load_weights(Path(folder, "run", "last"))
    return Measured(found[0]["steps"], max(each["peak"] for each in found), weights)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))  # the system chooses one
        return int(listener.getsockname()[1])


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all weights, over the norm of the weights."""
    apart = sum(float((weights[name] - others[name]).double().square().sum()) for name in weights)
    size = sum(float(weight.double().square().sum()) for weight in others.values())
    return float((apart / size) ** 0.5)


def table(times: dict[str, list[float]], last: dict[str, Measured], steps: int) -> str:
    """Return a row for each layout; ratios and distances are to the first one."""
    first = next(iter(times))
    first_seconds = statistics.median(times[first])
    rows = []
    for layout, layout_times in times.items():
        seconds = statistics.median(layout_times)
        ratio = f"{seconds / first_seconds:.2f}"
        apart = f"{distance(last[layout].weights, last[first].weights):.1e}"
        rows.append([layout, f"{seconds:.3f}", ratio, f"{last[layout].peak / 2**20:,.0f}", apart])
    columns = ["layout", "seconds a step", "to one process", "peak MiB of a process"]
    return markdown_table([*columns, f"weights apart after {steps} steps"], rows)


def main() -> None:
    """Measure, and print the table and what it was measured on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the layouts take turns (default: 3)")
    parser.add_argument(
        "--steps", type=int, default=20, help=f"steps a round, {WARM_UP} of them not timed (default: 20)"
    )
    parser.add_argument("--precision", choices=("float32", "float64", "bf16"), default="float32")
    options = parser.parse_args()
    times: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    last: dict[str, Measured] = {}
    for number in range(options.rounds):
        for layout in LAYOUTS:
            last[layout] = measure(layout, options.steps, options.precision)
            seconds = last[layout].seconds
            times[layout] += seconds
            median = statistics.median(seconds)
            print(f"[round {number + 1}] {layout}: {median:.3f} s a step", file=sys.stderr, flush=True)
    print(table(times, last, options.steps))
    print(f"\n{date.today()}, torch {torch.__version__}, {hardware('cpu')}, {options.precision}")
    print("The recipe's small model, 2 x 2,048 target tokens a step.")


if __name__ == "__main__":
    main()
