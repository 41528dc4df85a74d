"""The charts of a page: which numbers they show, and what a reader should know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipes.translation.report.charts import Series, attention_chart, histogram, line_chart
from recipes.translation.report.records import Record, RunRecords, is_number
from recipes.translation.scores.statistics import Array, measured, metrics
from recipes.translation.settings.metrics import METRICS

MOST_POINTS = 200
"""Points of a curve; those of several runs share twice as many."""

MOST_PARTS = 6
"""Corpora whose validations a chart shows beside that of all; with the training loss these are eight colors."""

NO_TRANSLATIONS = "No translations of a validation are recorded (validate_bleu is 0, or none has taken place yet)."

NO_STEPS = "No step is recorded yet."


@dataclass(frozen=True)
class Chart:
    """A chart of the page; one without `svg` has a caption that says why."""

    title: str
    caption: str
    svg: str = ""


def _chart(title: str, caption: str, series: Sequence[Series], none: str, **how: bool) -> Chart:
    """Return the chart of the curves that have points; where there is none, one that says so."""
    drawn = [each for each in series if each.x]
    if not drawn:
        return Chart(title, none)
    return Chart(title, caption, line_chart(title, drawn, **how))


def curves(runs: Sequence[RunRecords]) -> list[Chart]:
    """Return the curves over the steps of training."""
    return [
        *_loss(runs),
        *(_of_validations(runs, name) for name in METRICS if name != "loss"),
        _of_steps(runs, "Learning rate", "learning_rate", "At each step.", weighted=False),
        _gradient_norm(runs),
        _speed(runs),
        _memory(runs),
    ]


def distributions(runs: Sequence[RunRecords]) -> list[Chart]:
    """Return the distributions of scores and lengths over the sentences of each run's newest validation."""
    shown = [(number, run.newest) for number, run in enumerate(runs) if run.newest]
    several = len(runs) > 1
    if not shown:
        return [Chart("Scores of sentences", NO_TRANSLATIONS)]
    scores = [(runs[number].name, chrf_of_sentences(newest).tolist(), number) for number, newest in shown]
    texts = [(runs[number].name, newest["translations"], number) for number, newest in shown]
    if not several:
        (_, newest) = shown[0]
        texts = [("references", newest["references"], 1), ("translations", newest["translations"], 0)]
    groups = [(label, [float(len(text)) for text in each], number) for label, each, number in texts]
    return [
        Chart(
            "Scores of sentences",
            "chrF of each validation sentence, greedy translation, newest validation; share of the sentences.",
            histogram("Scores of sentences", "chrF", scores, False),
        ),
        Chart(
            "Lengths of sentences",
            "In characters, of the same sentences; share of the sentences.",
            histogram("Lengths of sentences", "characters", groups, not several),
        ),
    ]


def attention_maps(run: RunRecords) -> list[tuple[Chart, Record]]:
    """Return the attention maps of the newest validation's samples, with the samples."""
    found: list[tuple[Chart, Record]] = []
    for sample in (run.samples or [{"samples": []}])[-1]["samples"]:
        attention = sample.get("attention")
        if not attention:
            continue
        title = f"Attention, sentence {len(found) + 1}"
        svg = attention_chart(title, attention["source"], attention["target"], np.asarray(attention["weights"]))
        found.append((Chart(title, "", svg), sample))
    return found


def chrf_of_sentences(newest: Record) -> Array:
    """Compute the chrF of each sentence."""
    found = measured("chrf", metrics()["chrf"], newest["translations"], newest["references"])
    return found.of_sums(found.statistics)


def binned(
    x: Sequence[float], y: Sequence[float], weights: Sequence[float], most: int
) -> tuple[list[float], list[float]]:
    """Return weighted means of consecutive points, at most `most` of them: one point per bin of equally many."""
    if not x:
        return [], []
    starts = np.unique(np.linspace(0, len(x), min(most, len(x)), endpoint=False).astype(int))
    total = np.add.reduceat(np.asarray(weights, dtype=float), starts)
    means = np.add.reduceat(np.asarray(y, dtype=float) * weights, starts) / total
    counts = np.diff([*starts, len(x)])
    return (np.add.reduceat(np.asarray(x, dtype=float), starts) / counts).tolist(), means.tolist()


def _loss(runs: Sequence[RunRecords]) -> list[Chart]:
    """Return one chart of both losses, or of several runs one for each."""
    caption = "Per target token, with label smoothing as in training. Training: dropout included"
    if len(runs) > 1:
        return [
            _of_steps(runs, "Training loss", "loss", f"{caption}; means of consecutive steps."),
            _of_validations(runs, "loss", "Validation loss"),
        ]
    (run,) = runs
    x, y = _step_curve(run, "loss", True, MOST_POINTS)
    series = [Series("training", x, y, 0)]
    if run.validations:
        series.append(_validation_series(run, "valid_loss", 1, "validation"))
        series += _part_series(run, "valid_loss", 2)
    caption += f", means of consecutive steps. Validation: without dropout.{_on_parts(run, 'all together')}"
    return [_chart("Loss", caption, series, NO_STEPS, legend=True)]


def _of_steps(runs: Sequence[RunRecords], title: str, name: str, caption: str, weighted: bool = True) -> Chart:
    series = [
        Series(run.name, *_step_curve(run, name, weighted, _points(runs)), number) for number, run in enumerate(runs)
    ]
    return _chart(title, caption, series, NO_STEPS)


