"""Measure saving and reading a model of 530 MB, beside the plain calls that do as little as possible.

    python -m benchmarks.checkpoints --folder DISK        # where there is room for 3 GB: what is written is removed

Saving a model is compared with safetensors' own file, flushed to the disk; reading it to translate, with the tensors
copied out of the mapped file, and the file's SHA-256; the pause of training, with a copy of weights and moments. The
model is the preset `base`, as large as with 58,000 subwords on both sides; its feed-forward networks are wider instead.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.loss.results import hardware
from models.transformer import allocate
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.files.atomic_folder import sha256
from recipes.translation.run_folder.checkpoint import TrainingState, load_translator, save_model
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import Translator, model_on_meta, model_sizes, tensors_of
from recipes.translation.settings.config import load_config
from recipes.translation.text.subwords import Subwords, train_subwords
from seqpar.markdown_table import markdown_table

SIZES = {"model.preset": "base", "model.d_ff": 9_300}


def main() -> None:
    """Measure in rounds, and print the table of medians."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turn (default: 5)")
    parser.add_argument("--folder", help="where the files are written, for as long as it takes")
    options = parser.parse_args()
    if options.folder is not None and not Path(options.folder).is_dir():
        parser.error(f"--folder {options.folder}: there is no such folder; make it first")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        translator = made(folder)
        size = sum(tensor.nbytes for tensor in tensors_of(translator.model).values())
        seconds = measured(folder, translator, options.rounds)
    rows = []
    for name, plain in (("save", "plain save"), ("read", "plain read"), ("pause", "plain copy")):
        ratios = [own / least for own, least in zip(seconds[name], seconds[plain], strict=True)]
        medians = (statistics.median(each) for each in (seconds[name], seconds[plain], ratios))
        rows.append([name, *(f"{median:.2f}" for median in medians), f"{min(ratios):.2f} to {max(ratios):.2f}"])
    print(markdown_table(["", "s", "the plain calls, s", "ratio", "in single rounds"], rows))
    print(
        f"\n{size / 1e6:.0f} MB of weights, medians of {options.rounds} rounds; {date.today()}, {hardware('cpu')}; "
        f"torch {torch.__version__}"
    )


def made(folder: Path) -> Translator:
    """Return a translator with weights that are drawn in a moment."""
    config = load_config(None, {"run": str(folder), "subwords.vocab_size": 360, **SIZES})
    train_subwords([side for pair in pairs(200, 1) for side in pair], folder / "joint", config.subwords)
    subwords = Subwords.load(folder / "joint.model")
    model = model_on_meta(model_sizes(config.model), subwords, subwords)
    allocate(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    return Translator(config, model, subwords, subwords)


def measured(folder: Path, translator: Translator, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by what was measured."""
    weights = tensors_of(translator.model)
    moments = {f"{name}/{what}": tensor.detach().clone() for name, tensor in weights.items() for what in "ab"}
    file = folder / "plain.safetensors"
    saver = Saver(folder / "run", translator.config.training, None)
    calls: dict[str, Callable[[], object]] = {
        "plain save": lambda: plain_save(file, weights),
        "save": lambda: save_model(folder / "model", translator, {"step": 1}),
        "plain read": lambda: plain_read(file),
        "read": lambda: load_translator(folder / "model"),
        "plain copy": lambda: [tensor.clone() for tensor in (*weights.values(), *moments.values())],
        "pause": lambda: pause(saver, translator, moments),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            if name.endswith("save"):
                file.unlink(missing_ok=True)
                shutil.rmtree(folder / "model", ignore_errors=True)
                os.sync()
            began = time.perf_counter()
            call()
            if number:  # after one round to warm up
                seconds[name].append(time.perf_counter() - began)
            saver.wait()
            if name == "save":
                save_file(weights, file)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return seconds


def plain_save(file: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the file, and flush it to the disk."""
    save_file(weights, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def plain_read(file: Path) -> dict[str, torch.Tensor]:
    """Copy the tensors out of the mapped file, and compute its SHA-256."""
    sha256(file)
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def pause(saver: Saver, translator: Translator, moments: dict[str, torch.Tensor]) -> None:
    """Do what training waits for: copy weights and moments, and begin to save them."""
    saver.save(translator, {"step": 1}, tensors_of(translator.model), moments, TrainingState(step=1))


if __name__ == "__main__":
    main()
