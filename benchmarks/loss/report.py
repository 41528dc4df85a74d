"""Write the measurements as a page of Markdown: the tables first, how they were measured last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loss import plots, targets
from benchmarks.loss.implementations import (
    COMPILED,
    CUT,
    ENGINE,
    ON_A_CPU,
    ON_A_GPU,
    OWN,
    PLAIN,
    TORCH_BEST,
)
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
SHOWN = (PLAIN, COMPILED, TORCH_BEST, CUT, ENGINE, OWN)
"""The implementations on the page; `--render` prints all of them."""
NAMES = dict.fromkeys([*ON_A_CPU, *ON_A_GPU])
"""From the top of a table."""
HEADINGS = {
    "shapes": "Shapes",
    "memory": "Memory as N grows",
    "gpu": "bfloat16 on a GPU",
}


def write(path: Path) -> None:
    """Write tables and picture next to the file of measurements."""
    results = read(path)
    beside = path.parent / stem(results["device"], "loss")
    picture = beside.with_name(f"{beside.name}-memory.svg")
    shown = [f"![{picture.name}]({picture.name})", ""] if plots.draw(results, picture) else []
    page = ["# The loss over a vocabulary, forward and backward", ""]
    if goals := targets.targets(results):
        missed = [goal for goal in goals if not goal.reached]
        reached = len(goals) - len(missed)
        page += [
            f"{reached} of {len(goals)} goals are reached, and {len(missed)} missed, here with the worst case:",
            "",
        ]
        page += [f"- {goal.claim}: {goal.measured}, goal {goal.limit}; {goal.where}" for goal in missed]
        page += ["", GLOSSARY]
    page += shown
    if "shapes" in results["parts"]:
        page += ["## Time and memory by shape", "", BY_SHAPE, *_in_short(results)]
    if "gpu" in results["parts"]:
        page += [f"## {HEADINGS['gpu']}", "", *part_table(results, "gpu"), ""]
    page += [*check_table(results, CHECKED), *how_measured(results, path, MEASURED, "make bench")]
    beside.with_suffix(".md").write_text("\n".join(page) + "\n")
    print(f"written: {beside}.md")


def how_measured(results: Results, path: Path, words: str, command: str) -> list[str]:
    """Return the end of a page: how, when, where, with what, and the commands that measure and print every table."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    where = f"{results['hardware']}, {results['threads']} threads, {results['device']}"
    page = ["## How it was measured", "", words, f"{results['date']}, {where}; {versions}.", ""]
    page += [f"[{path.name}]({path.name}) has every figure. Measure again, or print every table:", ""]
    return [*page, "```bash", command, f"python -m benchmarks.{path.name.partition('-')[0]} --render", "```"]


def check_table(results: Results, words: str) -> list[str]:
    """Return what is further from the truth than it may be, at a small problem."""
    where_of: dict[tuple[str, str], list[str]] = {}
    for where, names in results["checks"].items():
        for name, wrong in names.items():
            if wrong:
                where_of.setdefault((name, "; ".join(wrong)), []).append(where)
    rows = [[name, ", ".join(where), wrong] for (name, wrong), where in where_of.items()]
    shown = table(["way", "in", "what is wrong"], rows) if rows else ["Nothing is wrong.", ""]
    return ["## Correctness", "", words, *shown]


def table(header: Sequence[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table and an empty one."""
    return [*markdown_table(header, rows).splitlines(), ""]


def target_table(results: Results) -> list[str]:
    """Return goals, limits, and the worst that was measured."""
    goals = targets.targets(results)
    rows = [[goal.claim, goal.limit, goal.measured, goal.where, "yes" if goal.reached else "**no**"] for goal in goals]
    return table(["goal", "limit", "worst case", "where", "reached"], rows)


def part_table(results: Results, part: str) -> list[str]:
    """Return the figures of one part."""
    entries = entries_of(results, part)
    tables: dict[str, Callable[[], list[str]]] = {
        "shapes": lambda: _shapes(results, entries),
        "memory": lambda: _memory(entries),
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


def _in_short(results: Results) -> list[str]:
    """Return time and memory of some implementations over those of plain, a table for each dtype."""
    page = []
    for dtype in ("float32", "bfloat16"):
        found = [(problem_of(entry), entry) for entry in entries_of(results, "shapes")]
        entries = [entry for problem, entry in found if problem.dtype_name == dtype and not problem.smoothing]
        checked = results["checks"].get(f"{dtype} smoothing=0", {})
        if entries:
            rows = [[n + " *" * bool(checked.get(n)), *(_short_cell(e, n) for e in entries)] for n in SHOWN]
            page += table([dtype, *(problem_of(entry).shape_title for entry in entries)], rows)
    return page


def _short_cell(entry: Entry, name: str) -> str:
    time = targets.over(targets.time_of(name), targets.time_of(PLAIN))(entry)
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
