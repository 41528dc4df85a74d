"""Every Python block of the documents runs, in order, page by page; links and pictures exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FRAGMENTS = {"scaling.md"}
"""Pages whose blocks are pieces of a loop that needs ranks; tests/distributed runs such loops whole."""
TUTORIALS = {"tutorial.md", "tutorial-huggingface.md", "tutorial-research.md"}
"""Pages that tests/tutorials runs as printed, commands too, in minutes: make test-tutorial."""
REPRODUCTIONS = "## Every failure, in five lines"
"""What follows needs other people's packages, and was run by the command that made the page, with what it printed."""


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_when_pasted(page, capsys):
    ours, _, others = page.read_text().partition(REPRODUCTIONS)
    elsewhere = page.name in FRAGMENTS | TUTORIALS
    for code in blocks(others) + (blocks(ours) if elsewhere else []):
        compile(code, f"a block of {page.name}", "exec")
    names = {"__name__": "pasted"}
    for code in [] if elsewhere else blocks(ours):
        exec(compile(code, f"a block of {page.name}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_exists(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
