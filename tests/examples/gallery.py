"""Make docs/gallery.md: `python -m tests.examples.gallery` runs every example and writes its last lines (some minutes).

An example whose package is not installed keeps the output that the page has of it.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from tests.programs import output_of

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "gallery.md"
HEAD = """# Gallery

Every example runs on a CPU within a minute, from a checkout; each is shown with the last lines that it printed there.
"""
LINES = 6
"""The most lines of an example's output that the page shows."""
NOT_INSTALLED = {"ray_train": "ray", "torchtitan_loss": "torchtitan"}
"""Examples that run where a package that no extra installs can be imported, and that package."""


def runs_here(example: Path) -> bool:
    """Return whether the package that an example needs can be imported."""
    package = NOT_INSTALLED.get(example.stem)
    return package is None or find_spec(package) is not None


def command_of(example: Path) -> str:
    """Return the command that an example's docstring says to run it with."""
    (command,) = re.findall(r"Run it with `((?:python|torchrun) [^`]*)`", example.read_text())
    return command


def last_lines(output: str) -> str:
    """Return what the page shows of an example's output."""
    return "\n".join(output.splitlines()[-LINES:])


def output_on_page(example: Path) -> str | None:
    """Return the last lines of an example's output that the page has, if it has any."""
    page = PAGE.read_text() if PAGE.exists() else ""
    block = re.search(rf"{re.escape(command_of(example))}\n```\n\n```text\n(.*?)\n```", page, re.DOTALL)
    return block and block[1]


def without_numbers(text: str) -> str:
    """Return the text with a sign in the place of every number, whose last digits another processor may round."""
    return re.sub(r"-?\d[\d.,]*(e-?\d+)?", "#", text)


def entry(example: Path, output: str) -> str:
    """Return the section of an example: its docstring, its command, what it prints, and its code."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    title, _, said = docstring.partition("\n")
    said = re.sub(r"Run it with `[^`]*`\.\s*", "", said).strip()
    name, _, what = title.partition(": ")
    said = f"{what[:1].upper()}{what[1:]}\n\n{said}".strip()
    return f"""
## {name.removesuffix(".")}
{f"{chr(10)}{said}{chr(10)}" if said else ""}
```bash
{command_of(example)}
```

```text
{last_lines(output)}
```

<details><summary>examples/{example.name}</summary>

```{{literalinclude}} ../examples/{example.name}
:language: python
```

</details>
"""


def shown(example: Path) -> str:
    """Return what an example prints or, if its package is missing, what the page has of it."""
    if runs_here(example):
        return output_of(command_of(example))
    return output_on_page(example) or f"not run: it needs the package {NOT_INSTALLED[example.stem]}"


if __name__ == "__main__":
    sections = [entry(each, shown(each)) for each in sorted((ROOT / "examples").glob("*.py"))]
    PAGE.write_text(HEAD + "".join(sections))
