"""Read the commands that a page prints, and run them on stand-ins that make them short.

A page's blocks go through bash itself, so that its variables, loops and comments mean what they mean to a reader; the
programs they call only note how they were called. Each call then goes to the real program, in a folder that has a
stand-in for every file and run that the command names.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from recipes.translation.commands import main
from recipes.translation.commands.arguments import run_config
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.settings.options import OneLineParser
from recipes.translation.translating.translate import Translation, best
from tests.fenced import fenced
from tests.recipes.tiny import options as tiny_options

ROOT = Path(__file__).parent.parent
PROGRAMS = ("python", "python3", "make", "pip", "torchrun", "curl")
"""The programs whose calls are noted."""
AROUND = ("sudo",)
"""Programs that a page may use and that a machine may lack; they run the rest of their line."""
TRAINS = ("train", "distil", "demo")
ONLY_ACCEPTED = {
    "serve": "it would listen until it is stopped; the tutorial's commands run it",
    "import": "it needs a published model; tests/recipes/importing has such models, made tiny",
}
"""Commands of the recipe of which the options alone are tested here, and why."""
SHORT = {
    "training.steps": "3",
    "training.warmup": "1",
    "training.batch_tokens": "600",
    "training.accumulate": "1",
    "training.validate_every": "1",
    "training.validate_bleu": "2",
    "training.keep_checkpoints": "3",
    "training.devices": "[cpu]",
    "training.report": "false",
    "subwords.vocab_size": "360",
    "data.builtin_pairs": "250",
    "decoding.max_length": "8",
}
"""What makes a training short, in place of what is printed."""
SMALL = {"model.d_model": "32", "model.d_ff": "32", "model.heads": "2", "model.decoder_layers": "2"}
"""Sizes of every model here, so that one can begin with another's weights."""
SENTENCES = 4
PAIRS = pairs(250, seed=1)


class Accepted(Exception):  # noqa: N818
    """The program has taken all its options, and would now begin."""


def blocks(page: Path) -> Iterator[str]:
    """Yield each block of commands, without prompts and what a command printed."""
    for block in fenced(page):
        code = re.sub(r"\\\n", " ", block.code).replace(".venv/bin/", "")
        if block.language == "console":
            code = "\n".join(re.findall(r"^\$ (.*)", code, flags=re.MULTILINE))
        if block.language in ("bash", "console") and not block.marked:
            yield code


def calls(page: Path, folder: Path) -> list[list[str]]:
    """Return how a page's commands call the programs: the arguments of each call, the program first."""
    bin_, log = folder / "bin", folder / "calls"
    bin_.mkdir()
    for name in PROGRAMS:
        # One write, which a call in the background cannot come between
        (bin_ / name).write_text(f"#!/bin/bash\nprintf '%s\\0' {name} \"$@\" $'\\1' >> {log}\n")
    for name in AROUND:
        (bin_ / name).write_text('#!/bin/bash\n"$@"\n')
    for file in bin_.iterdir():
        file.chmod(0o755)
    log.touch()
    # A call in the background has to note itself before a page ends it
    script = "\n".join(("kill() { wait; }", *blocks(page)))
    environment = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(folder), "SEQPAR_DATA": str(folder / "data")}
    subprocess.run(["bash", "-n", "-c", script], check=True, env=environment)
    # Not -e: the files that `head` or `paste` read are not here
    subprocess.run(["bash", "-c", script], check=False, env=environment, cwd=folder, capture_output=True, timeout=60)
    noted = log.read_text().replace("...", str(folder / "data")).split("\1\0")
    found = [call.split("\0")[:-1] for call in noted if call]
    lines = re.findall(rf"^(?:{'|'.join(PROGRAMS)}) ", script, flags=re.MULTILINE)
    assert len(found) >= len(lines), f"bash came to {len(found)} of the {len(lines)} calls of {page.name}"
    return found


