"""Time whole training steps of the recipe's model on a GPU, and count their launches, beside Marian and nn.Transformer.

    python -m benchmarks.gpu.training_steps
    python -m benchmarks.gpu.training_steps --only seqpar     # or: Marian, nn.Transformer, "seqpar, compiled layers"
    python -m benchmarks.gpu.training_steps --dry-run         # the smallest model on the CPU, one step

A figure is the median over batches of about 4,000 target tokens, of similar lengths, after a step with each of them.
Compiled layers are measured only where they are named, because compiling takes a minute or more.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.figures import options_of, tell
from benchmarks.gpu.trace import traced
from benchmarks.loss.timing import wall_seconds
from benchmarks.seq2seq_peers import SIZES, Compiled, Marian, Ours, TorchTransformer, Trained, batches
from benchmarks.training import TOKENS, placed
from recipes.translation.data.batches import Batch

STEPS = 6
KINDS = (Ours, Marian, TorchTransformer, Compiled)


def kinds(size: str, precision: str, device: str, only: str) -> Iterator[tuple[str, Trained]]:
    """Yield every model of a size with its step, each made when it is asked for."""
    config, vocab_size = SIZES[size]
    for kind in KINDS:
        if only == kind.name or not (only or kind is Compiled):
            yield f"{kind.name}, {precision}", kind(config, vocab_size, precision, device)


def tell_steps(what: str, way: str, model: Trained, inputs: list[Batch], device: str) -> None:
    """Measure the steps of one model, then what they launch."""
    # Each batch has lengths of its own, for which kernels are loaded and memory is taken once
    for batch in inputs * 2:
        model.step(batch)
    times = [wall_seconds(partial(model.step, batch), device != "cpu") for batch in inputs]
    rate = statistics.median(batch.tokens / seconds for batch, seconds in zip(inputs, times, strict=True))
    tell(what, way=way, ms=round(statistics.median(times) * 1e3, 2), tokens_s=round(rate))
    again = iter(inputs * 2)
    found = traced(lambda: model.step(next(again)), len(inputs), device)
    waits = {name: count / len(inputs) for name, count in found.waits.items()}
    launches = round(found.launches / len(inputs))
    tell(f"{what}, traced", way=way, busy=round(found.busy, 3), launches=launches, waits=waits)


def main() -> None:
    """Tell each size, the smaller first."""
    options = options_of(__doc__)
    if options.only not in ("", *(kind.name for kind in KINDS)):
        raise SystemExit(f"--only {options.only}: there are {', '.join(kind.name for kind in KINDS)}")
    warnings.simplefilter("ignore")
    device, sizes, precision, steps = "cuda", ["d128", "d512"], "bf16", STEPS
    if options.dry_run:
        device, sizes, precision, steps = "cpu", ["d128"], "float32", 1
    for size in sizes:
        torch.manual_seed(0)
        made = batches(SIZES[size][1], 300 if options.dry_run else TOKENS, "similar")
        inputs = [placed(next(made), device) for _ in range(steps)]
        for way, model in kinds(size, precision, device, options.only):
            tell_steps(f"training step, {size}", way, model, inputs, device)


if __name__ == "__main__":
    main()
