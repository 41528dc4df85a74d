"""Make docs/gallery.md: `python -m tests.examples.gallery` runs every example and writes its last lines (some minutes).

An example whose package is not installed keeps the output that the page has of it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "gallery.md"
HEAD = """# Gallery

Every example runs on a CPU within a minute, from a checkout; each is shown with the last lines that it printed there.
"""
LINES = 6
"""The most lines of an example's output that the page shows."""


def command_of(example: Path) -> str:
    """Return the command that an example's docstring says to run it with."""
    (command,) = re.findall(r"Run it with `((?:python|torchrun) [^`]*)`", example.read_text())
    return command


def output_of(example: Path) -> str:
    """Run an example and return what it prints; if a package is missing, what the page says so far, or its name."""
    program, *arguments = command_of(example).split()
    launch = [] if program == "python" else ["-m", "torch.distributed.run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, *launch, *arguments]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if missing := re.search(r"No module named '(\w+)", done.stderr):
        return output_on_page(example) or f"not run: it needs the package {missing[1]}"
    if done.returncode:
        raise SystemExit(f"{example.name} failed:\n{done.stderr}")
    return done.stdout.strip()


def last_lines(output: str) -> str:
    """Return what the page shows of an example's output."""
    return "\n".join(output.splitlines()[-LINES:])


def output_on_page(example: Path) -> str | None:
    """Return the last lines of an example's output that the page has, if it has any."""
    page = PAGE.read_text() if PAGE.exists() else ""
    block = re.search(rf"{re.escape(command_of(example))}\n```\n\n```text\n(.*?)\n```", page, re.DOTALL)
    return block and block[1]


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


if __name__ == "__main__":
    sections = [entry(each, output_of(each)) for each in sorted((ROOT / "examples").glob("*.py"))]
    PAGE.write_text(HEAD + "".join(sections))
