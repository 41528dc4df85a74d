"""An export that is made of tensors alone has a few of them in memory, however large the model is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.translation.run_folder.checkpoint import save_model
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes
from tests.recipes.random_translator import random_translator
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.formats

MIB = 2**20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""One thread, and memory that is free again goes back to the system at once: otherwise gaps of it would count."""
LARGE = {"model.d_model": 512, "model.d_ff": 2048, "model.encoder_layers": 4, "model.decoder_layers": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 113 MiB, whose largest tensor has 4."""
    folder = tmp_path_factory.mktemp("large")
    subwords = random_translator(folder).source
    config = tiny(folder / "run", LARGE)
    model = build_model(model_sizes(config.model), subwords, subwords)
    assert sum(weight.nbytes for weight in model.parameters()) > 112 * MIB
    assert max(weight.nbytes for weight in model.parameters()) == 4 * MIB
    save_model(folder / "run" / "best", Translator(config, model, subwords, subwords), {"step": 1})
    return folder / "run"


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
