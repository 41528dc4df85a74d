"""Ctrl-C while a command starts: the process ends at once, without a traceback, whatever is just being imported.

Torch imports numpy in compiled code, which goes on after any exception.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.tiny import options

pytestmark = pytest.mark.faults

INTERRUPTING = """
import os, signal, sys

def interrupt(event, arguments):
    if event in ("import", "os.rename") and str(arguments[0]) == os.environ.get("INTERRUPTED"):
        del os.environ["INTERRUPTED"]
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(interrupt)
"""


def interrupted(folder: Path, at: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python, and send Ctrl-C to the process when it imports a module or renames a folder of this name."""
    (folder / "sitecustomize.py").write_text(INTERRUPTING)
    path = os.pathsep.join([str(folder), str(Path.cwd())])
    environment = {**os.environ, "PYTHONPATH": path, "INTERRUPTED": at}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    "imported", ["recipes.translation.commands", "argparse", "torch", "numpy", "numpy._core._multiarray_umath"]
)
def test_an_interrupt_during_an_import_ends_the_process_at_once(imported: str, tmp_path: Path) -> None:
    found = interrupted(tmp_path, imported, "-m", "recipes.translation", "train", *options(tmp_path / "run"))
    assert (found.returncode, found.stderr) == (130, "")


def test_an_interrupt_in_a_command_leaves_nothing_half_made(tmp_path: Path) -> None:
    words = options(tmp_path / "run")
    at = str(tmp_path / "run" / ".subwords.new")
    found = interrupted(tmp_path, at, "-m", "recipes.translation", "prepare", *words)
    assert (found.returncode, found.stderr) == (130, "")
    # The store of the text is whole
    left = [path.name for path in (tmp_path / "run").rglob("*")]
    assert not [name for name in left if name.endswith(".new") or name.startswith((".unfinished", "subwords"))]


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As a shell without job control starts what it puts in the background."""
    words = [sys.executable, "-m", "recipes.translation", "compare", "--help"]
    script = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv({words[0]!r}, {words!r})"
    found = interrupted(tmp_path, "recipes.translation.commands", "-c", script)
    assert found.returncode == 0, found.stderr
