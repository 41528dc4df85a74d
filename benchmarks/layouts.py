"""What a layout of two processes costs here, against one process with the same batch of each step; and what it changes.

    python -m benchmarks.layouts [--rounds 3] [--steps 20] [--precision float32]

Every layout trains the recipe's model on the built-in corpus through `recipes.translation.train`, in processes of its
own; layouts take turns, and each one's figure is the median over all timed steps of all rounds. One process has two
threads, each of two processes one: the same two cores. The weights of the last round are compared with those of the
first layout: without dropout they differ by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

WARM_UP = 4
"""Steps that are not timed."""
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
    """One process of a run; leaves the times of its steps and its peak memory."""
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

        def validated(self, state: Any, found: object) -> None:
            pass

    training.Progress = Timed
    training.summarize = lambda *_: None
    training.validate = lambda *_: training.Validation(0, 0.0, 0.0, 0.0, None)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        training.train(load_config(None, settings), fresh=True)
    steps = [after - before for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(answers, f"{number}.json").write_text(json.dumps({"steps": steps, "peak": peak}))


def measured(layout: str, steps: int, precision: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Seconds of each step, MiB of the largest process at its peak, and the weights."""
    world, changes = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        settings = {**BATCH, **changes, "run": f"{folder}/run", "training.steps": steps}
        settings |= {"training.validate_every": steps, "training.precision": precision}
        mp.spawn(rank, (world, port, settings, folder), nprocs=world)
        found = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(world)]
        weights = load_file(f"{folder}/run/last/model.safetensors")
    return found[0]["steps"], max(each["peak"] for each in found), weights


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights, over the norm of the weights."""
    apart = sum(float((weights[name] - others[name]).double().square().sum()) for name in weights)
    return float((apart / sum(float(weight.double().square().sum()) for weight in others.values())) ** 0.5)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the layouts take turns (default: 3)")
    parser.add_argument(
        "--steps", type=int, default=20, help=f"steps a round, {WARM_UP} of them not timed (default: 20)"
    )
    parser.add_argument("--precision", choices=("float32", "float64", "bf16"), default="float32")
    options = parser.parse_args()
    times: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    peaks: dict[str, float] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(options.rounds):
        for layout in LAYOUTS:
            steps, peaks[layout], weights[layout] = measured(layout, options.steps, options.precision)
            times[layout] += steps
            print(f"[round {number + 1}] {layout}: {statistics.median(steps):.3f} s a step", flush=True)
    one = next(iter(LAYOUTS))
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, {options.precision}, small model, 2 x 2,048 target "
        f"tokens a step\n\n| layout | seconds a step | to one process | peak MiB of a process | weights apart after "
        f"{options.steps} steps |\n|---|---|---|---|---|"
    )
    for layout, steps in times.items():
        seconds = statistics.median(steps)
        print(
            f"| {layout} | {seconds:.3f} | {seconds / statistics.median(times[one]):.2f} | {peaks[layout]:,.0f} | "
            f"{distance(weights[layout], weights[one]):.1e} |"
        )


if __name__ == "__main__":
    main()
