"""Draw the diagrams of the pages, narrow enough for a phone and readable on light and dark backgrounds alike.

python -m docs.pictures      # writes docs/concepts.svg, layouts.svg, smoothing.svg and row-function.svg
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import torch

from benchmarks.loss.plots import INK, OTHERS, OURS_BLUE, use_style
from seqpar import LabelSmoothing
from seqpar.rows.conventions import CONVENTIONS, Convention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 266
"""Points: 355 pixels of a page, which a phone shows unreduced."""
LINE = 13
"""From one line of text to the next."""


def drawing(height: float) -> tuple[Figure, Axes]:
    """Return a figure and axes that count in points from the upper left corner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, text: str, colour: str = OURS_BLUE, height: float | None = None
) -> float:
    """Draw a frame around lines of text, the first of them bold, or higher than these; return its height."""
    from matplotlib.patches import FancyBboxPatch

    first, *rest = text.split("\n")
    if height is None:
        height = LINE * (1 + len(rest)) + 8
    style = "round,pad=0,rounding_size=4"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fill=False, edgecolor=colour))
    axes.text(x + 7, y + LINE, first, color=colour, weight="bold", fontsize=9)
    for number, each in enumerate(rest, 2):
        axes.text(x + 7, y + number * LINE, each, fontsize=9)
    return height


def line(axes: Axes, *points: tuple[float, float], colour: str = INK, head: str = "") -> None:
    """Draw a line through points, with a marker of matplotlib's as its arrowhead if one is given."""
    axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2)
    axes.plot(*points[-1], head, color=colour, markersize=5)


CHUNKS = (
    ("done", INK),
    ("its logits exist", OURS_BLUE),
    ("waits", INK),
)
"""What the chunks of a device are doing at one moment."""


def draw_step(file: Path) -> None:
    """Write the way of the hidden states through a step, and of their gradient back."""
    figure, axes = drawing(372)
    width, gap = WIDTH - 28, 8
    box(axes, 4, 4, width, "encoder-decoder\nplain, or in DataParallel, DDP or FSDP2", INK)
    line(axes, (12, 38), (12, 62), head="v")
    axes.text(22, 54, "scatter: hidden states, no padding", fontsize=9)
    half = (width - gap) / 2
    for device in (0, 1):
        left = 4 + device * (half + gap)
        box(axes, left, 66, half, f"device {device}\ngenerator, criterion", INK, height=218)
        for number, (state, colour) in enumerate(CHUNKS):
            box(axes, left + 7, 102 + 42 * number, half - 14, f"chunk {number + 1}\n{state}", colour)
        for number, text in enumerate(("stored: gradients of", "its hidden states and", "parameters"), 1):
            axes.text(left + 7, 226 + LINE * number, text, color=OURS_BLUE, fontsize=9)
    line(axes, (12, 284), (12, 308), head="v")
    axes.text(22, 300, "gather: sums", fontsize=9)
    node = "TokenLoss\ntotal, tokens; one autograd node\nbackward: the stored gradients, times a factor"
    box(axes, 4, 314, width, node, INK)
    line(axes, (WIDTH - 24, 340), (WIDTH - 14, 340), (WIDTH - 14, 22), (WIDTH - 22, 22), colour=OURS_BLUE, head="<")
    way_back = "one backward: every hook fires once"
    axes.text(WIDTH - 9, 180, way_back, rotation=90, ha="left", va="center", color=OURS_BLUE, fontsize=9)
    save(figure, file)


LAYOUTS = (
    (
        "nothing",
        (
            ("one process", "DataParallel", "LossCompute(..., devices)"),
            ("several processes", "DDP", "LossCompute inside ModelWithLoss"),
        ),
    ),
    (
        "weights, gradients or moments",
        (
            ("tens of ranks", "FSDP2", "fully_shard, then ModelWithLoss"),
            ("hundreds of ranks", "HSDP", "a 2-D mesh for fully_shard"),
        ),
    ),
    (
        "the projection (V x D)",
        (
            ("one machine", "Split vocabulary", "VocabShard"),
            ("several machines", "Data x vocabulary", "VocabShard in each, DDP over them"),
        ),
    ),
    ("a sequence", (("", "Split sequence", "split_time, next_token_targets"),)),
    ("the layers, in one process", (("", "Layers on several devices", "place"),)),
)
"""What does not fit on one device; then, by a second condition, the layout and what to call."""


