"""The page of `serve` in a real browser, by keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import EOS
from recipes.translation.translating.translate import translate
from tests.recipes.random_translator import random_translator
from tests.recipes.serve.running import Running, running

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser


def readable_translator(folder: Path, seed: int) -> Translator:
    """A random one that spells nothing in bytes, and says more than nothing."""
    made = random_translator(folder, seed)
    with torch.no_grad():
        bytes_ = [number for number, piece in enumerate(made.target.pieces()) if piece.startswith("<0x")]
        made.model.generator.bias[bytes_] = -1e4
        made.model.generator.bias[EOS] = 0
    return replace(made, config=replace(made.config, decoding=replace(made.config.decoding, beam=3)))


@pytest.fixture(scope="module")
def translators(tmp_path_factory: pytest.TempPathFactory) -> list[Translator]:
    folder = tmp_path_factory.mktemp("page")
    return [readable_translator(folder / name, seed) for seed, name in enumerate("ab", start=1)]


@pytest.fixture(scope="module")
def service(translators: list[Translator]) -> Iterator[Running]:
    runs = [Path(translator.config.run) for translator in translators]
    for run, translator in zip(runs, translators, strict=True):
        save_model(run / "best", translator, {"step": 1})
    with running(*runs) as found:
        yield found


@pytest.fixture(params=[360, 1200])
def page(request: pytest.FixtureRequest, browser: sync_api.Browser, service: Running) -> Iterator[sync_api.Page]:
    """A page of this width; afterwards, nothing may be on the console or have gone to another host."""
    context = browser.new_context(viewport={"width": request.param, "height": 700})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith(service.url) or complaints.append(sent.url))
    page.goto(service.url)
    page.get_by_role("textbox").wait_for()
    yield page
    context.close()
    assert complaints == []


def translated(page: sync_api.Page, text: str) -> None:
    """Type into the box, which has the focus, and wait for the translations."""
    page.locator(".model").first.wait_for()
    page.keyboard.type(text)
    sync_api.expect(page.get_by_role("status")).to_have_text(re.compile("^Translated in"), timeout=30_000)


def test_by_keyboard_alone_every_model_shows_translation_alternatives_and_alignment(
    page: sync_api.Page, translators: list[Translator]
) -> None:
    text = "The train to Vienna leaves.\n\nTwo <b>trains</b>."
    translated(page, text)
    for model, translator in zip(page.locator(".model").all(), translators, strict=True):
        lines = model.locator(".output p").all_text_contents()
        assert lines == translate(translator, text.split("\n"))
        assert lines[2]
        rows = model.locator("tbody tr")
        assert rows.count() == 3
        assert rows.first.locator("td").nth(1).text_content() == lines[2]
        for row in rows.all():
            score, log_probability = row.locator(".number").all_text_contents()
            assert float(log_probability) <= float(score) < 0
    # The text box has the focus; the first model's translation, the button that copies it and its words follow
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.locator("button:focus").text_content() == "Copy"
    page.keyboard.press("Tab")
    focus = page.locator("button:focus")
    assert focus.text_content() == "Two"
    page.keyboard.press("End")
    assert focus.text_content() == "<b>trains</b>."
    page.keyboard.press("ArrowLeft")
    assert focus.text_content() == "Two"
    page.keyboard.press("Tab")
    marked = page.locator(".model").first.locator(".words.source .partner").all_text_contents()
    assert marked
    assert focus.get_attribute("aria-description") == f"aligned with {', '.join(marked)}"


def test_runs_and_languages_have_their_names_and_a_translation_is_copied(
    page: sync_api.Page, translators: list[Translator]
) -> None:
    assert page.locator(".model h2").all_text_contents() == ["a/run", "b/run"]
    assert page.locator("#pair-name").text_content() == "English to German"
    assert "English to German, torch, beam 3" in page.locator(".about").all_text_contents()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "The train to Vienna leaves.\n\nTwo trains."
    translated(page, text)
    for model, translator in zip(page.locator(".model").all(), translators, strict=True):
        model.locator(".copy").click()
        sync_api.expect(model.locator(".copy")).to_have_text("Copied")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.split("\n") == translate(translator, text.split("\n"))


def test_runs_that_end_alike_have_as_much_of_their_names_as_tells_them_apart(page: sync_api.Page) -> None:
    names = ["x/a", "/y/a/", "z/b", "z/b", "c", "a"]
    titles = page.evaluate(
        "async (names) => { const view = await import('/view.js'); return names.map((n) => view.titleOf(n, names)); }",
        names,
    )
    assert titles == ["x/a", "y/a", "b", "b", "c", "a"]
    codes = "async () => (await import('/view.js')).pairOf({source: 'eng_Latn', target: 'pt-BR'})"
    assert page.evaluate(codes) == "eng_Latn to Brazilian Portuguese"


def test_the_line_with_the_cursor_is_the_one_explained(page: sync_api.Page) -> None:
    translated(page, "Six trains.\nTwo trains leave.")
    words = page.locator(".model").first.locator(".words.source button")
    assert words.all_text_contents() == ["Two", "trains", "leave."]
    page.keyboard.press("ArrowUp")
    sync_api.expect(words).to_have_text(["Six", "trains."], timeout=30_000)


def test_the_heading_is_the_number_of_the_line_also_where_two_are_equal(page: sync_api.Page) -> None:
    translated(page, "Two trains.\nTwo trains.")
    heading = page.locator(".model .of-line").first
    sync_api.expect(heading).to_have_text("Line 2")
    page.keyboard.press("ArrowUp")
    sync_api.expect(heading).to_have_text("Line 1", timeout=30_000)


def test_lines_are_translated_beside_those_that_cannot_be_which_are_named(
    page: sync_api.Page, translators: list[Translator]
) -> None:
    """The line with the cursor, here the last, is one like the others."""
    page.locator(".model").first.wait_for()
    alert = page.get_by_role("alert").first
    rows = page.locator(".model").first.locator(".output p")
    good = [f"{number} trains." for number in range(3, 25)]
    expected = translate(translators[0], good)
    for first in ("Two.", "a " * 300):
        text = [first, *good[:2], "", "b " * 300, *good[2:], "c " * 300]
        page.get_by_role("textbox").fill("\n".join(text))
        bad = {True: "line 5 has", False: "line 1 has"}[first == "Two."]
        sync_api.expect(page.get_by_role("status")).to_have_text("Not everything was translated.", timeout=30_000)
        sync_api.expect(alert).to_contain_text(bad)
        also = {True: "(also line 26)", False: "(also lines 5, 26)"}[first == "Two."]
        sync_api.expect(alert).to_contain_text(also)
        shown = rows.all_text_contents()
        assert shown[1:3] + shown[5:-1] == expected
        assert shown[4] == shown[-1] == "\N{EN DASH}"
    page.get_by_role("textbox").fill("\n".join(["Two.", *text[1:4], *good]))
    sync_api.expect(page.get_by_role("status")).to_have_text(re.compile("^Translated in"), timeout=30_000)
    assert alert.is_hidden()


def test_lines_are_translated_beside_one_that_the_service_refuses_or_fails_at(
    browser: sync_api.Browser, service: Running, translators: list[Translator]
) -> None:
    page = browser.new_page()
    page.goto(service.url)
    page.locator(".model").first.wait_for()
    good = [f"{number} trains." for number in range(3, 25)]
    expected = translate(translators[0], good)

    def fail(route: sync_api.Route) -> None:
        if "poison" in (route.request.post_data or ""):
            route.fulfill(status=500, json={"error": "the service failed"})
        else:
            route.continue_()

    page.route("**/lines", fail)
    for bad, error in (("d " * 30_000, "the text has 60,000 characters"), ("poison", "the service failed")):
        page.get_by_role("textbox").fill("\n".join([*good[:4], bad, *good[4:]]))
        told = f"line 5 cannot be translated: {error}"
        sync_api.expect(page.get_by_role("alert").first).to_contain_text(told, timeout=30_000)
        sync_api.expect(page.get_by_role("status")).to_have_text("Not everything was translated.", timeout=30_000)
        shown = page.locator(".model").first.locator(".output p").all_text_contents()
        assert shown[:4] + shown[5:] == expected
    page.close()


def test_nothing_is_wider_than_the_page(page: sync_api.Page) -> None:
    translated(page, "The train to Vienna leaves at half past seven. " + "w" * 80)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_an_error_of_the_service_is_shown_and_gone_after_a_correction(
    browser: sync_api.Browser, service: Running
) -> None:
    page = browser.new_page()
    page.goto(service.url)
    page.locator(".model").first.wait_for()
    page.get_by_role("textbox").fill("a " * 300)
    alert = page.get_by_role("alert").first
    sync_api.expect(alert).to_contain_text("split it into sentences, one per line", timeout=30_000)
    page.get_by_role("textbox").fill("a")
    sync_api.expect(alert).to_be_hidden(timeout=30_000)
    page.close()
