"""Measure the most memory that each part of a sharded training takes on a rank, beside what is predicted.

    python -m benchmarks.sharded                    # one process, four with layout.shard 4, two with layout.vocab 2
    python -m benchmarks.sharded --d-model 1024 --layers 12

Each row of the table is what a part adds, on the rank where it adds most, to the process before there is a model:
memory that is resident, as the system counts it. The prediction is arithmetic, with W the bytes of the weights, N the
ranks, U the largest unit that FSDP2 gathers (a layer, or embeddings and generator), T the largest tensor, and L what
`seqpar.memory_plan` says of the loss in a step:

    begin       W/N + 2 T         what is kept, and a whole tensor with its part
    step        4 W/N + 4 U + L   weights, gradient, moments; a unit and the buffer it comes in, and so for its gradient
    validation  3 W/N + 2 U + E   U is a layer; E are embeddings and generator, gathered throughout
    save        6 W/N + 2 T       weights and moments, and a copy
    resume      3 W/N + 2 T
    export      2 T               in one process, one tensor at a time

Without shards U and E are 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import seqpar
from benchmarks.loss.results import hardware
from conformance.peak_memory import FORGET_PEAK, RESET, process_peak_bytes
from models.sharding import cut
from models.transformer import Layer, make_transformer
from recipes.translation import train as loop
from recipes.translation.commands import main as recipe
from recipes.translation.data import sentence_pairs
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import model_sizes
from recipes.translation.settings.config import RunConfig, load_config
from recipes.translation.text.subwords import Subwords
from recipes.translation.training import training
from recipes.translation.training.layout import Layout
from recipes.translation.training.optimizer import update
from recipes.translation.training.validation import validate
from seqpar.markdown_table import markdown_table
from seqpar.memory_plan import memory_plan

PARTS = ("begin", "step", "validation", "save", "resume", "export")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"training.devices": "[cpu]"}),
    "shard 4": (4, {"layout.shard": 4}),
    "vocab 2": (2, {"layout.vocab": 2}),
}
TOKENS = 100


def main() -> None:
    """Measure each layout in processes of its own, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d-model", type=int, default=512, help="width of the model (default: 512)")
    parser.add_argument("--layers", type=int, default=4, help="layers of encoder and decoder each (default: 4)")
    parser.add_argument("--vocab", type=int, default=500, help="subwords (default: 500)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker))
        return
    rows = []
    for name, (ranks, changes) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            config = settings(folder, options, changes)
            (folder / "settings.json").write_text(json.dumps(config))
            started(folder, ranks)
            found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
            expected = predicted(load_config(None, config), folder, ranks)
        for part in PARTS:
            most = max(each[part] for each in found if part in each)
            rows.append([name, part, f"{expected[part] / 2**20:,.0f}", f"{most / 2**20:,.0f}"])
    print(markdown_table(["layout", "part", "predicted, MiB", "measured, MiB"], rows))
    print(
        f"\n{weights_of(load_config(None, config), options.vocab)[0] / 2**20:,.0f} MiB of weights in float32; "
        f"{date.today()}, {hardware('cpu')}; torch {torch.__version__}"
    )


def settings(folder: Path, options: argparse.Namespace, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run of two steps, by dotted name."""
    return {
        "run": str(folder / "run"),
        "data.builtin_pairs": 2_000,
        "subwords.vocab_size": options.vocab,
        "subwords.kind": "bpe",
        "model.d_model": options.d_model,
        "model.d_ff": 4 * options.d_model,
        "model.heads": 4,
        "model.encoder_layers": options.layers,
        "model.decoder_layers": options.layers,
        "training.batch_tokens": TOKENS,
        "training.steps": 2,
        "training.validate_every": 2,
        "training.validate_bleu": 2,
        "training.report": False,
        "decoding.max_length": 4,
        "training.devices": "auto",
        **changes,
    }


def started(folder: Path, ranks: int) -> None:
    """Run the worker in so many processes."""
    words = [sys.executable, "-m", "benchmarks.sharded", "--worker", str(folder)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words[1:2] = [*launcher, "-m"]
    # Tensors that are freed go back to the system at once; gaps that the heap keeps between others would count
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    subprocess.run(words, env=environment, check=True, stdout=sys.stderr)


def work(folder: Path) -> None:
    """Train, resume and export, and write what this rank has measured."""
    config = json.loads((folder / "settings.json").read_text())
    sentence_pairs.BUILTIN_HELD_OUT = 8  # sentences of a validation
    # Once with a tiny model, so that all that is imported, and allocated for good, is there
    small = {"model.d_model": 16, "model.d_ff": 16, "model.encoder_layers": 1, "model.decoder_layers": 1}
    loop.train(load_config(None, {**config, **small, "run": f"{config['run']}-tiny"}))
    found: dict[str, int] = {}
    base = 0

    def measured(
        part: Callable[[], str], function: Callable[..., Any], after: Callable[..., None] | None = None
    ) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            resident()
            result = function(*arguments, **named)
            if after:
                after(*arguments)
            found[part()] = max(found.get(part(), 0), process_peak_bytes() - base)
            return result

        return call

    def begin(*arguments: Any, **named: Any) -> tuple[Any, Any]:
        nonlocal base
        gc.collect()
        base = base or resident()
        return first_model(*arguments, **named)

    resumed = False
    first_model = loop.first_model  # type: ignore[attr-defined]
    for owner, name, function in (
        (loop, "first_model", begin),
        (Layout, "__init__", measured(lambda: "resume" if resumed else "begin", Layout.__init__)),
        (Layout, "fill_moments", measured(lambda: "resume", Layout.fill_moments)),
        (seqpar, "accumulate_gradients", measured(lambda: "step", seqpar.accumulate_gradients)),
        (training, "update", measured(lambda: "step", update)),
        (training, "validate", measured(lambda: "validation", validate)),
        (Saver, "save", measured(lambda: "save", Saver.save, lambda saver, *_: saver.wait())),
    ):
        setattr(owner, name, function)
    loop.train(load_config(None, config))
    resumed = True
    loop.train(load_config(None, {**config, "training.steps": 3, "training.validate_every": 3}))
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        export = ["export", "--to", "safetensors", "--run"]
        recipe([*export, f"{config['run']}-tiny"])
        gc.collect()
        base = resident()
        measured(lambda: "export", recipe)([*export, config["run"]])
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def resident() -> int:
    """Return the memory that is resident, from which the peak begins anew."""
    RESET.write_text(FORGET_PEAK)
    return process_peak_bytes()


def weights_of(config: RunConfig, vocab: int) -> tuple[int, int, int, int]:
    """Return the bytes of the weights, of the largest layer and tensor, and of what is in no layer."""
    with torch.device("meta"):
        sizes: Any = model_sizes(config.model)
        model = make_transformer(sizes, vocab, vocab)
    layers = [m for m in model.modules() if isinstance(m, Layer)]
    of_layers = [sum(each.nbytes for each in layer.parameters()) for layer in layers]
    whole = sum(each.nbytes for each in model.parameters())
    return whole, max(of_layers), max(each.nbytes for each in model.parameters()), whole - sum(of_layers)


def predicted(config: RunConfig, folder: Path, ranks: int) -> dict[str, int]:
    """Return the bytes of each part by the equations above."""
    vocab = len(Subwords.load(folder / "run" / "subwords" / "joint.model"))
    W, layer, T, E = weights_of(config, vocab)
    sizes: Any = model_sizes(config.model)
    U = max(layer, E)
    layout = config.layout
    if layout.vocab > 1:
        with torch.device("meta"):
            model = make_transformer(sizes, vocab, vocab)
        own = sum(cut(name, each, 0, ranks).nbytes for name, each in model.named_parameters())
        kept, U, E, layer = own, 0, 0, 0
    elif layout.shard > 1:
        kept = W // ranks
    else:
        kept, U, E, layer = W, 0, 0, 0
    how = "vocab" if layout.vocab > 1 else "fsdp" if layout.shard > 1 else "ddp"
    plan = memory_plan(
        tokens=TOKENS, d=sizes.d_model, vocab=vocab, devices=ranks, layout=how, dtype=torch.float32, device="cpu"
    )
    loss = plan.of("linear_cross_entropy").peak
    return {
        "begin": kept + 2 * T,
        "step": 4 * kept + 4 * U + loss,
        "validation": 3 * kept + 2 * layer + E,
        "save": 6 * kept + 2 * T,
        "resume": 3 * kept + 2 * T,
        "export": 2 * T,
    }


if __name__ == "__main__":
    main()
