"""Write the measurements as a page of Markdown: the tables first, how they were measured last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loss import plots, targets
from benchmarks.loss.implementations import ENGINE, ON_A_CPU, ON_A_GPU, OWN_SMALL, PLAIN
from benchmarks.loss.results import (
    MIB,
    Entry,
    Results,
    entries_of,
    fastest_to_floor,
    floor_seconds,
    median,
    problem_of,
    read,
    stem,
)
from benchmarks.loss.timing import CHUNKED
from seqpar.testing.markdown_table import markdown_table

GLOSSARY = """\
`LossCompute` and `linear_cross_entropy` are seqpar's, with gradients in closed form; "own generator" is the engine
with a projection for which it has no closed form, so autograd computes the gradient. "Three products" are the matrix
products that any exact implementation needs (logits, hidden gradient, weight gradient) for the rows that are not
padding, written to memory that is already allocated: all rows at once or 512 at a time, whichever is faster here.
"Plain" is `F.cross_entropy` of `F.linear`. The memory "allowed" is the hidden gradient, the weight gradient, and 1.3
times the engine's chunk of logits in float32 or wider. "Three products' libraries" is the additional memory, in MiB,
that MKL and oneDNN take for the bare products.
"""
LEGEND = """\
Each cell gives time / three products (in brackets: fastest run / the products' fastest run); time / plain; peak
memory. A `*` marks an implementation that is more than twice as far from float64 as plain, or that ignores a factor
on the loss; "Correctness" says which.
"""
CHECKED = """\
The loss and the gradients of a small problem (N=2,048, D=16, V=1,024, 30% padding) are compared with the plain loss
in float64. The table lists everything that is more than twice as far from it as plain in the same dtype, and further
than that dtype's rounding of one number. In float32 this can come down to the last digits.
"""
MEASURED = """\
Every implementation takes hidden states, a projection (weight and bias) and targets to a mean loss over the tokens
that are not padding, and back to all three gradients. The implementations take turns in one process, round after
round, and a figure is the median over the rounds. Where a table says 2 steps in a row, only the second is timed,
because the first one runs in memory that another implementation used last. Compilation is finished before timing
starts. The machine is shared: of a problem that was measured more than once, the run with the least scatter is kept
(median over fastest run, averaged over all implementations). Memory is the peak above the inputs, in a fresh process,
as the operating system reports it.

- **plain**: `F.cross_entropy` of `F.linear`; **torch.compile**: the same, compiled; **auto_chunker**: the same, cut
  into 8 chunks by Inductor's option of that name; **checkpointed chunks**: `torch.utils.checkpoint` around 512 rows at
  a time.
- **torch op**: `F.linear_cross_entropy`, once with the default `LinearCrossEntropyOptions()` and once with the
  fastest of 18 options that were tried at N=2,048, D=512, V=8,000: 1,024 rows at a time, `acc_policy="accurate"`.
- **cut_cross_entropy**: Apple's, with `impl="torch_compile"` on a CPU; **torchtune**: `CEWithChunkedOutputLoss` with
  8 chunks.
- **torchtitan-style** and **2018 loop**: rewritten from their descriptions, with one backward for each of 8 chunks
  over time, and for every 5 time steps of sentences of 64, respectively.
- **LossCompute**, **linear_cross_entropy**: seqpar's, with gradients in closed form; **own generator**: the engine
  with a projection for which it has no closed form, by autograd.
"""
NAMES = dict.fromkeys([*ON_A_CPU, *ON_A_GPU, OWN_SMALL])
"""From the top of a table."""
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
    """Write tables and picture next to the file of measurements."""
    results = read(path)
    beside = path.parent / stem(results["device"], "loss")
    picture = beside.with_name(f"{beside.name}-memory.svg")
    shown = [f"![{picture.name}]({picture.name})", ""] if plots.draw(results, picture) else []
    page = ["# The loss over a vocabulary, forward and backward", ""]
    goals = targets.targets(results)
    if goals:
        page += [*target_table(goals), GLOSSARY]
    page += shown
    for part, heading in HEADINGS.items():
        if part in results["parts"]:
            page += [f"## {heading}", "", *part_table(results, part), ""]
    page += [*check_table(results, CHECKED), *how_measured(results, path, MEASURED)]
    beside.with_suffix(".md").write_text("\n".join(page) + "\n")
    print(f"written: {beside}.md")


def how_measured(results: Results, path: Path, words: str) -> list[str]:
    """Return the end of a page: when, where, with what, and the commands."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return [
        "## How it was measured",
        "",
        f"{results['date']}, {results['hardware']}, {results['threads']} threads, {results['device']}; {versions}.",
        f"[{path.name}]({path.name}) has every figure, run by run; `--render` makes this page from it.",
        "",
        words,
        "```",
        *results["commands"],
        "```",
    ]


def check_table(results: Results, words: str) -> list[str]:
    """Return what is further from the truth than it may be, at a small problem."""
    rows = []
    for where, names in results["checks"].items():
        rows += [[name, where, "; ".join(wrong)] for name, wrong in names.items() if wrong]
    return [
        "## Correctness",
        "",
        words,
        *(table(["way", "in", "what is wrong"], rows) if rows else ["Nothing is.", ""]),
    ]


