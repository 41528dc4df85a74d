"""Write the measurements as a page of Markdown: the tables first, how they were measured last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.loss import gpu, plots, targets
from benchmarks.loss.implementations import ENGINE, OWN, PLAIN, TORCH_BEST, known
from benchmarks.loss.results import MIB, Entry, Results, fastest_to_floor, floor_seconds, median, stem
from benchmarks.loss.targets import shape_title, title
from benchmarks.loss.timing import CHUNKED
from seqpar.testing.markdown_table import markdown_table

GLOSSARY = """\
`LossCompute` has a gradient in closed form; with its "own generator", a projection of yours, it uses autograd. "Three
products" are the matrix products that any exact implementation needs (logits, hidden gradient, weight gradient).
"Plain" is `F.cross_entropy` of `F.linear`. The memory "allowed" is the hidden gradient, the weight gradient, and 1.3
times the engine's chunk of logits.
"""
BY_SHAPE = """\
Each cell gives time / plain, and peak memory in MiB, without label smoothing. A `*` marks what "Correctness" lists.
"""
LEGEND = """\
Each cell gives time / three products (in brackets: fastest run / the products' fastest run); time / plain; peak
memory. A `*` marks an implementation that is more than twice as far from float64 as plain, or that ignores a factor
on the loss; "Correctness" says which.
"""
CHECKED = """\
N=2,048, D=16, V=1,024, 30% padding, against the plain loss in float64: everything more than twice as far from it as
plain in the same dtype, and further than that dtype's rounding.
"""
MEASURED = """\
Every implementation takes hidden states, weight, bias and targets to a mean loss, and back to all three gradients.
They take turns in one process; a figure is the median over the rounds, after compilation. Of problems measured more
than once, the run with the least scatter counts. Memory is the peak above the inputs in a fresh process.

- **torch op**: `F.linear_cross_entropy`, with its default options or the fastest of those tried.
- **cut_cross_entropy**: Apple's, `impl="torch_compile"` on a CPU, without bias.
- **torchtitan-style**, **2018 loop**: rewritten from their descriptions, with a backward for each chunk.
"""
SHOWN = (PLAIN, "torch.compile", TORCH_BEST, "cut_cross_entropy", ENGINE, OWN)
"""The implementations on the page; `--render` prints all of them."""
HEADINGS = {
    "shapes": "Shapes",
    "small": "A custom generator with few rows per chunk",
    "padding": "Padding",
    "memory": "Memory as N grows",
    "linear": "Time as N, D and V grow",
    "devices": "Replicas on one device",
    "gpu": "bfloat16 on a GPU",
}


def write(path: Path) -> None:
    """Write the page and the plots next to the file of measurements."""
    results: Results = json.loads(path.read_text())
    beside = path.parent / stem(results["device"])
    pictures = plots.draw(results, beside)
    beside.with_suffix(".md").write_text("\n".join(document(results, path.name, pictures)) + "\n")
    print(f"written: {beside}.md {' '.join(str(path.parent / name) for name in pictures)}")


def document(results: Results, source: str, pictures: list[str]) -> list[str]:
    """Return the lines of the page: what a reader needs first, without the tables that `--render` prints."""
    page = ["# The loss over a vocabulary, forward and backward", ""]
    goals = targets.targets(results)
    if goals:
        missed = [goal for goal in goals if not goal.reached]
        page += [verdict(goals), "", *(f"- {g.claim}: {g.measured}, goal {g.limit}; {g.where}" for g in missed), ""]
        page += [GLOSSARY]
    for name in pictures:
        page += [f"![{name}]({name})", ""]
    if "shapes" in results["parts"]:
        page += ["## Time and memory by shape", "", BY_SHAPE, *_in_short(results)]
    if "gpu" in results["parts"]:
        page += [f"## {HEADINGS['gpu']}", "", *part_table(results, "gpu"), ""]
    if results["checks"]:
        page += ["## Correctness", "", *check_table(results)]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    page += ["## How it was measured", "", MEASURED]
    where = f"{results['hardware']}, {results['threads']} threads, {results['device']}"
    page += [f"{results['date']}, {where}; {versions}.", ""]
    page += [f"[{source}]({source}) has every figure. Measure again, or print every table:"]
    return [*page, "", "```", "make bench", "python -m benchmarks.loss --render", "```"]


def tables(path: Path) -> list[str]:
    """Return the lines of every table, with headings."""
    results: Results = json.loads(path.read_text())
    page = target_table(targets.targets(results))
    for part, heading in HEADINGS.items():
        if part in results["parts"]:
            page += [f"## {heading}", "", *part_table(results, part), ""]
    return [*page, *option_table(results)]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table and an empty one."""
    return [*markdown_table(header, rows).splitlines(), ""]


def target_table(goals: list[targets.Target]) -> list[str]:
    """Return goals, limits, and the worst that was measured."""
    rows = []
    for goal in goals:
        reached = "**no**"
        if goal.reached:
            reached = "yes"
        rows.append([goal.claim, goal.limit, goal.measured, goal.where, reached])
    return table(["goal", "limit", "worst case", "where", "reached"], rows)


def verdict(goals: list[targets.Target]) -> str:
    """Return how many goals are reached and how many missed, which follow."""
    reached = sum(goal.reached for goal in goals)
    return f"{reached} of {len(goals)} goals are reached, and {len(goals) - reached} missed, here with the worst case:"


def part_table(results: Results, part: str) -> list[str]:
    """Return the figures of one part."""
    entries = list(results["parts"].get(part, {}).values())
    tables: dict[str, Callable[[list[Entry]], list[str]]] = {
        "shapes": lambda found: _shapes(results, found),
        "small": lambda found: _shapes(results, found),
        "padding": _padding,
        "memory": _memory,
        "linear": lambda _: _linear(results),
        "devices": _devices,
        "gpu": gpu.table,
    }
    if not entries:
        return ["nothing measured", ""]
    return tables[part](entries)


def _shapes(results: Results, entries: list[Entry]) -> list[str]:
    """Return time and memory of every implementation, a table for each dtype and smoothing."""
    page = [LEGEND]
    for dtype in ("float32", "bfloat16"):
        for smoothing in (0.0, 0.1):
            of_table = []
            for entry in entries:
                problem = entry["problem"]
                if problem["dtype"] == dtype and problem["smoothing"] == smoothing:
                    of_table.append(entry)
            if of_table:
                page += _shape_table(results, f"{dtype}, smoothing {smoothing:g}", of_table)
    return page + _remarks(entries)


def _shape_table(results: Results, corner: str, entries: list[Entry]) -> list[str]:
    names = [name for name in known({}) if any(name in e["seconds"] or name in e["not run"] for e in entries)]
    rows = [["three products, s", *(f"{floor_seconds(entry):.2f}" for entry in entries)]]
    rows += [[name + _mark(results, entries[0], name), *(_cell(entry, name) for entry in entries)] for name in names]
    rows += [
        ["three products' libraries", *(_mib(entry["peak bytes"].get(CHUNKED)) for entry in entries)],
        ["allowed memory", *(f"{entry['allowed bytes'] / MIB:,.0f} MiB" for entry in entries)],
        ["rounds", *(str(len(entry["seconds"][PLAIN])) for entry in entries)],
        ["steps in a row", *(str(entry.get("steps in a row", 1)) for entry in entries)],
    ]
    return table([corner, *map(shape_title, entries)], rows)


def _in_short(results: Results) -> list[str]:
    """Return time and memory of some implementations over those of plain, a table for each dtype."""
    page = []
    for dtype in ("float32", "bfloat16"):
        found = results["parts"]["shapes"].values()
        entries = [e for e in found if e["problem"]["dtype"] == dtype and not e["problem"]["smoothing"]]
        if entries:
            rows = [[n + _mark(results, entries[0], n), *(_short_cell(e, n) for e in entries)] for n in SHOWN]
            page += table([dtype, *map(shape_title, entries)], rows)
    return page


def _short_cell(entry: Entry, name: str) -> str:
    time = targets.time_ratio(name, PLAIN)(entry)
    if time is None:
        return "-"
    return f"{time:.2f}; {_mib(entry['peak bytes'].get(name))}"


def _cell(entry: Entry, name: str) -> str:
    time = median(entry, name)
    if time is None:
        return "-"
    plain = median(entry, PLAIN)
    text = f"{time / floor_seconds(entry):.2f} ({fastest_to_floor(entry, name):.2f})"
    if plain:
        text += f" / {time / plain:.2f}"
    peak = entry["peak bytes"].get(name)
    if isinstance(peak, int):
        return f"{text}; {peak / MIB:,.0f} MiB"
    return f"{text}; {peak or 'memory not measured'}"  # text says what became of the process


def _mark(results: Results, entry: Entry, name: str) -> str:
    problem = entry["problem"]
    checked = results["checks"].get(f"{problem['dtype']} smoothing={problem['smoothing']:g}", {}).get(name)
    if checked and checked["wrong"]:
        return " *"
    return ""


def _remarks(entries: list[Entry]) -> list[str]:
    """Return why cells are empty, and what else a reader must know, each remark once."""
    problems_of: dict[str, list[str]] = {}
    for entry in entries:
        for name, why in entry["not run"].items():
            problems_of.setdefault(f"{name}: not run: {why}", []).append(title(entry))
        for name, notes in entry["notes"].items():
            for note in notes:
                problems_of.setdefault(f"{name}: {note}", []).append(title(entry))
    remarks = []
    for text, problems in sorted(problems_of.items()):
        if len(problems) == 1:
            text = f"{text} ({problems[0]})"
        remarks.append(f"- {text}")
    return [*remarks, ""]


def _padding(entries: list[Entry]) -> list[str]:
    by_padding = {bool(entry["problem"]["padding"]): entry for entry in entries}
    if len(by_padding) < 2:
        return ["only one of the two problems is measured", ""]
    whole = by_padding[False]
    padded = by_padding[True]
    floors = [floor_seconds(whole), floor_seconds(padded)]
    rows = [["three products", *(f"{time:.2f}" for time in floors), f"{floors[0] / floors[1]:.2f} x"]]
    for name in whole["seconds"]:
        times = [f"{median(whole, name):.2f}", f"{median(padded, name):.2f}"]
        rows.append([name, *times, f"{targets.faster(whole, padded, name):.2f} x"])
    header = [title(whole), "no padding, s", "30 % padding, s", "faster with padding"]
    return table(header, rows) + _remarks(entries)


def _memory(entries: list[Entry]) -> list[str]:
    header = ["peak memory, MiB", *(f"N={entry['problem']['rows']:,}" for entry in entries)]
    rows = [[name, *(_mib(entry["peak bytes"].get(name)) for entry in entries)] for name in entries[0]["peak bytes"]]
    rows += [
        ["allowed", *(_mib(entry["allowed bytes"]) for entry in entries)],
        [f"{ENGINE}, without the hidden gradient", *(_mib(targets.beyond_hidden(e, ENGINE)) for e in entries)],
    ]
    problem = entries[0]["problem"]
    return [f"D={problem['width']}, V={problem['vocab_size']:,}, {problem['dtype']}.", "", *table(header, rows)]


def _mib(value: Any) -> str:
    if isinstance(value, int):
        return f"{value / MIB:,.0f}"
    return str(value or "-")  # text says what became of the process


def _linear(results: Results) -> list[str]:
    rows = []
    for name, (sizes, times) in targets.lines(results).items():
        start, slope, deviations = targets.fit(sizes, times)
        points = ", ".join(f"{size:,}: {time * 1e3:.0f} ms" for size, time in zip(sizes, times, strict=True))
        line = f"{start * 1e3:.0f} ms + {slope * 1e6:.2f} us each"
        rows.append([name, points, line, f"{max(map(abs, deviations)):.1%}"])
    return table([f"`{ENGINE}`, size", "median time", "line", "largest deviation"], rows)


def _devices(entries: list[Entry]) -> list[str]:
    rows = []
    for entry in entries:
        for name in entry["seconds"]:
            time = median(entry, name) or 0.0
            rows.append([title(entry), name, f"{time:.3f}", f"{time / floor_seconds(entry):.2f}"])
    return table(["problem", "engine", "seconds", "time / three products"], rows)


def check_table(results: Results) -> list[str]:
    """Return what is further from the truth than it may be, at a small problem."""
    where_of: dict[tuple[str, str], list[str]] = {}
    for where, names in results["checks"].items():
        for name, checked in names.items():
            if checked["wrong"]:
                where_of.setdefault((name, "; ".join(checked["wrong"])), []).append(where)
    rows = [[name, ", ".join(where), wrong] for (name, wrong), where in where_of.items()]
    return [CHECKED, *table(["way", "in", "what is wrong"], rows)]


def option_table(results: Results) -> list[str]:
    """Return the options of torch's op that were tried, the best first."""
    page = []
    for dtype, tuned in results["torch op options"].items():
        rows = []
        for tried in sorted(tuned["tried"], key=lambda one: (bool(one["wrong"]), one["seconds"])):
            options = ", ".join(f"{option}={value}" for option, value in tried["options"].items())
            rows.append([options, f"{tried['seconds'] * 1e3:.0f}", "; ".join(tried["wrong"])])
        page += table([f"torch op, {dtype}, options", "ms at N=2,048, D=512, V=8,000", "what is wrong"], rows)
    return page
