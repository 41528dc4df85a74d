"""The report in a browser: nothing is asked of the network, every chart is seen, and a phone shows it whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.report.draw import write_report
from tests.recipes.report.made import make_run

pytestmark = pytest.mark.browser
BOXES = "[...document.querySelectorAll('svg[role=img]')].map(e => [e.getBoundingClientRect().width, \
e.getBoundingClientRect().height])"
COLORS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('svg text')).fill]"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one = make_run(folder / "one", settings={"data.train": "a-long-name/" * 30, "model.d_model": 64})
    two = make_run(folder / "two" / ("x" * 80), settings={"data.train": "b", "model.d_model": 128})
    found = {name: folder / f"{name}.html" for name in ("report", "long_name")}
    write_report(one, found["report"])
    write_report(two, found["long_name"])
    return found


def luminance(color: str) -> float:
    """The relative luminance of rgb(r, g, b): WCAG 2.2, definitions."""
    channels = [int(each) / 255 for each in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["report", "long_name"])
def test_a_page_is_whole_on_every_screen(
    name: str, width: int, scheme: str, browser: Any, pages: dict[str, Path]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    page.eval_on_selector_all("details", "all => all.forEach(each => each.open = true)")
    assert said == []
    assert asked == [pages[name].as_uri()]
    boxes = page.evaluate(BOXES)
    assert len(boxes) == 11
    assert all(box[0] >= 60 and box[1] >= 60 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("[...document.querySelectorAll('figure')].every(e => e.scrollWidth <= e.clientWidth)")
    background, text = page.evaluate(COLORS)
    brighter, darker = sorted((luminance(background), luminance(text)), reverse=True)
    assert (brighter + 0.05) / (darker + 0.05) >= 7  # WCAG 2.2, criterion 1.4.6
    assert (luminance(background) < 0.2) == (scheme == "dark")
    page.close()


def test_paper_is_white_whatever_the_screen(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(pages["report"].as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    background, text = page.evaluate(COLORS)
    assert luminance(background) > 0.9
    assert luminance(text) < 0.1
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


PRINTABLE = 688
"""CSS pixels between the margins of A4: 210 mm - 2 x 14 mm."""
HEADING = re.compile(rb"/Dest \[\d+ 0 R /XYZ ([\d.]+) ([\d.]+) ")
"""In a PDF's outline, a heading's distance from the left and the lower edge of its page, in points."""


@pytest.mark.parametrize(("name", "most"), [("report", 6), ("long_name", 6)])
def test_on_paper_no_heading_is_alone_at_the_end_of_a_page_wherever_pages_end(
    name: str, most: int, browser: Any, pages: dict[str, Path]
) -> None:
    page = browser.new_page()
    page.goto(pages[name].as_uri())
    for moved in range(0, 900, 150):  # everything further down, so that pages end elsewhere
        page.evaluate(f"document.querySelector('header').style.paddingTop = '{moved}px'")
        pdf = page.pdf(format="A4", outline=True, tagged=True)
        assert 3 <= len(re.findall(rb"/Type /Page\b", pdf)) <= most
        places = [(float(x), float(y)) for x, y in HEADING.findall(pdf)]
        assert len(places) > 10
        assert min(x for x, _ in places) > 39  # 14 mm
        assert min(y for _, y in places) > 75, moved  # two lines below it, and the margin
    page.close()


@pytest.mark.parametrize("name", ["report", "long_name"])
def test_on_paper_nothing_is_cut_or_folded(name: str, browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": PRINTABLE, "height": 1000})
    page.goto(pages[name].as_uri())
    folded = "[...document.querySelectorAll('details table')].map(e => e.checkVisibility())"
    assert not any(page.evaluate(folded))
    page.emulate_media(media="print")
    assert all(page.evaluate(folded))
    assert page.evaluate("document.documentElement.scrollWidth") == PRINTABLE
    assert max(box[0] for box in page.evaluate(BOXES)) <= PRINTABLE
    kept = "[...document.querySelectorAll('figure, .card, tr, .tiles div')].map(e => getComputedStyle(e).breakInside)"
    assert set(page.evaluate(kept)) == {"avoid"}
    followed = "[...document.querySelectorAll('h2, h3, h2 + p, h3 + p')].map(e => getComputedStyle(e).breakAfter)"
    assert set(page.evaluate(followed)) == {"avoid"}
    page.close()


def test_text_of_the_data_is_never_run(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    opened: list[str] = []
    page.on("dialog", lambda dialog: opened.append(dialog.message))
    page.goto(pages["report"].as_uri())
    assert page.get_by_text("<script>alert(1)</script>", exact=True).count() >= 1
    assert opened == []
    directions = page.evaluate(
        "[...document.querySelectorAll('[dir=auto]')].filter(e => e.textContent === 'כלב רץ')"
        ".map(e => getComputedStyle(e).unicodeBidi + ' ' + e.matches(':dir(rtl)'))"
    )
    assert directions
    assert set(directions) == {"isolate true"}
    page.close()
