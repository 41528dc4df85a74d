"""Write the library as a folder that Hugging Face's `kernels` loads from their Hub or from disk.

`kernels` gives each version of a kernel a module name of its own, so that several fit into one process. Inside, every
import is therefore relative. One folder serves every device: it is Python, and Triton where that is installed.
"""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

LEFT_OUT = {"testing", "integrations"}
"""The wings that need more than torch, which a kernel may not."""


def write_kernel(project: dict[str, Any], source: Path, folder: Path) -> None:
    """Write the package in `source` to `folder`, which is then a kernel's repository."""
    variant = folder / "build/torch-universal"
    for file in sorted(source.rglob("*.py")):
        path = file.relative_to(source)
        if path.parts[0] not in LEFT_OUT:
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_text(with_relative_imports(file, source))
    (variant / "metadata.json").write_text(json.dumps(metadata(project), indent=2) + "\n")
    shutil.copy(source.parent / "LICENSE", folder)
    card = f"---\nlicense: {project['license'].lower()}\ntags:\n- kernels\n---\n\n{project['description']}\n"
    (folder / "README.md").write_text(card)


def metadata(project: dict[str, Any]) -> dict[str, Any]:
    """Return what `kernels` asks of a kernel: its own name, and the version of what it promises.

    There is no backend for all devices; `cpu`, which names no architectures, is refused on none.
    """
    return {
        "id": f"{project['name']}_{project['version'].replace('.', '_')}",
        "name": project["name"],
        "version": int(project["version"].split(".")[0]),
        "license": project["license"],
        "python-depends": [],
        "backend": {"type": "cpu"},
    }


def with_relative_imports(file: Path, source: Path) -> str:
    """Return a module's text, in which each import from its own package is relative."""
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    name = source.name
    to_the_top = "." * len(file.relative_to(source).parts)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == name for alias in node.names):
            raise ValueError(f"{file}:{node.lineno}: `import {name}` cannot be relative: write `from {name}... import`")
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == name:
            absolute = f"from {node.module} import"
            relative = f"from {to_the_top}{str(node.module).removeprefix(name).removeprefix('.')} import"
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(absolute, relative, 1)
    return "".join(lines)
