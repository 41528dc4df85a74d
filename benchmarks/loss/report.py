"""The measurements as Markdown tables, and the file of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.loss import gpu, plots, targets
from benchmarks.loss.implementations import ENGINE, PLAIN, known
from benchmarks.loss.results import Results, fastest_to_floor, floor_seconds, median, stem
from benchmarks.loss.targets import Entry, shape_title, title
from benchmarks.loss.timing import CHUNKED

MIB = 2**20
INTRODUCTION = """
Every way takes hidden states, a projection (weight and bias) and targets to a mean loss over the tokens that are
not padding, and goes back to all three gradients. "Three products" are the matrix products that any exact way needs
(logits, hidden gradient, weight gradient) of the rows that are not padding, into memory that is there already: all
rows at once or 512 at a time, whichever is faster here. All ways take turns in one process, round after round, and
a figure is the median of the rounds; where a table says two steps in a row, only the second is timed, for the first
one's memory was another's. What compiles has compiled before. The machine is shared: of a problem that was measured
more than once, the run is kept that scattered least (median over fastest run, mean of all ways). Memory is the peak
above the inputs, in a fresh process, as the system reports it. "Allowed" is the hidden gradient, the weight gradient
and 1.3 of the engine's chunks of logits in float32 or wider; "three products' libraries", in MiB, is what MKL and
oneDNN take beside it for the bare products.

- **plain**: `F.cross_entropy` of `F.linear`; **torch.compile**: the same, compiled; **checkpointed chunks**:
  `torch.utils.checkpoint` around 512 rows at a time.
- **torch op**: `F.linear_cross_entropy` with `LinearCrossEntropyOptions()`, and with the options that were fastest
  among those tried (below).
- **cut_cross_entropy**: apple's, `impl="torch_compile"` on a CPU; **torchtune**: `CEWithChunkedOutputLoss`, 8
  chunks.
- **torchtitan-style** and **2018 loop**: written anew from their descriptions: a backward for each of 8 chunks over
  time, and for each 5 time steps of sentences of 64.
- **LossCompute**, **linear_cross_entropy**: seqpar's, gradients by formula; **own generator**: the engine with a
  projection it cannot know, by autograd.
