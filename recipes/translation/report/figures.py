"""The charts of a page: which numbers they show, and what a reader should know about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.translation.report.charts import Series, histogram, line_chart
from recipes.translation.report.records import Record, RunRecords, is_number
from recipes.translation.scores.scores import Array, compute_metric, metrics
from recipes.translation.settings.metrics import METRICS

MOST_POINTS = 200
"""The most points in a curve."""

MOST_PARTS = 6
"""Number of corpora whose validations a chart shows besides the overall one; with the training loss, eight colours."""

NO_TRANSLATIONS = "No translations of a validation are recorded (validate_bleu is 0, or none has taken place yet)."


@dataclass(frozen=True)
class Chart:
    """A chart on the page; the caption of one without `svg` says why it is missing."""

    title: str
    caption: str
    svg: str = ""


def curves(run: RunRecords) -> list[Chart]:
    """Return the curves over the steps of training."""
    return [
        _loss(run),
        *(_of_validations(run, name) for name in METRICS if name != "loss"),
        _of_steps(run, "Learning rate", "learning_rate", "At each step."),
        _of_steps(run, "Gradient norm", "gradient_norm", "Before clipping, means of consecutive steps.", log=True),
        _speed(run),
        _memory(run),
    ]


def distributions(newest: Record | None) -> list[Chart]:
    """Return the distributions of scores and lengths over the sentences of the newest validation."""
    if not newest:
        return [Chart("Scores of sentences", NO_TRANSLATIONS)]
    scores = chrf_of_sentences(newest).tolist()
    sides = [("references", 1), ("translations", 0)]
    lengths = [(side, [float(len(text)) for text in newest[side]], color) for side, color in sides]
    return [
        Chart(
            "Scores of sentences",
            "chrF of each validation sentence, greedy translation, newest validation; share of the sentences.",
            histogram("Scores of sentences", "chrF", [("", scores, 0)], legend=False),
        ),
        Chart(
            "Lengths of sentences",
            "In characters, of the same sentences; share of the sentences.",
            histogram("Lengths of sentences", "characters", lengths, legend=True),
        ),
    ]


def chrf_of_sentences(newest: Record) -> Array:
    """Compute the chrF of each sentence."""
    found = compute_metric("chrf", metrics()["chrf"], newest["translations"], newest["references"])
    return found.of_sums(found.statistics)


def bin_means(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return weighted means of consecutive points, at most MOST_POINTS: one for each bin of (nearly) equal size."""
    if not x:
        return [], []
    starts = np.unique(np.linspace(0, len(x), min(MOST_POINTS, len(x)), endpoint=False).astype(int))
    total = np.add.reduceat(np.asarray(weights, dtype=float), starts)
    means = np.add.reduceat(np.asarray(y, dtype=float) * weights, starts) / total
    counts = np.diff([*starts, len(x)])
    return (np.add.reduceat(np.asarray(x, dtype=float), starts) / counts).tolist(), means.tolist()