def try_out(call: Sequence[str], base: Path, *, train: bool) -> None:
    """Give a call to its program: in the current folder, with a finished run to copy from; raise what it refuses."""
    program, *words = call
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(words) <= {*targets}, f"make {words}"
    elif program == "pip" or words[:2] == ["-m", "pip"]:
        packages_exist(words)
    elif program == "torchrun":
        from torch.distributed.run import parse_args

        options = parse_args(words)
        script = ["-m", options.training_script] if options.module else [options.training_script]
        try_out(["python", *script, *options.training_script_args], base, train=False)
    elif words[:2] == ["-m", "recipes.translation"]:
        of_recipe(words[2:], base, train=train)
    elif words[:1] == ["-m"] and words[1].startswith("examples."):
        assert importlib.util.find_spec(words[1]), words[1]  # tests/examples runs it
    elif words and words[0].endswith(".py"):
        assert (ROOT / words[0]).is_relative_to(ROOT / "examples"), words[0]  # as it does this one
        assert (ROOT / words[0]).is_file(), words[0]
    elif words[:1] == ["-m"] and words[1] != "venv":
        of_module(words[1], words[2:])


def packages_exist(words: Sequence[str]) -> None:
    """Assert that pip is told to install extras of this package, or packages that one of them names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {re.split(r"[;\[ ]", name)[0] for names in extras.values() for name in names}
    for word in words:
        if word.startswith(".["):
            assert set(word[2:-1].split(",")) <= extras.keys(), word
        elif not word.startswith("-") and word not in ("install", ".", "constraints.txt", "pip", "torch"):
            assert word.partition("=")[0] in known, f"{word}: no extra names it"


def of_module(module: str, words: Sequence[str]) -> None:
    """Run a module's own parser, and stop there: a benchmark takes minutes to hours."""

    def parse(self: argparse.ArgumentParser, *args: object) -> None:
        original(self, *args)
        raise Accepted

    original = argparse.ArgumentParser.parse_args
    with (
        patch.object(sys, "argv", [module, *words]),
        patch.object(argparse.ArgumentParser, "parse_args", parse),
        contextlib.suppress(Accepted),
    ):
        if importlib.util.find_spec(module).submodule_search_locations:
            module = f"{module}.__main__"
        importlib.import_module(module).main()
        raise AssertionError(f"{module} takes no options")


def of_recipe(words: Sequence[str], base: Path, *, train: bool) -> None:
    """Run a command of the recipe on stand-ins; of a training that is not to run, the options and the settings."""
    name, *rest = words
    if processes := after("--processes", rest):
        # All of it happens in this process
        assert processes == "auto" or processes.isdecimal(), processes
        rest = without({"--processes"}, rest)
    stand_in(rest, base, trains=name in TRAINS)
    with only_settings(), contextlib.suppress(Accepted):
        succeed(name, rest)
    if name in ONLY_ACCEPTED or (name in TRAINS and not train):
        return
    if name in TRAINS:
        rest = shortened(name, rest)
        shutil.rmtree(after("--run", rest) or "runs/demo", ignore_errors=True)
    # A teacher of three steps ends no translation, and a student is not trained on cut ones
    with patch("recipes.translation.training.student_data.best", all_finished):
        succeed(name, rest)


def all_finished(*given: Any) -> list[Translation]:
    """Translate, and take every translation for one that has ended."""
    return [one._replace(finished=True) for one in best(*given)]