def table(header: Sequence[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table and an empty one."""
    return [*markdown_table(header, rows).splitlines(), ""]


def target_table(goals: list[targets.Target]) -> list[str]:
    """Return goals, limits, the worst that was measured, and how many goals are reached."""
    rows = [[goal.claim, goal.limit, goal.measured, goal.where, "yes" if goal.reached else "**no**"] for goal in goals]
    count = f"{sum(goal.reached for goal in goals)} of {len(goals)} goals are reached."
    return [
        *table(["goal", "limit", "worst case", "where", "reached"], rows),
        f"{count} The table gives the worst case of each goal, and how many cases are inside the limit.",
        "",
    ]


def part_table(results: Results, part: str) -> list[str]:
    """Return the figures of one part."""
    entries = entries_of(results, part)
    tables: dict[str, Callable[[], list[str]]] = {
        "shapes": lambda: _shapes(results, entries),
        "small": lambda: _shapes(results, entries),
        "padding": lambda: _padding(entries),
        "memory": lambda: _memory(entries),
        "linear": lambda: _linear(results),
        "devices": lambda: _devices(entries),
        "gpu": lambda: _shapes(results, entries),
    }
    if not entries:
        return ["nothing measured", ""]
    return tables[part]()


def _shapes(results: Results, entries: list[Entry]) -> list[str]:
    """Return time and memory of every implementation, a table for each dtype and smoothing."""
    tables: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (problem_of(e).dtype_name != "float32", problem_of(e).smoothing)):
        problem = problem_of(entry)
        tables.setdefault(f"{problem.dtype_name}, smoothing {problem.smoothing:g}", []).append(entry)
    page = [LEGEND]
    for corner, of_table in tables.items():
        page += _shape_table(results, corner, of_table)
    return page + _remarks(entries)


def _shape_table(results: Results, corner: str, entries: list[Entry]) -> list[str]:
    names = [name for name in NAMES if any(name in e["seconds"] or name in e["not run"] for e in entries)]
    checked = results["checks"].get(corner.replace(", smoothing ", " smoothing="), {})
    rows = [["three products, s", *(f"{floor_seconds(entry):.2f}" for entry in entries)]]
    rows += [[name + " *" * bool(checked.get(name)), *(_cell(entry, name) for entry in entries)] for name in names]
    rows += [
        ["three products' libraries", *(_mib(entry["peak bytes"].get(CHUNKED)) for entry in entries)],
        ["allowed memory", *(f"{entry['allowed bytes'] / MIB:,.0f} MiB" for entry in entries)],
        ["rounds", *(str(len(entry["seconds"][PLAIN])) for entry in entries)],
        ["steps in a row", *(str(entry.get("steps in a row", 1)) for entry in entries)],
    ]
    return table([corner, *(problem_of(entry).shape_title for entry in entries)], rows)


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


def _remarks(entries: list[Entry]) -> list[str]:
    """Return why cells are empty, and what else a reader must know, each remark once."""
    problems_of: dict[str, list[str]] = {}
    for entry in entries:
        for name, why in entry["not run"].items():
            problems_of.setdefault(f"- {name}: not run: {why}", []).append(problem_of(entry).title)
        for name, notes in entry["notes"].items():
            for note in notes:
                problems_of.setdefault(f"- {name}: {note}", []).append(problem_of(entry).title)
    lines = [text if len(where) > 1 else f"{text} ({where[0]})" for text, where in sorted(problems_of.items())]
    return [*lines, ""]


def _padding(entries: list[Entry]) -> list[str]:
    whole, padded = sorted(entries, key=lambda entry: problem_of(entry).padding)
    floors = [floor_seconds(whole), floor_seconds(padded)]
    rows = [["three products", *(f"{time:.2f}" for time in floors), f"{floors[0] / floors[1]:.2f} x"]]
    for name in whole["seconds"]:
        times = [median(entry, name) or 0.0 for entry in (whole, padded)]
        rows.append([name, *(f"{time:.2f}" for time in times), f"{times[0] / times[1]:.2f} x"])
    header = [problem_of(whole).title, "no padding, s", "30 % padding, s", "faster with padding"]
    return table(header, rows) + _remarks(entries)


def _memory(entries: list[Entry]) -> list[str]:
    problems = [problem_of(entry) for entry in entries]
    header = ["peak memory, MiB", *(f"N={problem.rows:,}" for problem in problems)]
    rows = [[name, *(_mib(entry["peak bytes"].get(name)) for entry in entries)] for name in entries[0]["peak bytes"]]
    rows += [
        ["allowed", *(_mib(entry["allowed bytes"]) for entry in entries)],
        [f"{ENGINE}, without the hidden gradient", *(_mib(targets.beyond_hidden(e)) for e in entries)],
    ]
    sizes = f"D={problems[0].width}, V={problems[0].vocab_size:,}, {problems[0].dtype_name}."
    return [sizes, "", *table(header, rows)]


def _mib(value: Any) -> str:
    if isinstance(value, int):
        return f"{value / MIB:,.0f}"
    return str(value or "-")  # text says what became of the process


def _linear(results: Results) -> list[str]:
    rows = []
    for name, line in targets.lines(results).items():
        sizes, times = targets.points(name, line)
        start, slope, deviations = targets.straight_line(sizes, times)
        points = ", ".join(f"{size:,}: {time * 1e3:.0f} ms" for size, time in zip(sizes, times, strict=True))
        text = f"{start * 1e3:.0f} ms + {slope * 1e6:.2f} us each"
        rows.append([name, points, text, f"{max(map(abs, deviations)):.1%}"])
    return table([f"`{ENGINE}`, size", "median time", "line", "largest deviation"], rows)


def _devices(entries: list[Entry]) -> list[str]:
    rows = []
    for entry in entries:
        for name in entry["seconds"]:
            time = median(entry, name) or 0.0
            rows.append([problem_of(entry).title, name, f"{time:.3f}", f"{time / floor_seconds(entry):.2f}"])
    return table(["problem", "engine", "seconds", "time / three products"], rows)
