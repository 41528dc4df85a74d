"""Draw the measurements, readable on light and dark backgrounds alike."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks.loss import targets
from benchmarks.loss.implementations import ENGINE, OURS, PLAIN
from benchmarks.loss.problems import SHAPES
from benchmarks.loss.results import MIB, Results, floor_seconds, median
from benchmarks.loss.targets import shape_title

INK = "#75808c"
"""A grey that stands out from white and from near-black."""
OTHERS = "#8c959f"
OURS_BLUE = "#1f7ae0"


def use_style() -> None:
    """Make matplotlib write SVG files whose text remains text, and whose bytes depend on the figures alone."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            # Text remains text, and the same figures give the same bytes
            "svg.fonttype": "none",
            "svg.hashsalt": "seqpar",
            "font.family": "sans-serif",
            "font.size": 11,
            **{f"{name}.color": INK for name in ("text", "xtick", "ytick")},
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )


def draw(results: Results, beside: Path) -> list[str]:
    """Write the pictures that there are figures for, and return their names."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (the extra `bench` has it)", file=sys.stderr)
        return []
    use_style()
    written = []
    pictures = {"": _bars(results), "-memory": _memory(results), "-linear": _lines(results)}
    for suffix, picture in pictures.items():
        if picture is not None:
            name = f"{beside.name}{suffix}.svg"
            picture.savefig(beside.parent / name, transparent=True, metadata={"Date": None})
            written.append(name)
    return written


def _bars(results: Results) -> Any:
    """Draw time and memory of every implementation at the first shape in float32, with and without smoothing."""
    from matplotlib.figure import Figure

    first = SHAPES[0]._asdict() | {"dtype": "float32"}
    entries = [
        entry
        for smoothing in (0.0, 0.1)
        for entry in results["parts"].get("shapes", {}).values()
        if {"bias": True} | entry["problem"] == first | {"smoothing": smoothing}
    ]
    if len(entries) < 2:
        return None
    figure = Figure(figsize=(11, 7), layout="constrained")
    where = f"{shape_title(entries[0])}, float32; {results['hardware']}, {results['threads']} threads"
    figure.suptitle(f"{where}\nupper bar: no smoothing; lower bar: smoothing 0.1", color=INK)
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(entries[0]["seconds"])[::-1]  # from bottom to top, as the axis counts
    left.set_yticks(range(len(names)), names)
    for label in left.get_yticklabels():
        if label.get_text() in OURS:
            label.set_color(OURS_BLUE)
    for entry, offset, strength in zip(entries, (0.2, -0.2), (1.0, 0.5), strict=True):
        floor = floor_seconds(entry)
        ratios = {name: (median(entry, name) or 0) / floor for name in names}
        peaks = {name: (targets.peak(entry, name) or 0) / MIB for name in names}
        _bar(left, names, ratios, offset, strength, "{:.2f}")
        _bar(right, names, peaks, offset, strength, "{:,.0f}")
    left.axvline(1, color=INK, linewidth=1, linestyle=":")
    left.set_xlabel("time / the three matrix products")
    allowed = entries[0]["allowed bytes"] / MIB
    right.axvline(allowed, color=INK, linewidth=1, linestyle=":")
    right.set_xlabel(f"peak memory, MiB (dotted: allowed, {allowed:,.0f})")
    for axes in (left, right):
        axes.tick_params(length=0)
        axes.margins(x=0.12)
    return figure


def _bar(axes: Any, names: list[str], values: dict[str, float], offset: float, strength: float, form: str) -> None:
    for row, name in enumerate(names):
        value = values.get(name)
        if not value:
            axes.text(0, row + offset, " not run", va="center", fontsize=8, fontstyle="italic")
            continue
        color = OTHERS
        if name in OURS:
            color = OURS_BLUE
        axes.barh(row + offset, value, height=0.36, color=color, alpha=strength)
        axes.text(value, row + offset, " " + form.format(value), va="center", fontsize=9)


def _memory(results: Results) -> Any:
    """Draw peak memory against the tokens, for the plain loss, the best known alternatives and the engine."""
    from matplotlib.figure import Figure

    entries = list(results["parts"].get("memory", {}).values())
    if len(entries) < 2:
        return None
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    tokens = [entry["problem"]["rows"] for entry in entries]
    for name in (PLAIN, "torch.compile", "torchtitan-style", ENGINE):
        peaks = [entry["peak bytes"][name] / MIB for entry in entries]
        if name in OURS:
            axes.plot(tokens, peaks, "o-", color=OURS_BLUE, linewidth=2.5, markersize=4)
            label = f"seqpar, {peaks[-1]:,.0f} MiB"
            label_color = OURS_BLUE
        else:
            axes.plot(tokens, peaks, "o-", color=OTHERS, linewidth=1.2, markersize=4)
            label = f"{name}, {peaks[-1]:,.0f} MiB"
            label_color = INK
        end = (tokens[-1], peaks[-1])
        axes.annotate(label, end, xytext=(8, 0), textcoords="offset points", color=label_color, va="center")
    problem = entries[0]["problem"]
    where = f"{results['device'].upper()}, float32, D={problem['width']}, V={problem['vocab_size']:,}"
    axes.set_title(f"Projection and loss, forward and backward: {where}", color=INK, loc="left", fontsize=11)
    axes.set(xlim=(0, tokens[-1] * 1.02), ylim=(0, None), xlabel="tokens", ylabel="peak memory, MiB")
    # The first two ticks would overlap: the token counts double
    axes.set_xticks(tokens[2:], [f"{count:,}" for count in tokens[2:]])
    return figure


def _lines(results: Results) -> Any:
    """Draw the engine's time against N, D and V, with the line through the points."""
    from matplotlib.figure import Figure

    found = targets.lines(results)
    if not found:
        return None
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    figure.suptitle(f"{ENGINE}, float32, smoothing 0.1; {results['hardware']}, {results['threads']} threads", color=INK)
    row = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (name, (sizes, times)) in zip(row, found.items(), strict=True):
        start, slope, deviations = targets.fit(sizes, times)
        axes.plot([0, sizes[-1]], [start, start + slope * sizes[-1]], color=OTHERS, linewidth=1)
        axes.plot(sizes, times, "o", color=OURS_BLUE)
        worst = max(map(abs, deviations))
        axes.text(0.05, 0.9, f"largest deviation {worst:.1%}", transform=axes.transAxes)
        labels = [_short(size) for size in sizes]
        axes.set(xlim=(0, None), ylim=(0, None), xlabel=name, xticks=sizes, xticklabels=labels)
        axes.tick_params(axis="x", labelsize=8)
    figure.axes[0].set_ylabel("seconds, forward and backward")
    return figure


def _short(size: int) -> str:
    """Return whole thousands as "8k"."""
    if size % 1000:
        return str(size)
    return f"{size // 1000}k"
