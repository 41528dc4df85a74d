"""Measure what a call costs beside its arithmetic: microseconds on a tiny batch, Python calls, files and frames.

    python -m benchmarks.overhead

One thread, its CPU time. Every way is called in turn, round after round; a figure is the median of the rounds, each the
mean of its calls, with the fastest round behind it. Ratios are to plain PyTorch, of the fastest rounds: what else runs
on the machine only adds. Calls, files and frames are those of seqpar in the forward: frames from the public function,
which is the first, to the one that calls the first matrix product.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from benchmarks.loss.results import hardware
from seqpar.testing.markdown_table import markdown_table

ROWS, WIDTH, CLASSES = 8, 16, 32
BLOCKS = 22
"""Five submodules each; with the projection that makes 111."""
PRODUCTS = ("mm", "addmm", "matmul", "linear")
PLAIN = "plain"
DEEP = f"{5 * BLOCKS + 1} submodules"


class Block(nn.Module):
    """A layer of a generator: a normalised bottleneck beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.ReLU()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden with the bottleneck's output added."""
        added: Tensor = self.down(self.activation(self.up(self.norm(hidden))))
        return hidden + added


class Way(NamedTuple):
    """A way to compute a loss, and the tensors that get gradients."""

    loss: Callable[[], Tensor]
    leaves: list[Tensor]

    def step(self) -> None:
        """Compute the loss and its gradients."""
        self.loss().backward()
        for leaf in self.leaves:
            leaf.grad = None


def ways() -> dict[tuple[str, str], Way]:
    """Return the ways by what they project with and by name, `PLAIN` first."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    target = torch.randint(CLASSES, (ROWS,))
    linear = nn.Linear(WIDTH, CLASSES)
    deep = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    engines = {"one projection": seqpar.LossCompute(linear, criterion), DEEP: seqpar.LossCompute(deep, criterion)}
    weight, bias = linear.weight, linear.bias
    functions: dict[tuple[str, str], Callable[[], Tensor]] = {
        ("one projection", PLAIN): lambda: F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum"),
        ("one projection", "linear_cross_entropy"): lambda: (
            seqpar.linear_cross_entropy(hidden, weight, target, bias=bias).total
        ),
        ("one projection", "token_scores"): lambda: (
            -seqpar.token_scores(hidden, weight, target, bias=bias).log_prob.sum()
        ),
        ("one projection", "LossCompute"): lambda: engines["one projection"](hidden, target).total,
        (DEEP, PLAIN): lambda: criterion(deep(hidden), target),
        (DEEP, "LossCompute"): lambda: engines[DEEP](hidden, target).total,
    }
    leaves = {"one projection": [hidden, weight, bias], DEEP: [hidden, *deep.parameters()]}
    return {key: Way(function, leaves[key[0]]) for key, function in functions.items()}


def microseconds(functions: dict[Any, Callable[[], object]], rounds: int, calls: int) -> dict[Any, list[float]]:
    """Return the microseconds of a call in each round, for each function; the first rounds only warm up."""
    found: dict[Any, list[float]] = {key: [] for key in functions}
    for number in range(-2, rounds):
        for key, function in functions.items():
            started = time.process_time()
            for _ in range(calls):
                function()
            spent = (time.process_time() - started) / calls * 1e6
            if number >= 0:
                found[key].append(spent)
    return found


class Walk(NamedTuple):
    """What a call runs of seqpar until it returns."""

    calls: int
    files: int
    frames: int
    """On the stack when the first matrix product is called, the public function included; 0 if there is none."""


def walked(function: Callable[[], object]) -> Walk:
    """Return the walk of one call of the function, which has been called before."""
    package = str(Path(seqpar.__file__).parent)
    calls: list[str] = []
    frames: list[int] = []

    def is_inside(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(package)

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_inside(frame):
            calls.append(frame.f_code.co_filename)
        elif event == "c_call" and not frames and argument.__name__ in PRODUCTS:
            stack: FrameType | None = frame
            inside = 0
            while stack is not None:
                inside += is_inside(stack)
                stack = stack.f_back
            if inside:
                frames.append(inside)

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Walk(len(calls), len(set(calls)), sum(frames))


def table(rounds: int, calls: int) -> str:
    """Return the table of all ways."""
    found = ways()
    # Warnings and caches of a first call are none of the later ones'
    for way in found.values():
        way.step()
    walks = {key: walked(way.loss) for key, way in found.items()}
    forward = microseconds({key: way.loss for key, way in found.items()}, rounds, calls)
    both = microseconds({key: way.step for key, way in found.items()}, rounds, calls)
    rows = []
    for generator, name in found:
        cells = [generator, name]
        for spent in (forward, both):
            mine, plain = (min(spent[generator, way]) for way in (name, PLAIN))
            cells += [f"{statistics.median(spent[generator, name]):,.0f} ({mine:,.0f})", f"{mine / plain:.1f}"]
        walk = walks[generator, name]
        rows.append([*cells, *(str(number) if number else "" for number in walk)])
    titles = ["generator", "way", "forward, us", "ratio", "forward and backward, us", "ratio"]
    return markdown_table([*titles, "Python calls", "files", "frames"], rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="how often every way is timed")
    parser.add_argument("--calls", type=int, default=20, help="calls of a way in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table(options.rounds, options.calls))
    print(
        f"\n{ROWS} rows x {WIDTH} x {CLASSES} classes; {date.today()}, {hardware('cpu')}, {torch.get_num_threads()} "
        f"thread, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