def succeed(name: str, words: Sequence[str]) -> None:
    """Run a command of the recipe; what it says when it refuses is in the assertion."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = main([name, *words])
        except SystemExit as error:
            status = error.code
    assert status == 0, f"{name} {' '.join(words)}: {said.getvalue()}"


@contextlib.contextmanager
def only_settings() -> Iterator[None]:
    """Let a command read its options, and a training its settings, and end it there."""

    def parse(self: OneLineParser, argv: Sequence[str]) -> None:
        options = original(self, argv)
        if hasattr(options, "config") and "training.steps" in vars(options):
            run_config(options)
        raise Accepted

    original = OneLineParser.parse
    with patch.object(OneLineParser, "parse", parse):
        yield


def shortened(name: str, words: Sequence[str]) -> list[str]:
    """Return a training's options with three steps of a tiny model, in one process."""
    sizes = {"model.encoder_layers": "1", **SMALL}
    if "decoder_only" in words:
        sizes = {key: size for key, size in SMALL.items() if key != "model.decoder_layers"}
    # What another run's model has, or the page names, stays
    keep = [word[2:] for word in words if word.startswith("--model.")]
    added = {**SHORT, **{key: size for key, size in sizes.items() if key not in keep}}
    left = without({f"--{key}" for key in SHORT}, words)
    return [*left, *(part for key, value in added.items() for part in (f"--{key}", value))]


def without(options: set[str], words: Sequence[str]) -> list[str]:
    """Return the words without these options and their values."""
    left, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word in options
        if not skipping:
            left.append(word)
    return left


def after(option: str, words: Sequence[str]) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def stand_in(words: Sequence[str], base: Path, *, trains: bool) -> None:
    """Make what a command names and is not there: runs, files of settings, and text."""
    configured: dict[str, dict[str, object]] = {}
    if config := after("--config", words):
        if config.startswith("recipes/"):
            configured = yaml.safe_load((ROOT / config).read_text())
            Path("recipes").exists() or Path("recipes").symlink_to(ROOT / "recipes")
        elif not config.endswith("best/config.yaml"):
            shutil.copy(ROOT / "recipes/translation/configs/own_data.yaml", config)
            configured = yaml.safe_load(Path(config).read_text())
    data, training = configured.get("data", {}), configured.get("training", {})
    output = [after(option, words) for option in ("--out", "--output", "--alignments")]
    if trains:
        output.append(after("--run", words))
    named = [*words, *(str(training.get(key, "")) for key in ("start_from", "teacher"))]
    for word in named:
        run = re.sub(r"/(averaged|best|last)(/config\.yaml)?$", "", word)
        if (run == "RUN" or re.match(r"runs/|.*/seed\d", run)) and word not in output and not Path(run).exists():
            shutil.copytree(base, run)
    folder = after("--data.path", words) or os.path.expandvars(str(data.get("path", "")))
    files = [name for key in ("train", "valid", "test") for name in data.get(key, ())]
    files += [name for word in words for name in word.strip("[]").split(",")]
    for name in files:
        if re.search(r"\.(en|de|he|zh|fr|txt|tsv)(\.gz)?$", name) and name not in output:
            write_text(name)
            write_text(os.path.join(folder, name))


def write_text(name: str) -> None:
    """Write a stand-in: 250 lines of training text, or four of anything else."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    some = PAIRS if re.search("train|corpus|medical", path.name) else PAIRS[:SENTENCES]
    if path.suffix == ".tsv":
        lines = ["sechs"] * SENTENCES
    else:
        # Two languages, whatever they are called: a corpus whose sides are equal is refused
        english = not {".en", ".he"}.isdisjoint(path.suffixes) or path.name == "sentences.txt"
        lines = [pair.source if english else pair.target for pair in some]
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def make_base(run: Path) -> None:
    """Train and evaluate the run that stands in for every run that a page takes for granted."""
    # Ten models to be averaged, and enough steps for translations that are not empty
    changes = {
        **SHORT,
        **SMALL,
        "subwords.kind": "bpe",
        "training.steps": 80,
        "training.validate_every": 8,
        "training.keep_checkpoints": 10,
    }
    data = []
    for part in ("train", "valid", "test"):
        files = [str(run.parent / f"{part}.{side}") for side in ("en", "de")]
        data += [f"--data.{part}", *files]
        for file in files:
            write_text(file)
    succeed(
        "train",
        [
            *tiny_options(run, {**changes, "training.learning_rate": 0.01, "training.schedule": "constant"}),
            "--data.format",
            "text",
            *data,
        ],
    )
    succeed("average", ["--run", str(run), "--last", "2"])
    succeed("evaluate", ["--run", str(run)])