def _of_validations(runs: Sequence[RunRecords], metric_name: str, title: str = "") -> Chart:
    """Return the chart of a metric, under its own title if there is no other."""
    metric = METRICS[metric_name]
    title = title or metric.title
    caption = metric.caption
    name = f"valid_{metric_name}"
    series = [_validation_series(run, name, number, run.name, _points(runs)) for number, run in enumerate(runs)]
    several = len(runs) == 1 and bool(runs[0].parts)
    if several:
        whole = "all together"
        if metric.of_translations:
            whole = "the mean"
        series = [replace(series[0], label=whole), *_part_series(runs[0], name, 1)]
        caption += _on_parts(runs[0], whole)
    none = "There has been no validation yet."
    if any(run.validations for run in runs):
        none = "The validations did not record it (validate_bleu is 0)."
    return _chart(title, caption, series, none, log=metric.log_scale, legend=several)


def _part_series(run: RunRecords, name: str, color: int) -> list[Series]:
    """Return a curve for each of the first corpora that have validation data, where several have some."""
    return [
        _validation_series(run, f"{name}.{part}", color + number, part)
        for number, part in enumerate(run.parts[:MOST_PARTS])
    ]


def _on_parts(run: RunRecords, whole: str) -> str:
    """Return what a caption says of the curves of single corpora; `whole` is what that of all of them shows."""
    if not run.parts:
        return ""
    which = f"each of {len(run.parts)} corpora"
    if len(run.parts) > MOST_PARTS:
        which = f"the first {MOST_PARTS} of {len(run.parts)} corpora"
    return f" One curve of validations is {whole}; the others are {which}."


def _gradient_norm(runs: Sequence[RunRecords]) -> Chart:
    series = []
    count = 0
    for number, run in enumerate(runs):
        x, y = _step_curve(run, "gradient_norm", False, _points(runs))
        marks = [
            (float(record["step"]), float(record["gradient_norm"]))
            for record in run.steps
            if "gradient_norm" in record.get("outliers", ()) and is_number(record.get("gradient_norm"))
        ]
        count += len(marks)
        # The largest, where there are many: a page has room for so many crosses
        marks = sorted(sorted(marks, key=lambda mark: -mark[1])[:100])
        series.append(Series(run.name, x, y, number, marks=marks))
    caption = f"Before clipping, means of consecutive steps. Outliers: {count:,}"
    if count:
        caption += ", each marked by a cross at its own norm"
    return _chart("Gradient norm", f"{caption}.", series, NO_STEPS, log=True)


def _speed(runs: Sequence[RunRecords]) -> Chart:
    series = []
    for number, run in enumerate(runs):
        tokens = {record["step"]: record.get("tokens") for record in run.steps}
        timed = [
            (record["step"], record["seconds"], tokens[record["step"]])
            for record in run.machine
            if is_number(record.get("seconds")) and record["seconds"] > 0 and is_number(tokens.get(record["step"]))
        ]
        if timed:
            steps, seconds, counts = zip(*timed, strict=True)
            # Tokens over seconds, and not a mean of speeds: each step counts by the time it took
            speeds = [count / taken for count, taken in zip(counts, seconds, strict=True)]
            series.append(Series(run.name, *binned(steps, speeds, seconds, _points(runs)), number))
    caption = "Target tokens without padding, in optimizer steps: validation and saving do not count."
    return _chart("Tokens a second", caption, series, "No step's time is recorded (resources.jsonl).")


def _memory(runs: Sequence[RunRecords]) -> Chart:
    series = []
    for number, run in enumerate(runs):
        found = [(each["step"], each["memory"]) for each in run.machine if each.get("memory") is not None]
        devices = list(dict.fromkeys(name for _, memory in found for name in memory))
        for place, device in enumerate(devices):
            points = [(step, memory[device] / 2**30) for step, memory in found if is_number(memory.get(device))]
            if len(runs) == 1:
                series.append(Series(device, *thinned(points, MOST_POINTS), place, points=True))
        if found and len(runs) > 1:
            points = [(step, max(filter(is_number, memory.values()), default=0) / 2**30) for step, memory in found]
            series.append(Series(run.name, *thinned(points, _points(runs)), number, points=True))
    none = "No memory is recorded: it is measured at each validation (resources.jsonl)."
    which = "By device"
    if len(runs) > 1:
        which = "Of the device that used most"
    caption = f"{which}, since training began or went on. cpu: the resident set of a process; cuda: allocated tensors."
    return _chart("Peak memory (GiB)", caption, series, none, legend=len(runs) == 1)


def _step_curve(run: RunRecords, name: str, weighted: bool, most: int) -> tuple[list[float], list[float]]:
    records = [record for record in run.steps if is_number(record.get(name))]
    weights = [1.0] * len(records)
    if weighted and all(is_number(record.get("tokens")) and record["tokens"] > 0 for record in records):
        weights = [float(record["tokens"]) for record in records]
    return binned([record["step"] for record in records], [record[name] for record in records], weights, most)


def _validation_series(run: RunRecords, name: str, color: int, label: str, most: int = MOST_POINTS) -> Series:
    found = [(record["step"], record[name]) for record in run.validations if is_number(record.get(name))]
    return Series(label, *thinned(found, most), color, points=True)


def thinned(points: Sequence[tuple[float, float]], most: int) -> tuple[list[float], list[float]]:
    """Return the columns of every n-th point, at most `most` of them, always with the newest."""
    step = max(1, -(-len(points) // most))
    kept = points[::-step][::-1]
    return [x for x, _ in kept], [y for _, y in kept]


def _points(runs: Sequence[RunRecords]) -> int:
    return min(MOST_POINTS, 2 * MOST_POINTS // len(runs))
