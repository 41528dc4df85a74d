"""Text on a terminal, which would obey control characters in file names or in a model's translations."""

from __future__ import annotations

import re
import sys

CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters except the tab and the line break."""


def escape(text: str) -> str:
    r"""Return a text with its control characters written as in Python: \x1b."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_text(text: str, *, flush: bool = False) -> None:
    """Print a text: escaped on a terminal, and unchanged to a file or a pipe."""
    if sys.stdout.isatty():
        text = escape(text)
    print(text, flush=flush)
