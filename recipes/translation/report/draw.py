"""The report of one run, or the comparison of several: `report.html`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recipes.translation.processes.status_line import duration
from recipes.translation.report.charts import SERIES, dashes_of
from recipes.translation.report.figures import NO_TRANSLATIONS, attention_maps, chrf_of_sentences, curves, distributions
from recipes.translation.report.records import RunRecords, is_number, read_run
from recipes.translation.run_folder.outputs import write_output
from recipes.translation.scores.bootstrap import Interval
from recipes.translation.scores.statistics import TITLES
from recipes.translation.settings.metrics import METRICS

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
page: Any = _templates.get_template("page.html").module
"""The pieces of HTML around charts, each a macro that escapes whatever comes from data: `page.note(text)` returns a
`Markup`."""
WORST = 10
"""Sentences that are shown as the worst."""
MACHINE = ("hardware", "software")
"""What a start of training says of the machine."""
SHOWN_VALIDATIONS = 6
"""Validations of which a sample's translation is shown: the first, the newest, and some between them."""


def write_report(folders: Sequence[Path], output: Path) -> int:
    """Write the page of the runs in `folders`, in place of an earlier one; return its size in bytes.

    Raises DataError where there is no run.
    """
    runs = [read_run(folder) for folder in folders]
    content = report(runs).encode("utf-8", "replace")  # half a surrogate pair can stand in JSON, but not in UTF-8
    write_output(output, content)
    return len(content)


def report(runs: Sequence[RunRecords]) -> str:
    """Return the page of one or several runs."""
    drawn = time.strftime("drawn on %Y-%m-%d at %H:%M UTC", time.gmtime())
    if len(runs) > 1:
        names = _unique([run.name for run in runs])
        runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
        return str(page.page(f"{len(runs)} runs compared", drawn, _comparison(runs)))
    (run,) = runs
    progress = f"step {run.last_step:,} {_planned(run)}".rstrip()
    return str(page.page(f"Run {run.name}", f"{progress}; {drawn}", _single(run)))


def _single(run: RunRecords) -> list[str]:
    return [
        page.tiles(_numbers(run)),
        page.section("Evaluation", *_evaluation([run])),
        page.section("Training", page.charts(curves([run]))),
        page.section("Samples", *_samples(run)),
        page.section("Attention", *_attention(run)),
        page.section("Sentences", *_sentences(run)),
        page.section("Settings and machine", *_origin(run)),
    ]


def _comparison(runs: Sequence[RunRecords]) -> list[str]:
    heads = ["", *(run.name for run in runs)]
    best = [[f"best validation {each.heading}", *(_best(run, name) for run in runs)] for name, each in METRICS.items()]
    rows = [["steps", *(f"{run.last_step:,}" for run in runs)], *best]
    return [
        page.key((run.name, number % len(SERIES), dashes_of(number)) for number, run in enumerate(runs)),
        page.section("Results", page.table(heads, rows, numbers=True)),
        page.section("Evaluation", *_evaluation(runs)),
        page.section("What differs", *_differences(runs)),
        page.section("Training", page.charts(curves(runs))),
        page.section("Sentences", page.charts(distributions(runs))),
        page.section("Samples", *_samples_side_by_side(runs)),
    ]


def _planned(run: RunRecords) -> str:
    """Return how many steps there are to be; empty where that is not known."""
    if not run.planned:
        return ""
    return f"of {run.planned:,}"


def _numbers(run: RunRecords) -> list[tuple[str, str, str]]:
    found = [("steps", f"{run.last_step:,}", _planned(run))]
    seconds = sum(record["seconds"] for record in run.machine if is_number(record.get("seconds")))
    if seconds:
        found.append(("time in steps", duration(seconds), "without validations"))
    for name, metric in METRICS.items():
        if best := run.best(name):
            found.append((f"best {metric.heading}", shown(best[f"valid_{name}"]), f"validation, step {best['step']:,}"))
    marked = sum(bool(record.get("outliers")) for record in run.steps)
    found.append(("outliers", f"{marked:,}", "steps, by loss or gradient norm"))
    return found


def _best(run: RunRecords, name: str) -> str:
    best = run.best(name)
    if best is None:
        return "none"
    return f"{shown(best[f'valid_{name}'])} (step {best['step']:,})"


