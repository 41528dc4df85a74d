"""Run the notebooks in docs/notebooks and store what their cells print; Jupyter is not needed.

python -m docs.run_notebooks
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that are code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> list[str]:
    """Run all cells in one namespace; return what each of them prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in code_cells(notebook):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec("".join(cell["source"]), names)
        printed.append(output.getvalue())
    return printed


def stored(cell: dict[str, Any]) -> str:
    """Return what a cell of code printed when it was last run."""
    return "".join(text for output in cell["outputs"] for text in output["text"])


def store(file: Path) -> None:
    """Run a notebook and write its outputs into it."""
    notebook = json.loads(file.read_text())
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook), strict=True), 1):
        cell["execution_count"] = number
        stream = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for notebook_file in NOTEBOOKS:
        store(notebook_file)
