"""Read the fenced blocks of a Markdown page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})([^\n]*)\n(.*?)^\1\2$", flags=re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n$")
"""The mark above a block that no test can run; it gives the reason."""


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    """The first word after the fence: a language, or a directive of MyST in braces."""
    code: str
    line: int
    marked: bool
    """Whether the page says why no test runs it."""


def fenced(page: Path) -> Iterator[Block]:
    """Yield each fenced block of a page, from the first to the last."""
    text = page.read_text()
    for block in FENCE.finditer(text):
        before = text[: block.start()]
        language, *_ = block[3].split() or [""]
        yield Block(language, block[4], before.count("\n") + 1, bool(NOT_RUN.search(before)))
