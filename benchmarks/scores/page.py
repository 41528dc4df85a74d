"""Write the measurements as a page of Markdown: what they say and the tables first, the commands last."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.loss.report import check_table, how_measured
from benchmarks.loss.results import MIB, Entry, Results, entries_of, peak, problem_of, read, stem
from benchmarks.loss.timing import CHUNKED, WHOLE
from benchmarks.scores.ways import BY_HAND, CASES, FLOAT32, INVARIANT, OURS, TRL_TILES, WAYS, Case
from seqpar.markdown_table import markdown_table

QUIET = 1.0
"""Load average above which something else ran when a measurement began."""
LEGEND = """\
A cell has the time over that of the bare matrix products (fastest runs; in brackets the medians), and the peak memory
above inputs and gradients. Ways marked (k) keep all logits for backward, and so make one product less where the
projection is trained. A `*` marks scores or gradients that are more than twice as far from float64 as plain
`log_softmax` in the same dtype.
"""
MEASURED = """\
The ways take turns in one process; all of one column are measured in the same rounds. A step is forward, and backward
from one random number per score, after compilation. Memory is measured in a fresh process. "TRL, functions of logits"
are `selective_log_softmax` and `entropy_from_logits` of all logits; "TRL, tiles", TRL's default, has tiles of 4,096
rows x 32,768 classes; "logsumexp" is `logits.gather(...) - logits.logsumexp(-1)` in float32.
"""
SHOWN = [Case("hidden and projection", entropy=False)]
"""The cases on the page; `--render` prints all of them."""


CHECKED = """\
Compared with plain torch in float64, at 256 x 24 x 1,000; wrong is more than twice as far from it as plain torch in the
same dtype.
"""


def write(path: Path) -> None:
    """Write the page next to the file of measurements."""
    results = read(path)
    page = ["# Log-probabilities and entropies of tokens, forward and backward", "", *findings(results), ""]
    # What a reader must know of figures that were measured before a change, and what was measured since
    page += [disturbance(results), "", *results.get("remarks", []), LEGEND]
    for case in SHOWN:
        if of_case := entries_of(results, str(case)):
            page += [f"## {heading(case)}", "", *case_table(results, case, of_case)]
    page += [*check_table(results, CHECKED), *how_measured(results, path, MEASURED, "python -m benchmarks.scores")]
    written = path.parent / f"{stem(results['device'], 'scores')}.md"
    written.write_text("\n".join(page) + "\n")
    print(f"written: {written}")


def heading(case: Case) -> str:
    """Return the title of a case's section."""
    titles = {
        "hidden and projection": "The projection is trained",
        "hidden": "The projection is frozen",
        "nothing": "Without gradients",
    }
    products = sum(case.products.values())
    with_entropy = "with entropy" if case.entropy else "only log-probabilities"
    return f"{titles[case.gradients]}, {with_entropy}: {products} product{'s' * (products > 1)}"


def case_table(results: Results, case: Case, entries: list[Entry]) -> list[str]:
    """Return a table with a row for every way and a column for every problem."""
    titles = [problem_of(entry).title for entry in entries]
    floors = [f"{products_seconds(entry, case, problem_of(entry).dtype_name, min):.2f}" for entry in entries]
    rows = [["bare products, s", *floors]]
    for name, way in WAYS.items():
        cells = [_cell(results, entry, case, name) for entry in entries]
        if any(cell != "-" for cell in cells):
            kept = " (k)" if way.kept and case.gradients != "nothing" else ""
            rows.append([name + kept, *cells])
    reasons = {f"- {name}: not run: {why}" for entry in entries for name, why in entry["not run"].items()}
    return [*markdown_table(["", *titles], rows).splitlines(), "", *sorted(reasons)]


def _cell(results: Results, entry: Entry, case: Case, name: str) -> str:
    """Return time over that of the products, and memory."""
    if name not in entry["seconds"]:
        return "-"
    text = f"{ratio(entry, case, name, min):.2f} ({ratio(entry, case, name):.2f}); "
    found = peak(entry, name)
    text += str(entry["peak bytes"][name]) if found is None else f"{found / MIB:,.0f} MiB"
    wrong = results["checks"].get(f"{problem_of(entry).dtype_name}: {case}", {}).get(name)
    return f"{text} *" if wrong else text


