"""Every Python block and every command of the documents runs, in order, page by page; links and pictures exist."""

import ast
import io
import json
import re
import sys
from pathlib import Path

import pytest

from docs.pictures import draw
from docs.run_notebooks import NOTEBOOKS, code_cells, run, stored
from tests.examples.gallery import without_numbers
from tests.printed_commands import calls, make_base, try_out

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FRAGMENTS = {"scaling.md"}
"""Pages whose blocks are pieces of a loop that needs ranks; tests/distributed runs such loops whole."""
TUTORIALS = {"tutorial.md", "tutorial-huggingface.md", "tutorial-research.md"}
"""Pages that tests/tutorials runs as printed, commands too, in full: make test-tutorial."""


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_when_pasted(page, capsys):
    compiled = [compile(code, f"a block of {page.name}", "exec") for code in blocks(page.read_text())]
    names = {"__name__": "pasted"}
    for code in [] if page.name in FRAGMENTS | TUTORIALS else compiled:
        exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_exists(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def messages() -> list[str]:
    """Return every string in the code of the library and the recipe; an f-string has "..." for what it inserts."""
    files = [path for part in ("seqpar", "recipes") for path in (ROOT / part).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    parts = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in nodes]
    return ["".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in each) for each in parts]


def test_an_error_is_found_under_what_the_code_says():
    page = (ROOT / "docs" / "faq.md").read_text()
    headings = re.findall("`([^`]+)`", "\n".join(re.findall("^### (.*)", page, flags=re.MULTILINE)))
    # An example on the page, which its test runs, may show a message that several strings make
    said = "\n".join([*messages(), *blocks(page)])
    assert len(headings) > 20
    for heading in headings:
        assert re.search(".*".join(map(re.escape, heading.split("..."))), said), heading


def test_the_diagrams_of_the_pages_are_what_their_code_draws(tmp_path):
    draw(tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for picture in drawn:
        assert picture.read_text() == (ROOT / "docs" / picture.name).read_text(), picture.name


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_prints_what_it_has_stored_up_to_the_digits_of_numbers(file):
    notebook = json.loads(file.read_text())
    for printed, cell in zip(run(notebook), code_cells(notebook), strict=True):
        assert without_numbers(printed) == without_numbers(stored(cell))


COMMANDS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""All pages, also those of results, whose trainings make test-tutorial runs."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    run = tmp_path_factory.mktemp("base") / "run"
    make_base(run)
    return run


def try_page(page, base, tmp_path, monkeypatch, train):
    noted = calls(page, tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SEQPAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    if "wandb" in sys.modules:  # which would keep the mode that it had in an earlier test of this process
        sys.modules["wandb"].teardown()
    monkeypatch.syspath_prepend(ROOT)
    for call in noted:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        try_out(call, base, train=train)


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_accepted_and_run(page, base, tmp_path, monkeypatch, capsys):
    try_page(page, base, tmp_path, monkeypatch, "results" not in page.parts)


@pytest.mark.tutorial
@pytest.mark.parametrize("page", [page for page in COMMANDS if "results" in page.parts], ids=lambda page: page.name)
def test_the_trainings_of_a_page_of_results_run(page, base, tmp_path, monkeypatch, capsys):
    try_page(page, base, tmp_path, monkeypatch, True)
