"""Build the site: `make docs` writes it to build/docs, offline; nothing on its pages is loaded from elsewhere."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import seqpar  # noqa: E402


def install_line(project) -> str:
    """Return where to get the library: from the repository's address, once pyproject.toml names it."""
    address = project.get("urls", {}).get("Repository")
    return f"`pip install git+{address}`" if address else "`pip install .` in a checkout"


project = "seqpar"
author = "The seqpar developers"
version = release = seqpar.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["llms.txt"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = {"install": install_line(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])}
html_theme = "furo"
html_title = "seqpar"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_extra_path = ["llms.txt"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_typehints = "signature"
autodoc_member_order = "groupwise"
# Signatures show defaults as they are written, not the objects that they become
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
default_role = "code"
# Without a network there is nothing to look them up in: other projects' types, and type variables
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|collections|typing|hypothesis|pytest|transformers|trl|accelerate|lightning)\..*"),
    (r"py:class", r"Tensor|seqpar\..*\.(MicroBatch|Module|Reading|Result|Sentence|Stepper|ThisProcess)"),
]


def indented_is_literal(app, what, name, obj, options, lines: list[str]) -> None:
    """Mark an indented block between blank lines, an equation or code, as what reStructuredText calls a literal block.

    It stands before napoleon, whose sections ("Args:") are indented without a blank line before.
    """
    for index in reversed(range(1, len(lines))):
        before = next((line for line in reversed(lines[:index]) if line.strip()), "")
        starts = lines[index].startswith("    ") and not lines[index - 1].strip()
        if starts and not before.startswith(" ") and not before.endswith("::"):
            lines[index:index] = ["::", ""]


def setup(app) -> None:
    app.connect("autodoc-process-docstring", indented_is_literal, priority=100)
