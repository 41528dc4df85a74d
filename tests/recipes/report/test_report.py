"""The page of a run: complete and self-contained, whatever the run's text and whatever records it lacks."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recipes.translation.commands import main
from recipes.translation.report import figures
from recipes.translation.report.charts import Series, bins_of, histogram, line_chart, short
from recipes.translation.report.draw import format_number, report, write_report
from recipes.translation.report.figures import bin_means, chrf_of_sentences, curves
from recipes.translation.report.records import RunRecords, read_run
from recipes.translation.scores.scores import score_of
from recipes.translation.settings.metrics import METRICS
from tests.recipes.command_line import refusal
from tests.recipes.report.made import SENTENCES, lines, make_run, samples, step, validation

CURVES = [metric.title for metric in METRICS.values()]
CURVES += ["Learning rate", "Gradient norm", "Tokens a second", "Peak memory (GiB)"]
CHARTS = [*CURVES, "Scores of sentences", "Lengths of sentences"]


class Page(HTMLParser):
    """The elements, attributes and text of a page, as a browser reads them."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "made")


@pytest.fixture(scope="module")
def content(run: Path) -> str:
    return report(read_run(run))


@pytest.fixture(scope="module")
def page(content: str) -> Page:
    return Page(content)


def drawn(page: Page) -> list[str]:
    return page.values("aria-label")


def test_every_record_has_its_chart_with_an_accessible_name(page: Page) -> None:
    assert drawn(page) == CHARTS
    assert page.tags.count("svg") == page.values("role").count("img") == len(drawn(page))


def test_the_steps_after_which_training_ends_are_those_it_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", settings={"training.steps": 60, "training.epochs": 2})
    resources = run / "resources.jsonl"
    recorded = resources.read_text()
    without = recorded.replace('"steps": 50', '"command": ""')
    for records, said in ((recorded, "step 40 of 50"), (without, "step 40")):
        resources.write_text(records)
        assert f">{said}; " in report(read_run(run))


def test_a_page_says_how_the_run_was_started_on_which_machine_and_with_what(page: Page) -> None:
    for said in ("after step", "python -m recipes.translation train", "2026-01-01 00:00:00 UTC", "cores", "2.11"):
        assert said in page.text
    assert "not recorded (resources.jsonl)" not in page.text


def test_a_page_asks_no_host_and_runs_no_script(page: Page) -> None:
    assert "script" not in page.tags
    assert not {"link", "img", "iframe", "object", "image"} & set(page.tags)
    references = page.values("href") + page.values("src") + page.values("xlink:href")
    assert references
    assert all(reference.startswith("#") for reference in references)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_text_of_the_data_is_shown_as_it_is_and_is_no_markup(page: Page) -> None:
    for texts in SENTENCES:
        for text in texts:
            assert text in page.text
    assert "$x$" in page.text
    assert "b" not in page.tags


def test_text_of_the_data_has_its_own_direction(content: str) -> None:
    assert '<span class="text" dir="auto">כלב רץ</span>' in content


def test_no_two_elements_have_the_same_id_and_every_reference_has_its_target(page: Page) -> None:
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {reference[1:] for reference in page.values("xlink:href")} <= set(ids)


def test_charts_have_the_page_s_colors_and_no_background(run: Path) -> None:
    charts = [chart.svg for chart in curves(read_run(run))]
    assert all("var(--ink)" in svg and "var(--series-0)" in svg for svg in charts)
    assert not any("#" in style for svg in charts for style in Page(svg).values("style"))
    assert "var(--series-1)" in charts[0]


def test_how_a_translation_changed_is_shown_from_the_first_validation_to_the_newest(page: Page) -> None:
    assert "ein Hund rennt 10" in page.text
    assert "ein Hund rennt 40" in page.text