def thin_points(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return every n-th point, at most MOST_POINTS and always including the newest, as two columns."""
    step = max(1, -(-len(points) // MOST_POINTS))
    kept = points[::-step][::-1]
    return [x for x, _ in kept], [y for _, y in kept]


def _chart(title: str, caption: str, series: Sequence[Series], none: str, **how: bool) -> Chart:
    """Return the chart of the curves that have points; if none has, one whose caption says so."""
    drawn = [each for each in series if each.x]
    if not drawn:
        return Chart(title, none)
    return Chart(title, caption, line_chart(title, drawn, **how))


def _of_steps(run: RunRecords, title: str, name: str, caption: str, *, log: bool = False) -> Chart:
    return _chart(title, caption, [_step_series(run, name, title)], "No step is recorded yet.", log=log)


def _loss(run: RunRecords) -> Chart:
    series = [_step_series(run, "loss", "training", weighted=True)]
    if run.validations:
        series.append(_validation_series(run, "valid_loss", 1, "validation"))
        series += _part_series(run, "valid_loss", 2)
    caption = (
        "Per target token, with label smoothing as in training. Training: dropout included, means of consecutive "
        f"steps. Validation: without dropout.{_on_parts(run, 'all together')}"
    )
    return _chart("Loss", caption, series, "No step is recorded yet.", legend=True)


def _of_validations(run: RunRecords, metric_name: str) -> Chart:
    metric = METRICS[metric_name]
    name = f"valid_{metric_name}"
    whole = "all together"
    if metric.of_translations:
        whole = "the mean"
    series = [_validation_series(run, name, 0, whole), *_part_series(run, name, 1)]
    none = "There has been no validation yet."
    if run.validations:
        none = "The validations did not record it (validate_bleu is 0)."
    caption = metric.caption + _on_parts(run, whole)
    return _chart(metric.title, caption, series, none, log=metric.log_scale, legend=bool(run.parts))


def _part_series(run: RunRecords, name: str, color: int) -> list[Series]:
    """Return a curve for each of the first corpora with validation data, if several have some."""
    return [
        _validation_series(run, f"{name}.{part}", color + number, part)
        for number, part in enumerate(run.parts[:MOST_PARTS])
    ]


def _on_parts(run: RunRecords, whole: str) -> str:
    """Return what a caption says about the curves of single corpora; `whole` says what the overall curve shows."""
    if not run.parts:
        return ""
    which = f"each of {len(run.parts)} corpora"
    if len(run.parts) > MOST_PARTS:
        which = f"the first {MOST_PARTS} of {len(run.parts)} corpora"
    return f" One curve of validations is {whole}; the others are {which}."


def _speed(run: RunRecords) -> Chart:
    tokens = {record["step"]: record.get("tokens") for record in run.steps}
    timed = [
        (record["step"], record["seconds"], tokens[record["step"]])
        for record in run.machine
        if is_number(record.get("seconds")) and record["seconds"] > 0 and is_number(tokens.get(record["step"]))
    ]
    # Tokens over seconds rather than a mean of speeds: each step counts in proportion to the time it took
    speeds = [count / seconds for _, seconds, count in timed]
    x, y = bin_means([step for step, *_ in timed], speeds, [seconds for _, seconds, _ in timed])
    title = "Tokens a second"
    caption = "Target tokens without padding, in optimizer steps: validation and saving do not count."
    return _chart(title, caption, [Series(title, x, y, 0)], "No step's time is recorded (resources.jsonl).")


def _memory(run: RunRecords) -> Chart:
    found = [(each["step"], each["memory"]) for each in run.machine if each.get("memory") is not None]
    devices = dict.fromkeys(name for _, memory in found for name in memory)
    series = []
    for place, device in enumerate(devices):
        points = [(step, memory[device] / 2**30) for step, memory in found if is_number(memory.get(device))]
        series.append(Series(device, *thin_points(points), place, points=True))
    caption = "By device, since training began or resumed. cpu: the resident set of a process; cuda: allocated tensors."
    none = "No memory is recorded: it is measured at each validation (resources.jsonl)."
    return _chart("Peak memory (GiB)", caption, series, none, legend=True)


def _step_series(run: RunRecords, name: str, label: str, *, weighted: bool = False) -> Series:
    records = [record for record in run.steps if is_number(record.get(name))]
    weights = [1.0] * len(records)
    if weighted and all(is_number(record.get("tokens")) and record["tokens"] > 0 for record in records):
        weights = [float(record["tokens"]) for record in records]
    return Series(label, *bin_means([each["step"] for each in records], [each[name] for each in records], weights), 0)


def _validation_series(run: RunRecords, name: str, color: int, label: str) -> Series:
    found = [(record["step"], record[name]) for record in run.validations if is_number(record.get(name))]
    return Series(label, *thin_points(found), color, points=True)