"""
LEGEND = """\
Cells: time / three products (the fastest run / the products' fastest); time / plain's; peak memory. `*`: further
from float64 than twice plain's error, or a factor on the loss is ignored; the last section says which.
"""
CHECKED = """\
Loss and gradients of a small problem (N=2,048, D=16, V=1,024, 30 % padding) against the plain loss in float64.
Named here is what lies more than twice as far from it as plain in the same dtype, and further than that dtype
rounds one number; in float32 that can be a matter of the last digits.
"""


def write(path: Path) -> None:
    """Tables and plots, next to the file of measurements."""
    results: Results = json.loads(path.read_text())
    beside = path.parent / stem(results["device"])
    pictures = plots.draw(results, beside)
    beside.with_suffix(".md").write_text("\n".join(document(results, path.name, pictures)) + "\n")
    print(f"written: {beside}.md {' '.join(str(path.parent / name) for name in pictures)}")


def document(results: Results, source: str, pictures: list[str]) -> list[str]:
    """The whole page."""
    found = ["# The loss over a vocabulary, forward and backward", ""]
    found += ["```", *results["commands"], "```", ""]
    found += [f"{results['date']}, {results['hardware']}, {results['threads']} threads, {results['device']}."]
    found += [", ".join(f"{name} {version}" for name, version in results["versions"].items()) + "."]
    found += [f"Every figure, run by run: [{source}]({source}); `--render` makes this page of it.", INTRODUCTION]
    found += ["## Reached or not", "", *target_table(results)]
    found += [line for name in pictures for line in (f"![{name}]({name})", "")]
    for part in ("shapes", "small", "padding", "memory", "linear", "devices", "gpu"):
        if part in results["parts"]:
            found += [f"## {HEADINGS[part]}", "", *part_table(results, part), ""]
    if results["checks"]:
        found += ["## Right or wrong", "", *check_table(results), *option_table(results)]
    return found[:-1]


HEADINGS = {
    "shapes": "Shapes",
    "small": "A generator of one's own with few rows at a time",
    "padding": "Padding",
    "memory": "Memory as the rows grow",
    "linear": "Time as N, D and V grow",
    "devices": "Replicas on one device",
    "gpu": "bfloat16 on a GPU",
}


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def target_table(results: Results) -> list[str]:
    """Claims, limits, and the worst that was measured."""
    rows = [[t.claim, t.limit, t.measured, t.where, "yes" if t.reached else "**no**"] for t in targets.targets(results)]
    return table(["claim", "limit", "measured, worst", "where the worst is", "reached"], rows)


def part_table(results: Results, part: str) -> list[str]:
    """The figures of one part."""
    entries = list(results["parts"].get(part, {}).values())
    makers: dict[str, Callable[[list[Entry]], list[str]]] = {
        "shapes": lambda found: _shapes(results, found),
        "small": lambda found: _shapes(results, found),
        "padding": _padding,
        "memory": _memory,
        "linear": lambda _: _linear(results),
        "devices": _devices,
        "gpu": gpu.table,
    }
    return makers[part](entries) if entries else ["nothing measured", ""]


def _shapes(results: Results, entries: list[Entry]) -> list[str]:
    """Time and memory of every implementation, a table for each dtype and smoothing."""
    found = []
    for dtype in ("float32", "bfloat16"):
        for smoothing in (0.0, 0.1):
            here = [e for e in entries if (e["problem"]["dtype"], e["problem"]["smoothing"]) == (dtype, smoothing)]
            if not here:
                continue
            order = list(
                dict.fromkeys(name for name in known({}) for e in here if name in {**e["seconds"], **e["not run"]})
            )
            header = [f"{dtype}, smoothing {smoothing:g}", *map(shape_title, here)]
            rows = [["three products, s", *(f"{floor_seconds(e):.2f}" for e in here)]]
            rows += [
                [f"{name}{_mark(results, e0, name)}", *(_cell(e, name) for e in here)]
                for e0 in here[:1]
                for name in order
            ]
            rows += [["three products' libraries", *(_mib(e["peak bytes"].get(CHUNKED)) for e in here)]]
            rows += [["allowed memory", *(f"{e['allowed bytes'] / MIB:,.0f} MiB" for e in here)]]
            rows += [["rounds", *(str(len(e["seconds"][PLAIN])) for e in here)]]
            rows += [["steps in a row", *(str(e.get("steps in a row", 1)) for e in here)]]
            found += table(header, rows)
    return [LEGEND, *found, *_remarks(entries)]


def _cell(entry: Entry, name: str) -> str:
    time, plain = median(entry, name), median(entry, PLAIN)
    if time is None:
        return "-"
    peak = entry["peak bytes"].get(name)
    memory = f"{peak / MIB:,.0f} MiB" if isinstance(peak, int) else peak or "memory not measured"
    to_plain = f" / {time / plain:.2f}" if plain else ""
    return f"{time / floor_seconds(entry):.2f} ({fastest_to_floor(entry, name):.2f}){to_plain}; {memory}"


def _mark(results: Results, entry: Entry, name: str) -> str:
    problem = entry["problem"]
    checked = results["checks"].get(f"{problem['dtype']} smoothing={problem['smoothing']:g}", {}).get(name)
    return " *" if checked and checked["wrong"] else ""


def _remarks(entries: list[Entry]) -> list[str]:
    """Why cells are empty, and what else a reader must know, each said once."""
    said: dict[str, list[str]] = {}
    for entry in entries:
        for name, why in entry["not run"].items():
            said.setdefault(f"{name}: not run: {why}", []).append(title(entry))
        for name, notes in entry["notes"].items():
            for note in notes:
                said.setdefault(f"{name}: {note}", []).append(title(entry))
    return [f"- {text}" + (f" ({where[0]})" if len(where) == 1 else "") for text, where in sorted(said.items())] + [""]


def _padding(entries: list[Entry]) -> list[str]:
    by_padding = {bool(entry["problem"]["padding"]): entry for entry in entries}
    if len(by_padding) < 2:
        return ["half measured", ""]
    whole, padded = by_padding[False], by_padding[True]
    floor = [floor_seconds(entry) for entry in (whole, padded)]
    rows = [["three products", *(f"{time:.2f}" for time in floor), f"{floor[0] / floor[1]:.2f} x"]]
    for name in whole["seconds"]:
        times = [median(entry, name) for entry in (whole, padded)]
        ratio = targets.faster(whole, padded, name)
        rows.append([name, *(f"{time:.2f}" for time in times), f"{ratio:.2f} x"])
    header = [title(whole), "no padding, s", "30 % padding, s", "faster with padding"]
    return table(header, rows) + _remarks(entries)


def _memory(entries: list[Entry]) -> list[str]:
    names = list(entries[0]["peak bytes"])
    header = ["peak memory, MiB", *(f"N={entry['problem']['rows']:,}" for entry in entries)]
    rows = [[name, *(_mib(entry["peak bytes"].get(name)) for entry in entries)] for name in names]
    rows += [["allowed", *(_mib(entry["allowed bytes"]) for entry in entries)]]
    rows += [[f"{ENGINE}, without the hidden gradient", *(_mib(targets.beyond_hidden(e, ENGINE)) for e in entries)]]
    problem = entries[0]["problem"]
    return [f"D={problem['width']}, V={problem['vocab_size']:,}, {problem['dtype']}.", "", *table(header, rows)]


def _mib(value: Any) -> str:
    return f"{value / MIB:,.0f}" if isinstance(value, int) else str(value or "-")


def _linear(results: Results) -> list[str]:
    rows = []
    for name, (sizes, times) in targets.lines(results).items():
        start, slope, deviations = targets.fit(sizes, times)
        points = ", ".join(f"{size:,}: {time * 1e3:.0f} ms" for size, time in zip(sizes, times, strict=True))
        line = f"{start * 1e3:.0f} ms + {slope * 1e6:.2f} us each"
        rows.append([name, points, line, f"{max(map(abs, deviations)):.1%}"])
    return table([f"`{ENGINE}`, size", "median time", "line", "largest deviation"], rows)


def _devices(entries: list[Entry]) -> list[str]:
    rows = [
        [title(entry), name, f"{median(entry, name):.3f}", f"{(median(entry, name) or 0) / floor_seconds(entry):.2f}"]
        for entry in entries
        for name in entry["seconds"]
    ]
    return table(["problem", "engine", "seconds", "time / three products"], rows)


def check_table(results: Results) -> list[str]:
    """What lies further from the truth than it may, at a small problem."""
    rows = [
        [name, where, "; ".join(checked["wrong"])]
        for where, names in results["checks"].items()
        for name, checked in names.items()
        if checked["wrong"]
    ]
    return [CHECKED, *table(["way", "in", "what is wrong"], rows)]


def option_table(results: Results) -> list[str]:
    """The options of torch's op that were tried, the best first."""
    found = []
    for dtype, tuned in results["torch op options"].items():
        tried = sorted(tuned["tried"], key=lambda one: (bool(one["wrong"]), one["seconds"]))
        rows = [
            [
                ", ".join(f"{k}={v}" for k, v in one["options"].items()),
                f"{one['seconds'] * 1e3:.0f}",
                "; ".join(one["wrong"]),
            ]
            for one in tried
        ]
        found += table([f"torch op, {dtype}, options", "ms at N=2,048, D=512, V=8,000", "what is wrong"], rows)
    return found
