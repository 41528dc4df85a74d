"""Measure training and beam search of the recipe's model beside Marian (Hugging Face) and `nn.Transformer`, in one run.

    pip install -c constraints.txt -e '.[recipes,peers]'
    python -m benchmarks.training                                   # every part; about an hour on two cores
    python -m benchmarks.training --parts training --sizes d128 --precisions float32
    python -m benchmarks.training --parts training --device cuda

Implementations take turns on the same batches, two steps each, of which the second is timed. A figure is the median
over batches of target tokens a second, padding not counted; a ratio is the median of the ratios on one batch. Parts:

- training: whole steps of about 4,000 target tokens: forward, loss with label smoothing 0.1, backward, clip, Adam.
- decoding: beam 5 for 64 sentences, 20 tokens each, batch after batch. Random weights would end sentences at random, so
  none may end.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch

from benchmarks.loss.results import hardware
from benchmarks.loss.timing import wall_seconds
from benchmarks.seq2seq_peers import (
    SIZES,
    Compiled,
    Marian,
    Ours,
    PlainLoss,
    TorchTransformer,
    batches,
    check_loss,
    marian,
)
from models import beam_search, evaluating, make_transformer
from recipes.translation.data.batches import Batch
from recipes.translation.text.subwords import BOS, EOS, PAD
from seqpar.markdown_table import markdown_table

TOKENS = 4_000
"""Target tokens of a step, about."""
WARM_UP = 1
"""Batches at the start that are not timed."""
BEAM = 5
SENTENCES = 64
LENGTH = 20
"""Tokens of every hypothesis."""
PARTS = ("training", "decoding")
KINDS = (Ours, Compiled, Marian, TorchTransformer, PlainLoss)
Row = dict[str, Any]
"""The figures of one row of a table, its part and name among them."""


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr)


def in_turn(
    steps: dict[str, Callable[[Any], object]], inputs: list[Any], warm_up: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Return the seconds of each step on each input, after the first inputs, to the end of the device's work.

    Of two steps in a row the second is timed: in use, a step follows its own kind, while after another model its memory
    comes from the system page by page.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number, given in enumerate(inputs):
        for name, step in steps.items():
            step(given)
            if number >= warm_up:
                seconds[name].append(wall_seconds(partial(step, given), device != "cpu"))
        done = [f"{name} {times[-1]:.3f} s" for name, times in seconds.items() if times]
        report(", ".join(done) or "warming up")
    return seconds


def rates(done: list[float], seconds: dict[str, list[float]]) -> Row:
    """Return the median work a second by name, and the medians of the others' times over ours, which is the first."""
    ours, *others = seconds
    found: dict[str, float] = {}
    for name, times in seconds.items():
        found[name] = round(statistics.median(work / time for work, time in zip(done, times, strict=True)), 1)
    ratios = {
        name: round(statistics.median(time / own for time, own in zip(seconds[name], seconds[ours], strict=True)), 2)
        for name in others
    }
    return {"rates": found, "ratios": ratios}


def training(size: str, precision: str, order: str, steps: int, device: str) -> Row:
    """Return target tokens a second of whole training steps."""
    config, vocab_size = SIZES[size]
    apart = check_loss(size)
    report(f"{size} {precision}, {order} lengths; our loss and the plain one are {apart:.0e} apart in float64")
    torch.manual_seed(0)
    # All are in memory at once, so that they can take turns on each batch
    built = [kind(config, vocab_size, precision, device) for kind in KINDS]
    made = batches(vocab_size, TOKENS, order)
    inputs = [placed(next(made), device) for _ in range(WARM_UP + steps)]
    seconds = in_turn({each.name: each.step for each in built}, inputs, WARM_UP, device)
    timed = inputs[WARM_UP:]
    cells = sum(batch.src.numel() + batch.tgt_in.numel() for batch in timed)
    real = sum(int((batch.src != PAD).sum()) + batch.tokens for batch in timed)
    return {
        "part": "training",
        "name": f"{size}, {order}",
        "precision": precision,
        "padding": round(1 - real / cells, 3),
        **rates([batch.tokens for batch in timed], seconds),
    }


