"""The site: it is made without a warning, names all that is public, and is whole on a phone and on a screen."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md"))
PUBLIC = ["seqpar", "seqpar.objectives", "seqpar.testing"]
pytestmark = pytest.mark.browser


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` makes it."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    words = [
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "--nitpicky",
        "--fresh-env",
        str(ROOT / "docs"),
        str(folder),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_every_public_name(package: str, site: Path) -> None:
    page = (site / "api" / f"{package.rpartition('.')[2]}.html").read_text()
    for name in import_module(package).__all__:
        assert f'id="{package}.{name}"' in page, name


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES, ids=str)
def test_a_page_is_whole_and_asks_nothing_of_the_network(name: Path, width: int, browser: Any, site: Path) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / name).with_suffix(".html").as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith((site.as_uri(), "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("[...document.images].every(e => e.naturalWidth > 0)")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_site_is_as_bright_as_the_reader_wants_it(scheme: str, browser: Any, site: Path) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.goto((site / "index.html").as_uri())
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(each) for each in color[4:-1].split(",")) < 300) == (scheme == "dark")
    page.close()


def test_the_search_finds_a_name_and_a_word(browser: Any, site: Path) -> None:
    for words, found in (("linear_distillation", "seqpar.linear_distillation"), ("convention", "Glossary")):
        page = browser.new_page()
        page.goto(f"{(site / 'search.html').as_uri()}?q={words}")
        page.get_by_role("link", name=found).first.wait_for(timeout=30_000)
        page.close()
