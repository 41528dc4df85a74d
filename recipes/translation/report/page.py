"""The pieces of HTML around charts, which are the macros of `page.html`: whatever comes from data is escaped there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
page: Any = _environment.get_template("page.html").module
"""Each piece is a function, such as `page.note(text)`, of text and of other pieces, and returns a `Markup`."""
