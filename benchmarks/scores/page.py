"""Write the measurements as a page of Markdown: what they say and the tables first, the commands last."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.loss.results import MIB, Entry, Results, stem
from benchmarks.scores.measure import fastest_products, products_seconds
from benchmarks.scores.ways import BY_HAND, CASES, FLOAT32, INVARIANT, OURS, TRL_TILES, WAYS, Case
from seqpar.testing.markdown_table import markdown_table

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
rows x 32,768 classes; "logsumexp" is `logits.gather(...) - logits.logsumexp(-1)` in float32. Measure again, or print
the tables of every case:
"""
SHOWN = [Case("hidden and projection", entropy=False)]
"""The cases on the page; `--render` prints all of them."""


def write(path: Path) -> None:
    """Write the page next to the file of measurements."""
    results: Results = json.loads(path.read_text())
    page = path.parent / f"{stem(results['device'], 'scores')}.md"
    page.write_text("\n".join(document(results, path.name)) + "\n")
    print(f"written: {page}")


def document(results: Results, source: str) -> list[str]:
    """Return the lines of the whole page."""
    entries = list(results["parts"].values())
    page = ["# Log-probabilities and entropies of tokens, forward and backward", "", *findings(entries), ""]
    # What a reader must know of figures that were measured before a change, and what was measured since
    page += [disturbance(entries), "", *results.get("remarks", []), LEGEND]
    page += tables(results, SHOWN)
    page += [*check_table(results), "## How it was measured", ""]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    page += [
        f"{results['date']}, {results['hardware']}, {results['threads']} threads, {results['device']}; {versions}."
    ]
    page += [f"[{source}]({source}) has every figure.", "", MEASURED]
    return [*page, "```", "python -m benchmarks.scores", "python -m benchmarks.scores --render", "```"]


def tables(results: Results, cases: Iterable[Case]) -> list[str]:
    """Return a table for each case that has figures, under its title."""
    page = []
    for case in cases:
        of_case = [entry for entry in results["parts"].values() if str(case) in entry["cases"]]
        if of_case:
            page += [f"## {heading(case)}", "", *case_table(results, case, of_case), ""]
    return page


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
    titles = []
    floors = []
    for entry in entries:
        problem = entry["problem"]
        dtype = problem["dtype"]
        titles.append(f"{problem['rows']:,} x {problem['width']:,} x {problem['vocab_size']:,}, {dtype}")
        floors.append(f"{fastest_products(entry['cases'][str(case)], case, dtype):.2f}")
    rows = [["bare products, s", *floors]]
    for name, way in WAYS.items():
        cells = [cell(results, entry, case, name) for entry in entries]
        if any(cell != "-" for cell in cells):
            kept = " (k)" if way.kept and case.gradients != "nothing" else ""
            rows.append([name + kept, *cells])
    return markdown_table(["", *titles], rows).splitlines()


def cell(results: Results, entry: Entry, case: Case, name: str) -> str:
    """Return time over that of the products, and memory."""
    found = entry["cases"][str(case)]
    times = found["seconds"].get(name)
    if not times:
        return "-"
    text = f"{fastest_ratio(entry, case, name):.2f} ({ratio(entry, case, name):.2f})"
    peak = found["peak bytes"][name]
    if isinstance(peak, int):
        text += f"; {peak / MIB:,.0f} MiB"
    else:
        text += f"; {peak}"  # text says what became of the process
    if results["checks"].get(f"{entry['problem']['dtype']}: {case}", {}).get(name):
        text += " *"
    return text


def _dtype(entry: Entry, name: str) -> str:
    """Return the dtype of a way's products."""
    products = WAYS[name].products
    if products is None:
        return str(entry["problem"]["dtype"])
    return str(products).removeprefix("torch.")


def ratio(entry: Entry, case: Case, name: str) -> float:
    """Return a way's median time over that of the products."""
    found = entry["cases"][str(case)]
    return statistics.median(found["seconds"][name]) / products_seconds(found, case, _dtype(entry, name))


def fastest_ratio(entry: Entry, case: Case, name: str) -> float:
    """Return a way's fastest time over that of the products, which a shared machine disturbs least."""
    found = entry["cases"][str(case)]
    return min(found["seconds"][name]) / fastest_products(found, case, _dtype(entry, name))


def findings(entries: list[Entry]) -> list[str]:
    """Return in words what the tables say."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        of_dtype = [entry for entry in entries if entry["problem"]["dtype"] == dtype]
        words = [f"`token_scores` takes {_range(of_dtype, OURS)} the bare products' time"]
        words += [f"{name} {_range(of_dtype, name)}" for name in (TRL_TILES, BY_HAND)]
        if of_dtype:
            lines.append(f"- {dtype}: {', '.join(words)} (fastest runs).")
    lines += [f"- {text}" for text in (_memory(entries), _cost(entries, INVARIANT), _cost(entries, FLOAT32)) if text]
    return lines


def _range(entries: list[Entry], name: str) -> str:
    ratios = [
        fastest_ratio(entry, case, name)
        for entry in entries
        for case in CASES
        if name in entry["cases"].get(str(case), {}).get("seconds", {})
    ]
    if not ratios:
        return "(not measured)"
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def _memory(entries: list[Entry]) -> str:
    """Return how much less memory than the ways that keep the logits, over all cases."""
    factors = []
    for entry in entries:
        for found in entry["cases"].values():
            peaks = found["peak bytes"]
            own = peaks.get(OURS)
            others = [peaks[name] for name in (BY_HAND, TRL_TILES) if isinstance(peaks.get(name), int)]
            if isinstance(own, int) and own > 0 and others:
                factors.append(min(others) / own)
    if not factors:
        return ""
    return (
        f"Above inputs and gradients the better of {BY_HAND} and {TRL_TILES} takes {min(factors):.1f} to "
        f"{max(factors):.1f} times the memory of `token_scores`."
    )


def _cost(entries: list[Entry], name: str) -> str:
    """Return a choice's time over that of the default."""
    factors = [
        min(found["seconds"][name]) / min(found["seconds"][OURS])
        for entry in entries
        for found in entry["cases"].values()
        if name in found["seconds"]
    ]
    if not factors:
        return ""
    return f"`{name}` takes {min(factors):.2f} to {max(factors):.2f} times as long as the default (fastest runs)."


def check_table(results: Results) -> list[str]:
    """Return what is further from float64 than it may be, at a small problem."""
    rows = []
    for where, names in results["checks"].items():
        for name, wrong in names.items():
            if wrong:
                rows.append([name, where, "; ".join(wrong)])
    if not rows:
        return ["Every way is at most twice as far from float64 as plain torch (256 x 24 x 1,000).", ""]
    text = "Further than twice plain's distance from float64, at 256 x 24 x 1,000:"
    return ["## Correctness", "", text, "", *markdown_table(["way", "in", "what"], rows).splitlines(), ""]


def disturbance(entries: list[Entry]) -> str:
    """Return whether anything else ran, and how far the runs of a way are apart."""
    loads = []
    spreads = []
    rounds = []
    for entry in entries:
        for found in entry["cases"].values():
            loads.append(found["load average before"])
            for times in found["seconds"].values():
                spreads.append(statistics.median(times) / min(times))
                rounds.append(len(times))
    if not loads:
        return ""
    spread = statistics.mean(spreads)
    text = f"{min(rounds)} to {max(rounds)} rounds; medians are on average {spread:.2f} times the fastest runs."
    if max(loads) > QUIET:
        text += f" **Other work ran on the machine** (load average up to {max(loads):.1f} before the start): times are"
        text += " rough."
    return text
