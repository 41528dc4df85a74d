"""docs/recipe.md from first to last: every command of the page is run, on two small files, in its order."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models import PRESETS
from recipes.translation.commands import COMMANDS, main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.settings.config import load_config
from tests.fenced import fenced
from tests.recipes.tiny import options

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs" / "recipe.md"
PAGE = FILE.read_text()
OWN_DATA = ROOT / "recipes" / "translation" / "configs" / "own_data.yaml"
TINY = {"training.steps": "2", "training.validate_every": "1", "subwords.vocab_size": "340", "training.patience": "0"}
SMALL = {"1000": "12", "1001": "13", "2001": "25"}
"""Fewer pairs to hold back than the page does."""


def blocks() -> list[str]:
    return [block.code for block in fenced(FILE) if block.language == "bash"]


def recipe_commands() -> list[list[str]]:
    """The words after `python -m recipes.translation` of each command on the page, in order."""
    lines = "\n".join(blocks()).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[3:] for line in lines if line.startswith("python -m recipes.translation ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with two files of one's own, and the file of settings."""
    monkeypatch.chdir(tmp_path)
    found = pairs(250, 7)
    (tmp_path / "all.en").write_text("".join(f"{pair.source}\n" for pair in found))
    (tmp_path / "all.de").write_text("".join(f"{pair.target}\n" for pair in found))
    shutil.copy(OWN_DATA, tmp_path)
    return tmp_path


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command of the page, training a tiny model for two steps; return what it prints."""
    if words[0] == "train":
        if "--training.steps" in words:
            words = words[: words.index("--training.steps")]
        given = options(Path("x"), TINY)
        words = words + [
            word for pair in zip(given[::2], given[1::2], strict=True) if pair[0] != "--run" for word in pair
        ]
    file = None
    if ">" in words:
        file = Path(words[words.index(">") + 1])
        words = words[: words.index(">")]
    if "--file" in words:
        Path(words[words.index("--file") + 1]).write_text("A sentence.\nThe number is six.\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed\n")))
    assert main(words) == 0, words
    printed = capsys.readouterr().out
    if file:
        file.write_text(printed)
    return printed


def test_every_command_of_the_page_works_in_its_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (held_back,) = [block for block in blocks() if "paste" in block]
    held_back = re.sub(r"\d{4}", lambda found: SMALL[found[0]], held_back)
    subprocess.run(["bash", "-euc", held_back], check=True)
    assert sorted(Path("both.txt").read_text().splitlines()) == sorted(
        f"{source}\t{target}"
        for split in ("train", "dev", "test")
        for source, target in zip(
            *(Path(f"{split}.{side}").read_text().splitlines() for side in ("en", "de")), strict=True
        )
    )
    for words in recipe_commands():
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        if words[:1] != ["demo"]:
            run(words, monkeypatch, capsys)
    assert len(Path("translations.de").read_text().splitlines()) == 2

    files, of_model = re.findall(r"^\| path \| .*?(?=\n\n)|^\| file \| .*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w.]+\.(?:jsonl|txt|json))`|`(\w+)/`", files):
        assert (folder / "runs" / "larger" / "".join(name)).exists(), name
    saved = {path.name for path in (folder / "runs" / "larger" / "checkpoints").glob("*/*")}
    assert saved <= set(re.findall(r"`([\w.]+)`", of_model)) | set(re.findall(r"`(training\.\w+)`", PAGE))
    assert {"model.safetensors", "training.safetensors"} <= saved


def test_the_page_shows_every_stage() -> None:
    assert {"train", "evaluate", "translate", "compare", "average"} <= {words[0] for words in recipe_commands()}
    for preset in re.findall(r"^\| [^|]+ \| (\w+) \| \d", PAGE, re.MULTILINE):
        assert preset in PRESETS


def test_the_settings_for_own_data_have_a_comment_on_almost_every_line() -> None:
    config = load_config(OWN_DATA)
    assert config.data.format == "text"
    settings = [line for line in OWN_DATA.read_text().splitlines() if re.match(r"\s+\w+: ", line)]
    assert sum("#" in line for line in settings) > 0.6 * len(settings)


def test_a_package_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(words: object) -> int:
        raise ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece")

    monkeypatch.setitem(COMMANDS, "prepare", without)
    assert main(["prepare"]) == 2
    expected = "sentencepiece is not installed: in the checkout of seqpar, run pip install -e '.[recipes]'\n"
    assert capsys.readouterr().err == f"error: {expected}"
    script = (
        "import sys, runpy; sys.modules['yaml'] = None; runpy.run_module('recipes.translation', run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.stderr == f"error: {expected.replace('sentencepiece', 'yaml')}"
    assert found.returncode == 2


def test_a_missing_module_of_our_own_is_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(words: object) -> int:
        raise ModuleNotFoundError("No module named 'recipes.x'", name="recipes.x")

    monkeypatch.setitem(COMMANDS, "prepare", without)
    with pytest.raises(ModuleNotFoundError):
        main(["prepare"])
