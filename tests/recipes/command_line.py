"""Commands, run in this process: their exit status, and the one line of a mistake."""

from __future__ import annotations

import pytest

from recipes.translation.commands import main

SENTENCE = "The train to Vienna leaves at half past seven."


def run_main(*argv: str) -> int:
    """The exit status, whether main returns it or argparse exits with it."""
    try:
        return main(list(argv))
    except SystemExit as ended:
        return int(str(ended.code))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr that a mistake is answered with."""
    assert run_main(*argv) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    return error.strip()
