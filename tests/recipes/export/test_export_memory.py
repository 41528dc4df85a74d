"""An export that is made of tensors alone has a few of them in memory, however large the model is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models import EncoderDecoder
from recipes.translation.run_folder.checkpoint import save_model
from tests.recipes.random_translator import random_translator, translator_of
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.formats

MIB = 2**20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""One thread, and memory that is free again goes back to the system at once: otherwise gaps of it would count."""
SMALL = {"model.encoder_layers": 2, "model.decoder_layers": 2}
LARGE = {**SMALL, "model.d_model": 768, "model.d_ff": 3072}


def saved_run(folder: Path, changes: dict[str, Any]) -> tuple[Path, EncoderDecoder]:
    subwords = random_translator(folder).source
    made = translator_of(tiny(folder / "run", changes), subwords, subwords)
    save_model(folder / "run" / "best", made, {"step": 1})
    return folder / "run", made.model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 127 MiB, whose largest tensor has 9."""
    folder, model = saved_run(tmp_path_factory.mktemp("large"), LARGE)
    assert sum(weight.nbytes for weight in model.parameters()) > 126 * MIB
    assert max(weight.nbytes for weight in model.parameters()) == 9 * MIB
    return folder


WITH_LIMIT = f"""
import resource, sys
from recipes.translation.commands import main
import recipes.translation.export.ctranslate2_model, recipes.translation.export.huggingface_model
import recipes.translation.processes.ranks, torch._dynamo # which torch imports where a model without memory is built

for format in sys.argv[2:]:
    (data,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(data) + {36 * MIB}, resource.RLIM_INFINITY))
    assert main(["export", "--run", sys.argv[1], "--to", format]) == 0, format
"""
"""A program that exports a run in each format with 36 MiB more data than before; a file that is mapped counts, too."""


def test_a_model_is_exported_in_a_third_of_its_own_memory(run: Path) -> None:
    files = {"safetensors": "model.safetensors", "hf": "model.safetensors", "ctranslate2": "model.bin"}
    words = [sys.executable, "-c", WITH_LIMIT, str(run), *files]
    found = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert found.returncode == 0, found.stderr
    for format, file in files.items():
        assert (run / format / file).stat().st_size > 126 * MIB


EXPORTS = """
import sys
from recipes.translation.commands import main

for run in sys.argv[1:]:
    assert main(["export", "--run", run, "--to", "onnx"]) == 0
"""


def peaks_of_own_memory(*runs: Path) -> list[int]:
    """The most bytes of memory of exports, one after the other, that are not of a file, which the system can drop."""
    most = [0] * len(runs)
    with subprocess.Popen([sys.executable, "-c", EXPORTS, *map(str, runs)], env=ENVIRONMENT) as process:
        while process.poll() is None:
            number = sum((run / "onnx").exists() for run in runs[:-1])
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            most[number] = max(most[number], 1024 * int(found[1]) if found else 0)
            time.sleep(0.005)
    assert process.returncode == 0
    return most


def test_onnx_graphs_of_a_model_take_no_more_memory_than_those_of_a_small_one(run: Path, tmp_path: Path) -> None:
    of_small, of_large = peaks_of_own_memory(saved_run(tmp_path, SMALL)[0], run)
    assert of_large < of_small + 36 * MIB
    assert sum(file.stat().st_size for file in (run / "onnx").glob("*.data")) > 126 * MIB