def placed(batch: Batch, device: str) -> Batch:
    """Return a batch as it is trained on: in pinned memory for a GPU."""
    if device == "cpu":
        return batch
    return Batch(*(ids.pin_memory() for ids in batch))


def decoding(size: str, repeats: int) -> Row:
    """Return sentences a second of beam search; every hypothesis has `LENGTH` tokens, so no sentence ends early."""
    config, vocab_size = SIZES[size]
    torch.manual_seed(0)
    model = make_transformer(config, vocab_size, vocab_size, PAD).eval()
    peer = marian(config, vocab_size).eval()
    with torch.no_grad():
        # No probability for the end symbol, so every hypothesis has LENGTH tokens in both models
        model.generator.bias[EOS] = -1e4
        peer.final_logits_bias[0, EOS] = -1e4
    made = batches(vocab_size, TOKENS, "mixed")
    sources = [next(made).src[:SENTENCES] for _ in range(repeats + 1)]

    def ours(src: torch.Tensor) -> object:
        found = beam_search(model, src, bos=BOS, eos=EOS, beam=BEAM, max_length=LENGTH)
        assert {len(hypotheses[0].tokens) for hypotheses in found} == {LENGTH}
        return found

    def theirs(src: torch.Tensor) -> object:
        mask = (src != PAD).long()
        found = peer.generate(
            input_ids=src, attention_mask=mask, num_beams=BEAM, max_new_tokens=LENGTH, do_sample=False
        )
        assert found.shape == (len(src), LENGTH + 1)
        return found

    report(f"{size}, beam {BEAM}")
    with evaluating(model):  # as the recipe translates, batch after batch
        seconds = in_turn({"seqpar": ours, "Marian": theirs}, sources, 1)
    return {"part": "decoding", "name": size, "precision": "float32", **rates([SENTENCES] * repeats, seconds)}


def tables(rows: list[Row]) -> str:
    """Return a Markdown table for each part that has rows."""
    found = []
    for part, first in (
        ("training", ["model, lengths in a batch", "dtype", "padding", "target tokens/s"]),
        ("decoding", [f"beam {BEAM}, {SENTENCES} sentences", "dtype", "sentences/s"]),
    ):
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            *first, what = first
            ours, *others = of_part[0]["rates"]
            header = [*first, f"{what}: {ours}", *others, *(f"to {name}" for name in others)]
            found.append(markdown_table(header, [_cells(row) for row in of_part]))
    return "\n\n".join(found)


def _cells(row: Row) -> list[str]:
    padding = [f"{row['padding']:.1%}"] if "padding" in row else []
    rates = [f"{rate:,.0f}" for rate in row["rates"].values()]
    return [row["name"], row["precision"], *padding, *rates, *(f"{ratio:.2f}" for ratio in row["ratios"].values())]


def machine(device: str = "cpu") -> str:
    """Return what the figures were taken on."""
    import transformers

    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{hardware(device)}, {torch.get_num_threads()} threads"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"])
    parser.add_argument("--orders", nargs="+", choices=("similar", "mixed"), default=["similar", "mixed"])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each implementation")
    parser.add_argument("--device", default="cpu", help="where to train; the other parts are of the CPU")
    parser.add_argument("--dry-run", action="store_true", help="train the smallest model on the CPU, one step each")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.dry_run:
        print(tables([training("d128", "float32", "similar", 1, "cpu")]))
        return
    rows: list[Row] = []
    if "training" in options.parts:
        rows += [
            training(size, precision, order, options.steps, options.device)
            for size in options.sizes
            for precision in options.precisions
            for order in options.orders
        ]
    if "decoding" in options.parts:
        rows += [decoding(size, options.steps) for size in options.sizes]
    print(f"{tables(rows)}\n\n{date.today()}, {machine(options.device)}")


if __name__ == "__main__":
    main()
