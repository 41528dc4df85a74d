"""The report of a run: `report.html`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recipes.translation.processes.status_line import duration
from recipes.translation.report.figures import NO_TRANSLATIONS, chrf_of_sentences, curves, distributions
from recipes.translation.report.records import RunRecords, is_number, read_run
from recipes.translation.run_folder.outputs import write_output
from recipes.translation.scores.scores import TITLES, Interval
from recipes.translation.settings.metrics import METRICS

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
page: Any = _templates.get_template("page.html").module
"""The pieces of HTML around charts; each is a macro that escapes whatever comes from data: `page.note(text)` returns a
`Markup`."""
WORST = 10
"""Number of sentences that are shown as the worst."""
SHOWN_VALIDATIONS = 6
"""Number of validations whose translations of a sample are shown: the first, the newest, and some between them."""


def write_report(run: Path, output: Path) -> int:
    """Write the page of a run, replacing an earlier one; return its size in bytes.

    Raises DataError if there is no run.
    """
    # Half a surrogate pair can occur in JSON, but not in UTF-8
    content = report(read_run(run)).encode("utf-8", "replace")
    write_output(output, content)
    return len(content)


def report(run: RunRecords) -> str:
    """Return the page of a run."""
    drawn = time.strftime("drawn on %Y-%m-%d at %H:%M UTC", time.gmtime())
    progress = f"step {run.last_step:,} {_planned_steps(run)}".rstrip()
    parts = [
        page.tiles(_numbers(run)),
        page.section("Evaluation", *_evaluation(run)),
        page.section("Training", page.charts(curves(run))),
        page.section("Samples", *_samples(run)),
        page.section("Sentences", *_sentences(run)),
        page.section("Settings and machine", *_origin(run)),
    ]
    return str(page.page(f"Run {run.name}", f"{progress}; {drawn}", parts))


def _planned_steps(run: RunRecords) -> str:
    """Return how many steps are planned, in words; empty if that is not known."""
    if not run.planned_steps:
        return ""
    return f"of {run.planned_steps:,}"


def _numbers(run: RunRecords) -> list[tuple[str, str, str]]:
    found = [("steps", f"{run.last_step:,}", _planned_steps(run))]
    seconds = sum(record["seconds"] for record in run.machine if is_number(record.get("seconds")))
    if seconds:
        found.append(("time in steps", duration(seconds), "without validations"))
    for name, metric in METRICS.items():
        if best := run.best(name):
            value = format_number(best[f"valid_{name}"])
            found.append((f"best {metric.heading}", value, f"validation, step {best['step']:,}"))
    return found


def format_number(number: float) -> str:
    """Return a number with four digits or, from 10,000 on, where four would need an exponent, as a whole number."""
    if round(abs(number)) >= 10_000:  # 9,999.6 counts, since four digits would round it to 10,000
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _evaluation(run: RunRecords) -> list[str]:
    """Return the scores that `evaluate` wrote, one table for each test set."""
    parts = []
    for name, record in run.scores.items():
        rows = [[title, cell] for field, title in TITLES.items() if (cell := _score(record, field))]
        rows.append(["sentences", str(record.get("sentences", ""))])
        title = "test set" if name == "test" else f"test set {name.removeprefix('test.')}"
        parts.append(page.table([title, f"{run.name}{_scored_model(run, name)}"], rows, numbers=True))
        signature = record.get("bleu_signature", "unknown")
        parts.append(page.note(f"[ ] is the 95 % confidence interval. BLEU: {signature}"))
        if run.scored.get(name) == "":
            parts.append(page.note("A later model has replaced the earlier one: evaluate it again."))
    return parts or [page.note("There are no results of the command evaluate yet.")]


def _scored_model(run: RunRecords, name: str) -> str:
    """Return which of the run's models has the scores of a test set, alone or in an ensemble."""
    if name not in run.scored:
        return " (model not recorded)"
    others = len(run.scores[name]["weights"]) - 1
    ensemble = ""
    if others:
        ensemble = f", with {others} other model{'s' * (others > 1)}"
    return f" ({run.scored[name] or 'an earlier model'}{ensemble})"


def _score(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not is_number(value):
        return ""
    bounds = (record.get("intervals") or {}).get(field)
    if bounds:
        return f"{value:.2f} {Interval(*bounds)}"
    return f"{value:.2f}"


def _samples(run: RunRecords) -> list[str]:
    """Return the sample sentences, each with its translations by some validations."""
    if not run.samples:
        return [page.note(NO_TRANSLATIONS)]
    last = len(run.samples) - 1
    places = sorted({last * number // (SHOWN_VALIDATIONS - 1) for number in range(SHOWN_VALIDATIONS)})
    found = []
    for number, sample in enumerate(run.samples[-1]["samples"]):
        pairs = {"source": sample["source"]}
        for place in places:
            earlier = run.samples[place]["samples"]
            if number < len(earlier) and earlier[number]["source"] == sample["source"]:
                pairs[f"step {run.samples[place]['step']:,}"] = earlier[number]["translation"]
        pairs["reference"] = sample["reference"]
        found.append(page.listed(pairs.items()))
    said = "Validation sentences, translated greedily; the same ones at every validation."
    return [page.note(said), page.cards(found)]


def _sentences(run: RunRecords) -> list[str]:
    """Return the distributions over the newest validation's sentences, and the worst sentences."""
    parts = [page.charts(distributions(run.newest))]
    newest = run.newest
    if newest is None:
        return parts
    scores = chrf_of_sentences(newest)
    worst = [
        page.listed(
            [
                ("chrF", f"{scores[row]:.1f}"),
                ("source", newest["sources"][row]),
                ("translation", newest["translations"][row]),
                ("reference", newest["references"][row]),
            ]
        )
        for row in scores.argsort(kind="stable")[:WORST].tolist()
    ]
    said = f"The lowest chrF of {len(scores):,} validation sentences, step {newest['step']:,}."
    return [*parts, page.heading("The worst sentences"), page.note(said), page.cards(worst)]


def _origin(run: RunRecords) -> list[str]:
    """Return where the run comes from: command, machine, versions and settings."""
    parts = []
    began = [
        {"after step": f"{each['step']:,}", **{name: str(each["began"].get(name, "")) for name in ("time", "command")}}
        for each in run.machine
        if each.get("began") is not None
    ]
    if began:
        parts.append(page.cards(page.listed(each.items()) for each in began))
        about = {name: str(run.newest_start[name]) for name in ("model", "layout") if name in run.newest_start}
        facts = [about, *(run.newest_start.get(name) or {} for name in ("hardware", "software"))]
        found = (page.listed((name, str(value)) for name, value in each.items()) for each in facts if each)
        parts.append(page.cards(found))
    else:
        parts.append(page.note("Command, machine and versions are not recorded (resources.jsonl)."))
    settings = [(name, _format_setting(value)) for name, value in run.settings.items()]
    if settings:
        parts.append(page.folded(f"All {len(settings)} settings", page.table(("setting", "value"), settings)))
    else:
        parts.append(page.note("No settings are recorded."))
    return parts


def _format_setting(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if value is None or value == "":
        return "none"
    return str(value)
