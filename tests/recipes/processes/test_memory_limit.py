"""A model that does not fit is trained, and translated with, in parts, each process under a limit of memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.run_folder.checkpoint import load_facts, save_model
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes
from tests.recipes.processes.layouts import assert_same_weights
from tests.recipes.processes.started import ended, recipe, wait_for_steps, workers_of
from tests.recipes.random_translator import random_translator
from tests.recipes.tiny import OF_FILES, options, tiny, write_pairs

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900)]

LAYERS = 3
MIB = 2**20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""One thread, and memory that is free again goes back to the system at once: otherwise gaps of it would count."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Layers of 95 MiB in float64, hardly any vocabulary, and few words."""
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder, {"train": (0, 60), "valid": (60, 65)})
    return {
        **OF_FILES,
        "data.path": str(folder),
        "subwords.vocab_size": 340,
        "model.d_model": 384,
        "model.d_ff": 1536,
        "model.heads": 4,
        "model.encoder_layers": LAYERS,
        "model.decoder_layers": LAYERS,
        "model.dropout": 0,
        "training.precision": "float64",
        "training.batch_tokens": 60,
        "training.validate_every": 2,
        "training.validate_bleu": 2,
        "training.devices": "auto",
        "decoding.max_length": 3,
    }


@pytest.fixture(scope="module")
def base() -> int:
    """The bytes of data of a process that has imported what training needs."""
    read = "print(next(line for line in open('/proc/self/status') if line.startswith('VmData')).split()[1])"
    said = subprocess.run(
        [sys.executable, "-c", f"import recipes.translation.train, torch._dynamo; {read}"],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        check=True,
    )
    return 1024 * int(said.stdout)


def limited(limit: int, *words: str) -> subprocess.Popen[str]:
    """The recipe, in processes of which each has at most `limit` bytes of data; files that are mapped do not count."""
    return recipe(
        *words,
        environment=ENVIRONMENT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )


def assert_died_of_memory(status: int, errors: str) -> None:
    """An allocation failed: torch says so, and a C library that does not look reads from address 0 (one run in 25)."""
    assert status != 0
    assert status == -signal.SIGSEGV or "not enough memory" in errors or "can't allocate memory" in errors, errors


def test_a_run_that_fits_no_process_trains_is_killed_resumes_on_fewer_and_translates(
    settings: dict[str, Any], base: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # Weights, gradient and two moments are 4 x 95 MiB, and what is copied to be saved 3 x 95: together 665 for one
    # process, 332 for each of two and 166 for each of four, which gather a layer of up to 18 MiB a few times
    four, two = base + 430 * MIB, base + 560 * MIB
    alone = {**settings, "training.devices": "[cpu]", "training.steps": 2}
    status, _, errors = ended(limited(two, "train", *options(tmp_path / "alone", alone)))
    assert_died_of_memory(status, errors)
    assert not (tmp_path / "alone" / "last").exists()

    endless = {**settings, "layout.shard": 4, "training.steps": 100_000}
    process = limited(four, "train", *options(run, endless), "--processes", "4")
    wait_for_steps(run, process, 2)
    (victim,) = workers_of(process, rank=1)
    os.kill(victim, signal.SIGKILL)
    assert ended(process)[0] != 0
    made = int(load_facts(run / "last")["step"])

    resumed = {**settings, "layout.shard": 2, "training.steps": made + 2}
    status, output, errors = ended(limited(two, "train", *options(run, resumed), "--processes", "2"))
    assert status == 0, errors
    assert f"resuming from step {made}" in output

    usual = {**alone, "training.steps": made + 2}
    assert main(["train", *options(tmp_path / "usual", usual)]) == 0
    assert_same_weights(run, tmp_path / "usual", 1e-10)
    found, expected = (read_metrics(folder / "metrics.jsonl") for folder in (run, tmp_path / "usual"))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == {name: pytest.approx(value, rel=1e-10) for name, value in theirs.items()}

    capsys.readouterr()
    said = []
    for folder in (run, tmp_path / "usual"):
        assert main(["translate", "--run", str(folder), "the red house"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_model_that_fits_no_process_is_evaluated_by_four(base: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sizes = {"model.d_model": 384, "model.d_ff": 1536, "model.encoder_layers": 25, "model.decoder_layers": 25}
    config = tiny(run, {**sizes, "layout.shard": 4, "decoding.beam": 2, "decoding.max_length": 3})
    subwords = random_translator(tmp_path).source
    model = build_model(model_sizes(config.model), subwords, subwords)
    assert sum(weight.nbytes for weight in model.parameters()) > 390 * MIB
    save_model(run / "best", Translator(config, model, subwords, subwords), {"step": 1})
    write_pairs(tmp_path, {"five": (0, 5)})
    words = ["--run", str(run), "--sources", str(tmp_path / "five.en"), "--references", str(tmp_path / "five.de")]
    # One process needs 390 MiB and more; each of four has 100, a few layers of 9, and what it needs to talk to the
    # others
    limit = base + 360 * MIB
    status, _, errors = ended(limited(limit, "evaluate", *words))
    assert_died_of_memory(status, errors)
    status, output, errors = ended(limited(limit, "evaluate", *words, "--processes", "4"))
    assert status == 0, errors
    assert output.count("chrF") == 1
    results = [run / "five.en.translations.txt", run / "five.en.scores.json"]
    found = [path.read_text() for path in results]
    assert main(["evaluate", *words]) == 0
    assert found == [path.read_text() for path in results]
