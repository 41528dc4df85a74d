"""Write the measurements as a page of Markdown: the tables first, how they were measured last."""

from __future__ import annotations

from collections.abc import Sequence
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
    floor_seconds,
    problem_of,
    read,
    stem,
)
from seqpar.markdown_table import markdown_table

GLOSSARY = """\
`LossCompute` has a gradient in closed form; with its "own generator", a projection of yours, it uses autograd. "Three
products" are the matrix products that any exact implementation needs (logits, hidden gradient, weight gradient).
"Plain" is `F.cross_entropy` of `F.linear`. The memory "allowed" is the hidden gradient, the weight gradient, and 1.3
times the engine's chunk of logits.
"""
LEGEND = """\
Each cell gives time / plain, and peak memory in MiB, without label smoothing unless a table names it. A `*` marks what
"Correctness" lists.
"""
CHECKED = """\
N=2,048, D=16, V=1,024, 30% padding, against the plain loss in float64: everything more than twice as far from it as
plain in the same dtype, and further than that dtype's rounding.
"""
MEASURED = """\
Every implementation takes hidden states, weight, bias and targets to a mean loss, and back to all three gradients.
They take turns in one process; a figure is the median over the rounds, after compilation. Of problems measured more
than once, the run with the least scatter counts. Memory is the peak above the inputs in a fresh process.

- **torch op**: `F.linear_cross_entropy`, with its default options or the fastest of those tried; it takes all
  logits under label smoothing.
- **cut_cross_entropy**: Apple's, `impl="torch_compile"` on a CPU, without bias.
- **torchtitan-style**: rewritten from its description, with a backward for each chunk.
"""
SHOWN = (PLAIN, COMPILED, TORCH_BEST, CUT, ENGINE, OWN)
"""The implementations on the page; `--render` prints all of them."""
NAMES = dict.fromkeys([*ON_A_CPU, *ON_A_GPU])
"""From the top of a table."""


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
    if entries := [each for each in entries_of(results, "shapes") if not problem_of(each).smoothing]:
        page += ["## Time and memory by shape", "", LEGEND, *shape_tables(results, entries, SHOWN)]
    if "gpu" in results["parts"]:
        page += ["## bfloat16 on a GPU", "", *part_table(results, "gpu")]
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
    """Return the figures of one part, and why cells are empty, each reason once."""
    entries = entries_of(results, part)
    reasons = {f"- {name}: not run: {why}" for entry in entries for name, why in entry["not run"].items()}
    return [LEGEND, *shape_tables(results, entries, NAMES), *sorted(reasons), ""]


def shape_tables(results: Results, entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """Return the time over that of plain, and the memory, a table for each dtype and smoothing."""
    tables: dict[tuple[str, float], list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: problem_of(each).dtype_name != "float32"):
        problem = problem_of(entry)
        tables.setdefault((problem.dtype_name, problem.smoothing), []).append(entry)
    page = []
    for (dtype, smoothing), of_table in tables.items():
        checked = results["checks"].get(f"{dtype} smoothing={smoothing:g}", {})
        rows = []
        if of_table[0]["seconds"]:
            for what, seconds in (("plain, s", targets.time_of(PLAIN)), ("three products, s", floor_seconds)):
                rows.append([what, *(f"{seconds(entry) or float('nan'):.3g}" for entry in of_table)])
        for name in names:
            cells = [_cell(entry, name) for entry in of_table]
            if set(cells) != {"-"}:
                rows.append([name + " *" * bool(checked.get(name)), *cells])
        corner = f"{dtype}, smoothing {smoothing:g}" if smoothing else dtype
        page += table([corner, *(problem_of(entry).shape_title for entry in of_table)], rows)
    return page


def _cell(entry: Entry, name: str) -> str:
    """Return time over that of plain and MiB, as far as they were measured."""
    time = targets.over(targets.time_of(name), targets.time_of(PLAIN))(entry)
    memory = _mib(entry["peak bytes"].get(name))
    return memory if time is None else f"{time:.2f}; {memory}"


def _mib(value: Any) -> str:
    if isinstance(value, int):
        return f"{value / MIB:,.0f}"
    return str(value or "-")  # text says what became of the process
