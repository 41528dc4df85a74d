"""Every block of the documents runs, in order, page by page, or is marked as output; links and pictures exist."""

import ast
import inspect
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import seqpar
from docs.pictures import draw
from docs.run_notebooks import NOTEBOOKS, code_cells, run, stored
from recipes.translation.settings.config import load_config
from tests.examples.gallery import without_numbers
from tests.fenced import fenced
from tests.printed_commands import calls, make_base, try_out

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TUTORIALS = {"tutorial.md", "tutorial-huggingface.md", "tutorial-research.md"}
"""Pages that tests/tutorials runs as printed, commands too, in full: make test-tutorial."""
AFTER_COMMANDS = {"export.md"}
"""Pages whose Python uses what their commands have written."""
OTHERS_SETTINGS = {"from-joeynmt.md"}
"""Pages that turn another program's settings into the recipe's."""
RUN = {"python", "bash", "console", "yaml", "diff"}
"""The languages of which the tests below run every block that is not marked."""
DIRECTIVES = {"{eval-rst}", "{glossary}", "{literalinclude}", "{toctree}"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_runs_is_marked_as_output_or_says_why_it_cannot_run(page):
    for block in fenced(page):
        known = block.marked or block.language in {*RUN, *DIRECTIVES, "text"}
        assert known, (
            f"line {block.line} of {page.name}: a block of {block.language!r}, which no test runs; name one of "
            f"{sorted(RUN)}, text for output, or write <!-- not run: the reason --> above it"
        )


def run_python(page, *, only_compile):
    names = {"__name__": "pasted"}
    for block in fenced(page):
        if block.language == "python":
            code = compile(block.code, f"line {block.line} of {page.name}", "exec")
            if not (block.marked or only_compile):
                exec(code, names)


def pages_with(*languages):
    return [page for page in PAGES if any(block.language in languages for block in fenced(page))]


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_the_code_of_a_page_runs_when_pasted(page, capsys):
    run_python(page, only_compile=page.name in TUTORIALS | AFTER_COMMANDS)


def settings(page):
    for block in fenced(page):
        if block.language == "yaml" and not block.marked:
            yield block.code
        if block.language == "diff" and page.name in OTHERS_SETTINGS:
            yield re.sub(r"^(-.*\n|.)", "", block.code, flags=re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if any(settings(page))], ids=lambda page: page.name)
def test_the_settings_of_a_page_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.setenv("CORPORA", str(tmp_path))
    for text in settings(page):
        (tmp_path / "page.yaml").write_text(text)
        load_config(tmp_path / "page.yaml")


CHANGED = [page for page in pages_with("diff") if page.name not in OTHERS_SETTINGS]


@pytest.mark.parametrize("page", CHANGED, ids=lambda page: page.name)
def test_the_lines_that_a_page_adds_to_a_program_name_what_seqpar_has(page):
    for block in fenced(page):
        if block.language == "diff" and not block.marked:
            names = {"seqpar": seqpar}
            calls = []
            for line in filter(None, (line[1:].strip() for line in block.code.splitlines() if line[:1] == "+")):
                statement = ast.parse(f"{line} pass" if line.endswith(":") else line)
                if isinstance(statement.body[0], ast.ImportFrom):
                    exec(line, names)
                calls += [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
            ours = [call for call in calls if ast.unparse(call.func).partition(".")[0] in names]
            assert ours, f"line {block.line}: nothing of seqpar is called"
            for call in ours:
                function = eval(ast.unparse(call.func), names)
                inspect.signature(function).bind(*call.args, **{each.arg: each.value for each in call.keywords})


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
    file = ROOT / "docs" / "faq.md"
    headings = re.findall("`([^`]+)`", "\n".join(re.findall("^### (.*)", file.read_text(), flags=re.MULTILINE)))
    # An example on the page, which its test runs, may show a message that several strings make
    said = "\n".join([*messages(), *(block.code for block in fenced(file))])
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


IN_RESULTS = [page for page in pages_with("bash", "console") if "results" in page.parts]
"""Pages whose trainings make test-tutorial runs."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    run = tmp_path_factory.mktemp("base") / "run"
    make_base(run)
    return run


def try_page(page, base, tmp_path, monkeypatch, *, train):
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


LONG = [ROOT / "docs" / name for name in ("export.md", "training.md")]
"""Pages whose commands take long: test-tutorial runs those, and with its trainings the page in the test below."""
WITH_TRAININGS = ROOT / "docs/results/translation.md"


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses:UserWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.tutorial if page in LONG else (), id=page.relative_to(ROOT).as_posix())
        for page in pages_with("bash", "console")
        if page != WITH_TRAININGS
    ],
)
def test_the_commands_of_a_page_are_accepted_and_run(page, base, tmp_path, monkeypatch, capsys):
    try_page(page, base, tmp_path, monkeypatch, train=page not in IN_RESULTS)
    if page.name in AFTER_COMMANDS:
        run_python(page, only_compile=False)
        torch.set_num_threads(1)  # CTranslate2 has given torch more, as any program that loads it finds


@pytest.mark.tutorial
@pytest.mark.parametrize("page", IN_RESULTS, ids=lambda page: page.name)
def test_the_trainings_of_a_page_of_results_run(page, base, tmp_path, monkeypatch, capsys):
    try_page(page, base, tmp_path, monkeypatch, train=True)
