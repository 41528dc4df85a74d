"""An export that is made of tensors alone has a few of them in memory, however large the model is."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models import EncoderDecoder
from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes
from tests.recipes.random_translator import random_translator
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.formats

MIB = 2**20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""One thread, and memory that is free again goes back to the system at once: otherwise gaps of it would count."""
SMALL = {"model.encoder_layers": 4, "model.decoder_layers": 4}
LARGE = {**SMALL, "model.d_model": 512, "model.d_ff": 2048}


def saved_run(folder: Path, changes: dict[str, Any]) -> tuple[Path, EncoderDecoder]:
    subwords = random_translator(folder).source
    config = tiny(folder / "run", changes)
    model = build_model(model_sizes(config.model), subwords, subwords)
    save_model(folder / "run" / "best", Translator(config, model, subwords, subwords), {"step": 1})
    return folder / "run", model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 113 MiB, whose largest tensor has 4."""
    folder, model = saved_run(tmp_path_factory.mktemp("large"), LARGE)
    assert sum(weight.nbytes for weight in model.parameters()) > 112 * MIB
    assert max(weight.nbytes for weight in model.parameters()) == 4 * MIB
    return folder


def python(*words: str, limit: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    """Run Python with at most `limit` bytes of data; a file that is mapped counts, too."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )


def at_import(modules: str) -> int:
    """The bytes of data of a process that has imported these modules."""
    # The last one is what torch imports where a model without memory is built
    modules += ", recipes.translation.processes.ranks, torch._dynamo"
    read = "print(next(line for line in open('/proc/self/status') if line.startswith('VmData')).split()[1])"
    found = python("-c", f"import {modules}; {read}")
    assert found.returncode == 0, found.stderr
    return 1024 * int(found.stdout)


@pytest.mark.parametrize(
    ("format", "modules", "file"),
    [
        ("safetensors", "recipes.translation.run_folder.checkpoint", "model.safetensors"),
        ("hf", "recipes.translation.export.huggingface_model", "model.safetensors"),
        ("ctranslate2", "recipes.translation.export.ctranslate2_model", "model.bin"),
    ],
)
def test_a_model_is_exported_in_a_third_of_its_own_memory(format: str, modules: str, file: str, run: Path) -> None:
    words = ["export", "--run", str(run), "--to", format]
    found = python("-m", "recipes.translation", *words, limit=at_import(modules) + 36 * MIB)
    assert found.returncode == 0, found.stderr
    assert (run / format / file).stat().st_size > 112 * MIB


def peak_of_own_memory(run: Path) -> int:
    """The most bytes of memory of an export that are not those of a file, which the system can drop at any time."""
    words = [sys.executable, "-m", "recipes.translation", "export", "--run", str(run), "--to", "onnx"]
    most = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        while process.poll() is None:
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            most = max(most, int(found[1]) if found else 0)
            time.sleep(0.002)
    assert process.returncode == 0
    return 1024 * most


def test_onnx_graphs_of_a_model_take_no_more_memory_than_those_of_a_small_one(run: Path, tmp_path: Path) -> None:
    small, _ = saved_run(tmp_path, SMALL)
    assert peak_of_own_memory(run) < peak_of_own_memory(small) + 36 * MIB
    assert sum(file.stat().st_size for file in (run / "onnx").glob("*.data")) > 112 * MIB
