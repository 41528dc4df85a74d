"""Every Python block of the documents runs, in order, page by page; links and pictures exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FRAGMENTS = {"docs/scaling.md"}
"""Pages whose blocks are pieces of a loop that needs ranks; tests/distributed runs such loops whole."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_when_pasted(page, capsys):
    if str(page.relative_to(ROOT)) in FRAGMENTS:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            compile(code, str(page), "exec")
        return
    names = {"__name__": "pasted"}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(code, f"a block of {page.name}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_exists(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
