"""Charts as SVG, drawn by matplotlib for a page that may be light or dark.

matplotlib draws in stand-in colours, which are replaced by the page's CSS variables; backgrounds are transparent and
text remains text, so that the browser draws every script with its own fonts.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

WIDTH = 330
HEIGHT = 205
"""The size of a chart in CSS pixels at which its text has its natural size; the page scales it."""
INK = "#010203"
GRID = "#010204"
SERIES = tuple(f"#0102{16 + number:02x}" for number in range(8))
VARIABLES = {
    INK: "var(--ink)",
    GRID: "var(--grid)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES)},
}
"""What the stand-in colours are replaced by."""
STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
"""Lines also differ in their dashes, for readers who do not see colours, and on paper."""

SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.linewidth": 1.0,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    """The number of its colour and of its dashes."""
    points: bool = False
    """Whether each value is marked, for series with few values."""


@matplotlib.rc_context(SETTINGS)
def line_chart(title: str, series: Sequence[Series], *, log: bool = False, legend: bool = False) -> str:
    """Return lines over the steps as SVG; `log` is for numbers that may span orders of magnitude."""
    figure, axes = _axes()
    for place, each in enumerate(series):
        marker = None
        if each.points and len(each.x) <= 60:
            marker = "o"
        number = each.color % len(SERIES)
        style = STYLES[number % len(STYLES)]
        axes.plot(each.x, each.y, color=SERIES[number], lw=1.7, ls=style, marker=marker, ms=3, label=str(place))
    lowest = min((y for each in series for y in each.y), default=1.0)
    highest = max((y for each in series for y in each.y), default=1.0)
    if log and 0 < 20 * lowest < highest:
        axes.set_yscale("log")
        between = [1.0, 2.0, 5.0]
        if highest > 1_000 * lowest:
            between = [1.0]
        axes.yaxis.set_major_locator(LogLocator(subs=between))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlabel("step", labelpad=1)
    if legend:
        _legend(axes, [each.label for each in series])
    return svg_of(figure, title)


@matplotlib.rc_context(SETTINGS)
def histogram(title: str, label: str, groups: Sequence[tuple[str, Sequence[float], int]], legend: bool) -> str:
    """Return distributions as outlines over the same bins; each group has a label, values and a colour number."""
    figure, axes = _axes()
    values = np.concatenate([np.asarray(group, dtype=float) for _, group, _ in groups])
    edges = bins_of(values)
    for place, (_, group, color) in enumerate(groups):
        counts, _ = np.histogram(group, edges)
        number = color % len(SERIES)
        style = STYLES[number % len(STYLES)]
        axes.stairs(100 * counts / max(1, len(group)), edges, color=SERIES[number], lw=1.8, ls=style, label=str(place))
    axes.set_xlabel(label, labelpad=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_ylim(bottom=0)
    if legend:
        _legend(axes, [name for name, *_ in groups])
    return svg_of(figure, title)


def bins_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of about twenty bins of equal width; whole numbers lie inside bins, not on their edges."""
    if not (values == values.round()).all():
        return np.histogram_bin_edges(values, bins=20)
    width = max(1, round((values.max() - values.min()) / 20))
    return np.arange(values.min() - 0.5, values.max() + 0.5 + width, width)


def svg_of(figure: Figure, title: str) -> str:
    """Return a figure as an `svg` element for a page, with its title for readers who cannot see it."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Ids are hashes with this salt: a page has many charts, whose ids would otherwise be the same
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": title}):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has a font for it
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\s+", " ", re.sub(r"(\.\d)\d+", r"\1", path[0])), text)
    text = re.sub(r' style="[^"]*"', _style, text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r">\s+<", "><", text)
    width, height = (float(72 * inches) for inches in figure.get_size_inches())
    head = (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}"><title>{escape(title)}</title>'
    )
    return head + text[text.index(">") + 1 :].rstrip()


def short(value: float, _: object = None) -> str:
    """Return a number for an axis: 200, 15k, 2.5M, 0.003."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    axes = figure.add_axes((46 / WIDTH, 38 / HEIGHT, (WIDTH - 58) / WIDTH, (HEIGHT - 48) / HEIGHT))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    return figure, axes


def _legend(axes: Any, labels: Sequence[str]) -> None:
    """Add a legend; lines are labelled by number at first, since matplotlib omits labels that begin with _."""
    legend = axes.legend(loc="best", handlelength=1.8, labelspacing=0.25, borderaxespad=0.2, fontsize=11)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)


def _style(found: re.Match[str]) -> str:
    """Replace the stand-in colours with the page's, and the font with the reader's."""
    text = re.sub(r"#[0-9a-f]{6}", lambda color: VARIABLES.get(color[0], color[0]), found[0])
    return re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
