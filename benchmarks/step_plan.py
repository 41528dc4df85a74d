"""Hold `seqpar.step_plan` against published trainings, and draw what it says.

    python -m benchmarks.step_plan                                  # the table in docs/scaling.md
    python -m benchmarks.step_plan --picture docs/scaling.svg       # efficiency against devices

The rate comes from the smallest size of each training, the larger sizes are predicted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.loss.plots import use_style
from seqpar.links import LINKS
from seqpar.step_plan import Layout, Training, rate_of, step_plan
from seqpar.testing.markdown_table import markdown_table


class Published(NamedTuple):
    """Published throughputs of one training, by the number of devices; the smallest one calibrates."""

    name: str
    layout: Layout
    training: Training
    measured: dict[int, float]
    unit: str
    per_unit: float
    """Tokens per second and device of one unit."""


H100 = 989.4e12
"""Operations per second of an H100 in bfloat16, dense: NVIDIA's data sheet."""

LLAMA = Training(parameters=8_030_261_248, layers=32, d=4096, vocab=128_256, length=8192, local_batch=2, micro_batch=2)
GPT3 = Training(
    parameters=177_000_000_000,
    layers=96,
    d=12_288,
    vocab=131_072,
    length=4096,
    batch=1152,
    vocab_ranks=8,
    stages=6,
    interleave=8,
)
SMALL = Training(
    parameters=1_342_177_280,
    layers=16,
    d=2048,
    vocab=131_072,
    tied=True,
    length=4096,
    batch=256,
    between=LINKS["efa"],
)
PUBLISHED = (
    Published("torchtitan, Llama 3.1 8B", "fsdp", LLAMA, {8: 5762, 128: 5605}, "tokens/s/GPU", 1.0),
    Published(
        "Megatron-LM, GPT-3 177B", "pipeline", GPT3, {96: 47, 2304: 44, 4608: 42}, "% MFU", 0.01 * H100 / GPT3.flops
    ),
    Published(
        "nanotron, 1.34B",
        "ddp",
        SMALL,
        {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38},
        "tokens/s/GPU",
        1.0,
    ),
)
"""Sources are in docs/scaling.md."""


def rate(run: Published) -> float:
    """Return the rate of a device, from the smallest size alone."""
    smallest = min(run.measured)
    return rate_of(run.training, run.measured[smallest] * run.per_unit, smallest, run.layout)


def published_table() -> str:
    """Return the table of predicted against published figures."""
    rows = []
    for run in PUBLISHED:
        calibrated = rate(run)
        for devices, figure in run.measured.items():
            said = step_plan(run.training, calibrated, devices, run.layout).tokens_per_second / run.per_unit
            error = f"{said / figure - 1:+.1%}" if devices > min(run.measured) else "calibrates"
            rows.append([run.name, run.layout, str(devices), run.unit, f"{figure:,.0f}", f"{said:,.0f}", error])
    return markdown_table(["training", "layout", "GPUs", "unit", "published", "predicted", "error"], rows)


COLOURS = ("#1f7ae0", "#d9822b", "#2f9e63")


def draw(file: Path) -> None:
    """Write efficiency against devices, up to 4,096, and the published figures, as an SVG."""
    use_style()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(PUBLISHED, COLOURS, strict=True):
        calibrated = rate(run)
        plans = [step_plan(run.training, calibrated, devices, run.layout) for devices in _sizes(run)]
        first = min(run.measured)
        efficiency = [100 * plan.tokens_per_second / (run.measured[first] * run.per_unit) for plan in plans]
        axes.plot([plan.devices for plan in plans], efficiency, color=colour, label=f"{run.name}, {run.layout}")
        dots = [100 * figure / run.measured[first] for figure in run.measured.values()]
        axes.plot(list(run.measured), dots, "o", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**power for power in range(3, 13)], [f"{2**power:,}" for power in range(3, 13)])
    axes.set_ylim(0, 105)
    axes.set_xlabel("devices")
    axes.set_ylabel("throughput per device, % of the smallest size")
    axes.legend(frameon=False, loc="lower left", title="lines: predicted; dots: published")
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


def _sizes(run: Published) -> list[int]:
    """Return the smallest size times powers of two and what was measured, as far as there is a sequence for each."""
    first = min(run.measured)
    batch = run.training.batch
    most = batch * run.training.stages * (run.training.vocab_ranks or 1) if batch else 4096
    doubled = {first * 2**power for power in range(10)}
    return sorted(size for size in doubled | run.measured.keys() if size <= min(most, 4608))


def main() -> None:
    """Print the table, or write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="write efficiency against devices to this SVG file instead")
    options = parser.parse_args()
    if options.picture is not None:
        draw(options.picture)
    else:
        print(published_table())


if __name__ == "__main__":
    main()
