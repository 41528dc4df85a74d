"""Draw peak memory, readable on light and dark backgrounds alike."""

from __future__ import annotations

from pathlib import Path

from benchmarks.loss.implementations import COMPILED, ENGINE, PLAIN, TITAN_STYLE
from benchmarks.loss.results import MIB, Results, entries_of

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


def draw(results: Results, path: Path) -> bool:
    """Write the picture of peak memory against the tokens, if there are figures; return whether there are.

    It has the plain loss, the best known alternatives and the engine.
    """
    entries = entries_of(results, "memory")
    if len(entries) < 2:
        return False
    use_style()
    from matplotlib.figure import Figure

    # Narrow enough for a phone, which shows its 500 pixels at two thirds of their size
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    tokens = [entry["problem"]["rows"] for entry in entries]
    for name in (PLAIN, COMPILED, TITAN_STYLE, ENGINE):
        peaks = [entry["peak bytes"][name] / MIB for entry in entries]
        if name == ENGINE:
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
    axes.set_title(f"Projection and loss, forward and backward\n{where}", color=INK, loc="left", fontsize=11)
    axes.set(xlim=(0, tokens[-1] * 1.02), ylim=(0, None), xlabel="tokens", ylabel="peak memory, MiB")
    # The first two ticks would overlap: the token counts double
    axes.set_xticks(tokens[2:], [f"{count:,}" for count in tokens[2:]])
    figure.savefig(path, transparent=True, metadata={"Date": None})
    return True