Middle = Callable[[list[float]], float]
"""Which of a way's times counts: the median, or the fastest, which a shared machine disturbs least."""


def ratio(entry: Entry, case: Case, name: str, middle: Middle = statistics.median) -> float:
    """Return a way's time over that of the products."""
    dtype = problem_of(entry).dtype_name
    if name in WAYS and (products := WAYS[name].products):
        dtype = str(products).removeprefix("torch.")
    return middle(entry["seconds"][name]) / products_seconds(entry, case, dtype, middle)


def products_seconds(entry: Entry, case: Case, dtype: str, middle: Middle = statistics.median) -> float:
    """Return the time of the products of a case, in chunks or all at once, whichever is faster."""
    times = entry["floor seconds"]
    found = [
        sum(count * middle(times[f"{dtype}: {name}, {size}"]) for name, count in case.products.items())
        for size in (CHUNKED, WHOLE)
        if f"{dtype}: logits, {size}" in times
    ]
    return min(found)


def findings(results: Results) -> list[str]:
    """Return in words what the tables say."""
    lines = []
    every = [(case, entry) for case in CASES for entry in entries_of(results, str(case))]
    for dtype in ("float32", "bfloat16"):
        of_dtype = [(case, entry) for case, entry in every if problem_of(entry).dtype_name == dtype]
        words = [f"`token_scores` takes {_range(of_dtype, OURS)} the bare products' time"]
        words += [f"{name} {_range(of_dtype, name)}" for name in (TRL_TILES, BY_HAND)]
        if of_dtype:
            lines.append(f"- {dtype}: {', '.join(words)} (fastest runs).")
    entries = [entry for _, entry in every]
    lines += [f"- {text}" for text in (_memory(entries), _cost(entries, INVARIANT), _cost(entries, FLOAT32)) if text]
    return lines


def _range(every: list[tuple[Case, Entry]], name: str) -> str:
    ratios = [ratio(entry, case, name, min) for case, entry in every if name in entry["seconds"]]
    if not ratios:
        return "(not measured)"
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def _memory(entries: list[Entry]) -> str:
    """Return how much less memory than the ways that keep the logits, over all cases."""
    factors = []
    for entry in entries:
        own = peak(entry, OURS)
        others = [found for name in (BY_HAND, TRL_TILES) if (found := peak(entry, name)) is not None]
        if own and own > 0 and others:
            factors.append(min(others) / own)
    if not factors:
        return ""
    return (
        f"Above inputs and gradients the better of {BY_HAND} and {TRL_TILES} takes {min(factors):.1f} to "
        f"{max(factors):.1f} times the memory of `token_scores`."
    )


def _cost(entries: list[Entry], name: str) -> str:
    """Return a choice's time over that of the default."""
    times = [entry["seconds"] for entry in entries if name in entry["seconds"]]
    if not times:
        return ""
    factors = [min(each[name]) / min(each[OURS]) for each in times]
    return f"`{name}` takes {min(factors):.2f} to {max(factors):.2f} times as long as the default (fastest runs)."


def disturbance(results: Results) -> str:
    """Return whether anything else ran, and how far the runs of a way are apart."""
    entries = [entry for case in CASES for entry in entries_of(results, str(case))]
    times = [taken for entry in entries for taken in entry["seconds"].values()]
    if not times:
        return ""
    spread = statistics.mean(statistics.median(taken) / min(taken) for taken in times)
    rounds = [len(taken) for taken in times]
    text = f"{min(rounds)} to {max(rounds)} rounds; medians are on average {spread:.2f} times the fastest runs."
    load = max(entry["load average before"] for entry in entries)
    if load > QUIET:
        text += f" **Other work ran on the machine** (load average up to {load:.1f} before the start): times are rough."
    return text