def draw_layouts(file: Path) -> None:
    """Write the tree of conditions that leads to a layout."""
    figure, axes = drawing(560)
    axes.text(4, 16, "What does not fit on one device?", weight="bold", fontsize=10.5)
    y = 24.0
    for condition, answers in LAYOUTS:
        branch = y + 14
        line(axes, (10, branch), (22, branch))
        axes.text(26, branch + 3.5, condition, fontsize=10)
        y += 26
        for more, layout, call in answers:
            middle = y + 8
            line(axes, (32, branch + 9), (32, middle), (42, middle))
            if more:
                axes.text(46, middle + 3.5, more, fontsize=9)
                y += 16
            y += 4 + box(axes, 46, y, WIDTH - 50, f"{layout}\n{call}")
    line(axes, (10, 22), (10, branch))
    save(figure, file)


CLASSES = ("padding", "class 1", "target", "class 3", "class 4", "class 5")
EPS = 0.6


def smoothed_target(convention: Convention) -> list[float]:
    """Return the distribution that the criterion trains towards: softmax(z) less its gradient, where all z are 0."""
    logits = torch.zeros(1, len(CLASSES), dtype=torch.float64, requires_grad=True)
    criterion = LabelSmoothing(EPS, convention, ignore_index=CLASSES.index("padding"))
    (gradient,) = torch.autograd.grad(criterion(logits, torch.tensor([CLASSES.index("target")])), logits)
    share: list[float] = (logits.detach().softmax(-1) - gradient)[0].tolist()
    return share


def draw_smoothing(file: Path) -> None:
    """Write the target distribution of each convention, as the criterion has it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, 6.2), layout="constrained")
    panels = figure.subplots(len(CONVENTIONS), 1)
    for axes, (name, shares) in zip(panels, CONVENTIONS.items(), strict=True):
        q = smoothed_target(name)
        kept = [(1 - EPS) * (each == "target") for each in CLASSES]
        axes.bar(CLASSES, kept, color=OTHERS, width=0.6, label="1 - eps")
        bars = axes.bar(CLASSES, [a - b for a, b in zip(q, kept, strict=True)], bottom=kept, color=OURS_BLUE, width=0.6)
        bars.set_label("share of eps")
        axes.bar_label(bars, [f"{each:.3g}" for each in q], color=INK, fontsize=9, padding=1)
        axes.set_title(f'"{name}"', color=OURS_BLUE, loc="left", fontsize=10.5, weight="bold", pad=30)
        said = fill(shares.text, 44)
        axes.annotate(said, (0, 1), (0, 26), xycoords="axes fraction", textcoords="offset points", va="top", fontsize=9)
        axes.set_ylim(0, 0.56)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", length=0, labelsize=7.5)
    panels[0].legend(frameon=False, loc="upper right", fontsize=9)
    figure.supxlabel(f"V = {len(CLASSES)} classes, eps = {EPS}", fontsize=9)
    save(figure, file)


SCORES = (
    ("log_prob", "log p of the target", "cross-entropy,\nDPO, GRPO"),
    ("weighted", "sum of w log p", "label smoothing"),
    ("lse", "log-sum-exp", "z-loss"),
    ("entropy", "- sum of p log p", "entropy bonus"),
    ("log_probs_at", "log p of given classes", "top-k teachers,\nsoft targets"),
    ("log_rest", "log p of all others", 'top-k teachers,\n"one_class"'),
)
"""A score, what it is, and which losses are functions of it."""


def draw_row_function(file: Path) -> None:
    """Write which few scores all losses are functions of, and the way back to the logits."""
    figure, axes = drawing(396)
    left, right = 20, 152
    box(axes, 4, 4, WIDTH - 8, "z: one row of logits\nV numbers, of one chunk of rows at a time", INK)
    axes.text(right, 58, "used by", fontsize=9)
    line(axes, (10, 38), (10, 347), head="v")
    y = 66.0
    for name, meaning, losses in SCORES:
        line(axes, (10, y + 17), (left, y + 17))
        box(axes, left, y, right - left - 8, f"{name}\n{meaning}")
        for number, text in enumerate(losses.split("\n"), 1):
            axes.text(right, y + LINE * number + (0 if "\n" in losses else 7), text, fontsize=9)
        y += 46
    box(axes, 4, 352, WIDTH - 8, "loss of the row\nits derivatives: one number per score", INK)
    line(axes, (WIDTH - 8, 352), (WIDTH - 8, 44), colour=OURS_BLUE, head="^")
    way_back = "gradient of every logit: one formula, in place"
    axes.text(WIDTH - 12, 205, way_back, rotation=90, ha="right", va="center", color=OURS_BLUE, fontsize=9)
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    """Write a figure whose bytes depend on what it shows alone."""
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


def draw(folder: Path) -> None:
    """Write all diagrams into a folder."""
    use_style()
    draw_step(folder / "concepts.svg")
    draw_layouts(folder / "layouts.svg")
    draw_smoothing(folder / "smoothing.svg")
    draw_row_function(folder / "row-function.svg")


if __name__ == "__main__":
    draw(Path(__file__).parent)