def shown(number: float) -> str:
    """Return a number with four digits, or as a whole one from 10,000 on, where these would need an exponent."""
    if abs(number) >= 10_000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _evaluation(runs: Sequence[RunRecords]) -> list[str]:
    """Return the scores that `evaluate` wrote, a table for each test set."""
    parts = []
    for name in dict.fromkeys(name for run in runs for name in run.scores):
        having = [run for run in runs if name in run.scores]
        rows = []
        for field, title in TITLES.items():
            cells = [_score(run.scores[name], field) for run in having]
            if any(cells):
                rows.append([title, *(cell or "none" for cell in cells)])
        rows.append(["sentences", *(str(run.scores[name].get("sentences", "")) for run in having)])
        title = "test set" if name == "test" else f"test set {name.removeprefix('test.')}"
        heads = [title, *(f"{run.name}{_scored_by(run, name)}" for run in having)]
        parts.append(page.table(heads, rows, numbers=True))
        signatures = {str(run.scores[name].get("bleu_signature", "unknown")) for run in having}
        parts.append(page.note(f"[ ] is the 95 % confidence interval. BLEU: {'; '.join(sorted(signatures))}"))
        made_of = {sides for run in having if (sides := _made_of(run.scores[name]))}
        if len(made_of) > 1:
            parts.append(page.note("The sentences or references differ, so that these scores cannot be compared."))
        if any(run.scored.get(name) == "" for run in having):
            parts.append(page.note("A later model has replaced the earlier one: evaluate it again."))
    if not parts:
        parts = [page.note("There are no results of the command evaluate yet.")]
    return parts


def _scored_by(run: RunRecords, name: str) -> str:
    """Return which of the run's models has the scores of a test set, alone or with those of an ensemble."""
    if name not in run.scored:
        return " (model not recorded)"
    others = len(run.scores[name]["weights"]) - 1
    ensemble = ""
    if others:
        ensemble = f", with {others} other model{'s' * (others > 1)}"
    return f" ({run.scored[name] or 'an earlier model'}{ensemble})"


def _made_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the SHA-256 of the sources and references of scores; empty where the record does not have both."""
    sides = [record.get(side) or {} for side in ("sources", "references")]
    if not all(sides):
        return ()
    return tuple(side["sha256"] for side in sides)


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


def _attention(run: RunRecords) -> list[str]:
    found = attention_maps(run)
    if not found:
        when = "at each validation that translates, for sentences of at most 40 subwords"
        return [page.note(f"No attention is recorded. It is {when}.")]
    read = found[0][1]["attention"]["read"]
    said = (
        "How much the model attends to each source subword (columns) when it writes a subword of its translation "
        f"(rows): {read}."
    )
    return [
        page.note(said),
        *(
            page.attention_map(chart, {"source": sample["source"], "translation": sample["translation"]})
            for chart, sample in found
        ),
    ]


def _sentences(run: RunRecords) -> list[str]:
    """Return the distributions over the newest validation's sentences, and the worst of these."""
    parts = [page.charts(distributions([run]))]
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
        about = {name: str(run.began[name]) for name in ("model", "layout") if name in run.began}
        facts = [about, *(each for name in MACHINE if (each := run.began.get(name)) is not None)]
        parts.append(page.cards(page.listed((name, str(value)) for name, value in each.items()) for each in facts))
    else:
        parts.append(page.note("Command, machine and versions are not recorded (resources.jsonl)."))
    settings = [(name, _shown(value)) for name, value in run.settings.items()]
    if settings:
        parts.append(page.folded(f"All {len(settings)} settings", page.table(("setting", "value"), settings)))
    else:
        parts.append(page.note("No settings are recorded."))
    return parts


def _differences(runs: Sequence[RunRecords]) -> list[str]:
    """Return the settings, versions and hardware that are not the same in all runs."""
    facts = [_facts(run) for run in runs]
    names = sorted({name for each in facts for name in each} - {"run"})
    rows = []
    partly = []
    for name in names:
        values = [each.get(name, "not recorded") for each in facts]
        if len(set(values)) == 1:
            continue
        if all(name in each for each in facts):
            rows.append([name, *values])
        else:  # as in runs of different versions
            partly.append([name, *values])
    heads = ["", *(run.name for run in runs)]
    parts = [page.note("All settings that every run has recorded are the same.")]
    if rows:
        parts = [page.table(heads, rows)]
    if partly:
        parts.append(page.folded(f"{len(partly)} more that not every run has recorded", page.table(heads, partly)))
    return parts


def _facts(run: RunRecords) -> dict[str, str]:
    found = {name: _shown(value) for name, value in run.settings.items()}
    for title in MACHINE:
        found |= {f"{title}: {name}": _shown(value) for name, value in (run.began.get(title) or {}).items()}
    return found


def _samples_side_by_side(runs: Sequence[RunRecords]) -> list[str]:
    """Return each run's newest translation of the sentences that are among the samples of several runs."""
    by_source: dict[str, dict[str, str]] = {}
    references = {}
    for run in runs:
        if run.samples:
            for sample in run.samples[-1]["samples"]:
                by_source.setdefault(sample["source"], {})[run.name] = sample["translation"]
                references[sample["source"]] = sample["reference"]
    shared = {source: found for source, found in by_source.items() if len(found) > 1}
    if not shared:
        return [page.note("The runs have no samples of the same sentences.")]
    found = (
        page.listed([("source", source), *translations.items(), ("reference", references[source])])
        for source, translations in shared.items()
    )
    return [page.cards(found)]


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if value is None or value == "":
        return "none"
    return str(value)


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names of runs, numbered where two are the same: all of them where a run's own name has a number."""
    numbered = [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    found = [long if names.count(name) > 1 else name for long, name in zip(numbered, names, strict=True)]
    if len(set(found)) < len(found):
        return numbered
    return found