def test_the_worst_sentences_come_first(run: Path, page: Page) -> None:
    newest = read_run(run).newest
    each = [score_of("chrf", [found], [reference], lowercase=False) for _, reference, found in SENTENCES]
    assert chrf_of_sentences(newest) == pytest.approx(each)
    text = page.text.partition("The worst sentences")[2]
    positions = [text.index(SENTENCES[number][2]) for number in sorted(range(4), key=each.__getitem__)[:2]]
    assert positions == sorted(positions)


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Series]]:
    """The lines of the charts that are drawn, by title."""
    found: dict[str, list[Series]] = {}

    def noted(title: str, lines: list[Series], **_: object) -> str:
        found[title] = lines
        return "drawn"

    monkeypatch.setattr(figures, "line_chart", noted)
    return found


def test_speed_is_tokens_over_seconds_and_not_a_mean_of_speeds(
    tmp_path: Path, series: dict[str, list[Series]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_POINTS", 1)
    run = make_run(tmp_path / "run")
    lines(run / "metrics.jsonl", [step(1, tokens=100), step(2, tokens=100), step(3, tokens=90)])
    lines(run / "resources.jsonl", [{"step": number, "seconds": float(number**2)} for number in (1, 2, 3)])
    curves(read_run(run))
    assert series["Tokens a second"][0].y == pytest.approx([290 / 14])


def test_a_curve_is_weighted_means_of_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_POINTS", 3)
    x, y = bin_means(range(1, 8), [1.0, 2, 3, 4, 5, 6, 7], [1, 1, 1, 1, 2, 1, 1])
    assert x == [1.5, 3.5, 6.0]
    assert y == [1.5, 3.5, (2 * 5 + 6 + 7) / 4]


def test_whole_numbers_lie_inside_their_bins_and_all_are_counted() -> None:
    import numpy as np

    for values in ([3.0], [1.0, 2, 2, 9], [0.0, 100], [0.5, 0.7], [2.5]):
        counts, _ = np.histogram(values, bins_of(np.array(values)))
        assert counts.sum() == len(values)


@pytest.mark.parametrize(("most", "width"), [(9, 1), (29, 1), (40, 2), (101, 5)])
def test_whole_numbers_have_about_twenty_bins(most: int, width: int) -> None:
    import numpy as np

    edges = bins_of(np.arange(1.0, most + 1))
    assert set(np.diff(edges)) == {width}
    assert edges[0] == 0.5


def test_numbers_of_an_axis_are_short() -> None:
    assert [short(number) for number in (0.002, 15, 1000, 2500, 40_000, 1e6, 1.5e6)] == [
        "0.002",
        "15",
        "1k",
        "2.5k",
        "40k",
        "1M",
        "1.5M",
    ]


@pytest.mark.parametrize(
    ("missing", "damaged"),
    [("resources.jsonl", False), ("samples.jsonl", True), ("validation.json", True), ("test.scores.json", False)],
)
def test_a_record_that_is_missing_or_unreadable_is_named_and_the_rest_is_drawn(
    missing: str, damaged: bool, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    (run / missing).unlink()
    if damaged:
        (run / missing).write_text('{"step": 40, "sources": [1, {"a')
    page = Page(report(read_run(run)))
    said = {
        "resources.jsonl": "No step's time is recorded",
        "samples.jsonl": "No translations of a validation are recorded",
        "validation.json": "Scores of sentences: No translations of a validation are recorded",
        "test.scores.json": "There are no results of the command evaluate yet",
    }
    assert said[missing] in page.text
    assert set(CHARTS[:7]) <= set(drawn(page))


def test_a_run_before_its_first_validation_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps(step(1)) + '\n{"step": 2, "lo')  # a line that is being written
    page = Page(report(read_run(run)))
    assert drawn(page) == ["Loss", "Learning rate", "Gradient norm"]
    assert "Perplexity: There has been no validation yet." in page.text


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path, series: dict[str, list[Series]]) -> None:
    run = make_run(tmp_path / "run")
    odd = [step(1, loss=float("nan")), step(2, gradient_norm=float("inf")), step(3, loss=None, tokens=None)]
    lines(
        run / "metrics.jsonl", [*odd, step(4), validation(4, valid_bleu=None), validation(5, valid_loss=float("nan"))]
    )
    curves(read_run(run))
    training, validations = series["Loss"]
    assert (training.x, training.y) == ([2, 4], pytest.approx([5.0, 3.5]))
    assert validations.x == [4]
    assert (series["Gradient norm"][0].x, series["Perplexity"][0].x) == ([4], [4])
    assert "BLEU" not in series


def test_a_step_that_took_no_time_on_a_coarse_clock_has_no_speed(series: dict[str, list[Series]]) -> None:
    machine = [{"step": number, "seconds": seconds} for number, seconds in ((1, 0.0), (2, 0.25))]
    curves(RunRecords("fast", [step(1), step(2)], [], machine, [], None, {}))
    assert (series["Tokens a second"][0].x, series["Tokens a second"][0].y) == ([2], [4 * 102])


def test_each_corpus_with_validation_data_has_its_curve(tmp_path: Path, series: dict[str, list[Series]]) -> None:
    run = make_run(tmp_path / "run")
    names = [f"en-{number}" for number in range(8)]
    ours = {f"valid_{name}.{part}": 2.0 + n for n, part in enumerate(names) for name in ("loss", "bleu", "perplexity")}
    lines(run / "metrics.jsonl", [step(1), validation(1, **ours), validation(2, **ours)])
    charts = {chart.title: chart for chart in curves(read_run(run))}
    shown = names[: figures.MOST_PARTS]
    assert [each.label for each in series["Loss"]] == ["training", "validation", *shown]
    assert [each.label for each in series["BLEU"]] == ["the mean", *shown]
    assert [each.label for each in series["Perplexity"]] == ["all together", *shown]
    assert series["BLEU"][2].y == [3.0, 3.0]
    assert len({each.color for each in series["Loss"]}) == 2 + len(shown)
    assert "the others are the first 6 of 8 corpora" in charts["BLEU"].caption
    six = {name: value for name, value in ours.items() if name.rpartition(".")[2] in shown}
    lines(run / "metrics.jsonl", [step(1), validation(1, **six)])
    charts = {chart.title: chart for chart in curves(read_run(run))}
    assert "the others are each of 6 corpora" in charts["BLEU"].caption


@pytest.mark.parametrize(("points", "steps", "marked"), [(False, 3, 0), (True, 60, 60), (True, 61, 0)])
def test_values_are_marked_where_that_is_wanted_and_they_are_few(points: bool, steps: int, marked: int) -> None:
    values = [1.0] * steps
    plain, chart = (line_chart("Loss", [Series("a", values, values, 0, points=each)]) for each in (False, points))
    assert chart.count("<use ") - plain.count("<use ") == marked


def test_a_chart_has_points_a_scale_of_magnitudes_or_a_legend_only_where_that_is_wanted() -> None:
    series = [Series("a", [1, 2], [1, 1000], 0)]
    plain = line_chart("Loss", [Series("a", [1, 2], [1, 1000], 0, points=False)], log=False, legend=False)
    assert line_chart("Loss", series) == plain
    assert line_chart("Loss", series, log=True) != plain
    assert line_chart("Loss", series, legend=True) != plain


def test_a_legend_has_every_name_whatever_it_begins_with() -> None:
    names = ["_news", "__", "$x$", "<b>", "_news"]
    chart = line_chart("Loss", [Series(name, [1, 2], [1, 2], place) for place, name in enumerate(names)], legend=True)
    outlines = histogram("Lengths", "words", [(name, [1, 2], place) for place, name in enumerate(names)], True)
    for svg in (chart, outlines):
        text = Page(svg).text
        assert [text.count(name) for name in ("_news", "__", "$x$", "<b>")] == [2, 1, 1, 1]


@pytest.mark.parametrize("validations", [0, 1, 200, 201, 399])
def test_curves_of_validations_have_as_many_points_as_is_said_and_the_newest(
    validations: int, series: dict[str, list[Series]]
) -> None:
    records = [validation(number) for number in range(1, validations + 1)]
    machine = [{"step": record["step"], "memory": {"cpu": 3 * 2**30}} for record in records]
    curves(RunRecords("run", [], records, machine, [], None, {}))
    for title in ("Perplexity", "Peak memory (GiB)", "Loss")[: 3 * bool(records)]:
        (each,) = series[title]
        assert min(validations, 100) <= len(each.x) <= 200
        assert each.x[-1] == validations
    assert {value for each in series.get("Peak memory (GiB)", []) for value in each.y} <= {3.0}


def test_a_page_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        write_report(run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_the_largest_page_stays_below_a_megabyte(tmp_path: Path) -> None:
    long = "wort " * 150
    run = make_run(tmp_path / f"run {'x' * 60}", 300)
    newest = {"step": 600, "sources": [long] * 12, "references": [long] * 12, "translations": [long] * 12}
    (run / "validation.json").write_text(json.dumps(newest))
    record = samples(600)
    for sample in record["samples"]:
        sample["translation"] = "wort " * 20_000
    lines(run / "samples.jsonl", [record] * 10)
    assert write_report(run, tmp_path / "one.html") < 1_000_000


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(tmp_path / "one")
    for words, path in (
        ([str(one)], one / "report.html"),
        (["--run", str(one)], one / "report.html"),
        ([str(one), "--output", str(tmp_path / "x.html")], tmp_path / "x.html"),
    ):
        assert main(["report", *words]) == 0
        assert capsys.readouterr().out.startswith(f"[report] {path}: ")
        assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_folder_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"error: {tmp_path} has no records of training (metrics.jsonl): name the folder of a run"
    assert refusal(capsys, "report", str(tmp_path)) == said


def test_a_run_without_settings_is_still_a_page() -> None:
    run = RunRecords("empty", [step(1)], [], [], [], None, {})
    assert "No settings are recorded." in Page(report(run)).text
    assert "Command, machine and versions are not recorded (resources.jsonl)." in Page(report(run)).text


def test_the_best_number_of_each_metric_has_its_own_step() -> None:
    losses = [4.25, 3.125, 3.5]
    scores = [11.5, 17.25, 23.75]
    found = [
        {"step": 200 * number, "valid_loss": loss, "valid_bleu": bleu}
        for number, (loss, bleu) in enumerate(zip(losses, scores, strict=True), start=7)
    ]
    run = RunRecords(
        "three", [step(1)], found, [{"step": 1, "seconds": 3_700.0}, {"step": 2, "seconds": 25.4}], [], None, {}
    )
    text = Page(report(run)).text
    assert re.search(r"steps\s*1,800", text)
    assert re.search(r"best loss\s*3\.125\s*validation, step 1,600", text)
    assert re.search(r"best BLEU\s*23\.75\s*validation, step 1,800", text)
    assert re.search(r"time in steps\s*1:02:05", text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (17279.1, "17,279"),
        (10000, "10,000"),
        (-12345.6, "-12,346"),
        (9999.6, "10,000"),
        (9999.4, "9999"),
        (5.45, "5.45"),
        (0.0063, "0.0063"),
    ],
)
def test_a_large_number_on_the_page_has_no_exponent(number: float, text: str) -> None:
    assert format_number(number) == text


def test_a_page_names_each_start_of_its_run_and_the_newest_ones_machine_and_versions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    began = {"time": "2026-02-02 10:00:00 UTC", "command": "python -m recipes.translation train --run run"}
    with (run / "resources.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 40, "began": {**began, "hardware": {"cores": 8}, "software": {"torch": "2.13"}}})
        )
    text = Page(report(read_run(run))).text
    for words in (
        ["after step", "0", "time", "2026-01-01 00:00:00 UTC", "command", "python -m recipes.translation train"],
        ["after step", "40", "time", began["time"], "command", began["command"]],
        ["cores", "8"],
        ["torch", "2.13"],
    ):
        assert re.search(r"\s*".join(map(re.escape, words)), text)
