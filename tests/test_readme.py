"""The README's code runs when pasted, and the file map of CONTRIBUTING is true."""

import re
from pathlib import Path

from tests.fenced import fenced

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_the_eight_lines_are_eight_and_run(capsys):
    code, *_ = (block.code for block in fenced(README) if block.language == "python")
    assert len([line for line in code.splitlines() if line.strip()]) == 8
    exec(compile(code, str(README), "exec"), {})
    assert re.match(r"\d+\.\d\d nats a token, \d+ of \d+ right\n", capsys.readouterr().out)


def test_every_path_in_the_file_map_exists():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## What is where")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_public_names_are_documented_with_what_they_raise_or_return():
    import seqpar

    for name in seqpar.__all__:
        assert len((getattr(seqpar, name).__doc__ or "").strip()) > 40, name
