"""Measure training and beam search of the recipe's model beside Marian (Hugging Face) and `nn.Transformer`, in one run.

    pip install -c constraints.txt -e '.[recipes,peers]'
    python -m benchmarks.training                                   # every part; about an hour on two cores
    python -m benchmarks.training --parts training --sizes d128 --precisions float32
    python -m benchmarks.training --write docs/results/training     # adds its figures to the .json and .md there
    python -m benchmarks.training --parts training --device cuda

Implementations take turns on the same batches, two steps each, of which the second is timed. A figure is the median
over batches of target tokens a second, padding not counted; a ratio is the median of the ratios on one batch. Parts:

- training: whole steps of about 4,000 target tokens: forward, loss with label smoothing 0.1, backward, clip, Adam.
- factors: our own step with one part at a time put back to torch's own: the plain loss of all logits, `nn.Dropout`,
  torch's attention kernel, Adam that is not fused; and with the first three.
- decoding: beam 5 for 64 sentences, 20 tokens each, batch after batch. Random weights would end sentences at random, so
  none may end.
- loading: subwords and batches of an epoch on one thread; time from start to the first step of `train`. On Multi30k
  where SEQPAR_DATA is the folder that holds it, else on the built-in corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.loss.results import hardware
from benchmarks.loss.timing import wall_seconds
from benchmarks.seq2seq_peers import (
    ADAM,
    SIZES,
    Marian,
    Ours,
    OursWithPlainLoss,
    TorchTransformer,
    batches,
    check_loss,
    marian,
)
from models import attention, beam_search, evaluating, make_transformer
from models.dropout import Dropout
from recipes.translation.data.batches import Batch, TokenBatches
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.settings.config import RunConfig, load_config
from recipes.translation.text.subwords import BOS, EOS, PAD
from seqpar.testing.markdown_table import markdown_table

TOKENS = 4_000
"""Target tokens of a step, about."""
WARM_UP = 1
"""Batches at the start that are not timed."""
BEAM = 5
SENTENCES = 64
LENGTH = 20
"""Tokens of every hypothesis."""
PARTS = ("training", "factors", "decoding", "loading")
BEGIN = "<!-- below: python -m benchmarks.training --write -->"
END = "<!-- above: python -m benchmarks.training --write -->"
Row = dict[str, Any]
"""The figures of one row of a table, its part and name among them."""


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


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
    """Return the median work a second by name, and the others' times over ours, which is the first."""
    ours, *others = seconds
    found: dict[str, float] = {}
    for name, times in seconds.items():
        found[name] = round(statistics.median(work / time for work, time in zip(done, times, strict=True)), 1)
    return {"rates": found, "ratios": {name: median_ratio(seconds[name], seconds[ours]) for name in others}}


def median_ratio(times: list[float], others: list[float]) -> float:
    """Return the median over batches of one time over the other."""
    return round(statistics.median(time / other for time, other in zip(times, others, strict=True)), 2)


def products_alone(step: Callable[[Any], object], given: Any) -> float:
    """Return the seconds that a step's matrix products take, by torch's profiler."""
    names = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")}
    with profile(activities=[ProfilerActivity.CPU]) as record:
        step(given)
    return sum(event.self_cpu_time_total for event in record.key_averages() if event.key in names) / 1e6


def training(size: str, precision: str, order: str, steps: int, device: str) -> Row:
    """Return target tokens a second of whole training steps, and the ratio if our step were its products alone.

    On a GPU there is no such ratio: the profiler's time of a product there is the time to launch it.
    """
    config, vocab_size = SIZES[size]
    apart = check_loss(size)
    report(f"{size} {precision}, {order} lengths; our loss and the plain one are {apart:.0e} apart in float64")
    torch.manual_seed(0)
    # All three are in memory at once, so that they can take turns on each batch
    built = [kind(config, vocab_size, precision, device) for kind in (Ours, Marian, TorchTransformer)]
    made = batches(vocab_size, TOKENS, order)
    inputs = [placed(next(made), device) for _ in range(WARM_UP + steps)]
    seconds = in_turn({each.name: each.step for each in built}, inputs, WARM_UP, device)
    timed = inputs[WARM_UP:]
    most = {}
    if device == "cpu":
        bare = [products_alone(built[0].step, batch) for batch in timed]
        most["most"] = median_ratio(seconds[Marian.name], bare)
    cells = sum(batch.src.numel() + batch.tgt_in.numel() for batch in timed)
    real = sum(int((batch.src != PAD).sum()) + batch.tokens for batch in timed)
    return {
        "part": "training",
        "name": f"{size}, {order}",
        "precision": precision,
        "parameters": {each.name: parameters(each.model) for each in built},
        "padding": round(1 - real / cells, 3),
        **most,
        **rates([batch.tokens for batch in timed], seconds),
    }


def placed(batch: Batch, device: str) -> Batch:
    """Return a batch as it is trained on: in pinned memory for a GPU."""
    if device == "cpu":
        return batch
    return Batch(*(ids.pin_memory() for ids in batch))


def parameters(model: nn.Module) -> int:
    """Return how many parameters are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def factors(size: str, precision: str, steps: int) -> Row:
    """Return our step's time with parts of it put back over the step's own, on batches of similar lengths."""
    config, vocab_size = SIZES[size]
    report(f"{size} {precision}, parts put back")
    torch.manual_seed(0)
    ours = Ours(config, vocab_size, precision)
    plain = OursWithPlainLoss(config, vocab_size, precision)
    ordinary = torch.optim.Adam(ours.model.parameters(), **{**ADAM, "fused": False, "foreach": False})
    made = batches(vocab_size, TOKENS, "similar")
    inputs = [next(made) for _ in range(WARM_UP + steps)]

    def with_adam(batch: Batch) -> None:
        with patch.object(ours, "optimizer", ordinary):
            ours.step(batch)

    def with_dropout(batch: Batch, kind: Ours | OursWithPlainLoss = ours) -> None:
        with patch.object(Dropout, "forward", nn.Dropout.forward):
            kind.step(batch)

    def with_attention(batch: Batch) -> None:
        with patch.object(attention, "SHORT", 0):
            ours.step(batch)

    def with_all(batch: Batch) -> None:
        with patch.object(attention, "SHORT", 0):
            with_dropout(batch, plain)

    runs = {
        "as it is": ours.step,
        "the plain loss": plain.step,
        "nn.Dropout": with_dropout,
        "torch's attention kernel": with_attention,
        "Adam, not fused": with_adam,
        "loss, dropout and attention": with_all,
    }
    seconds = in_turn(runs, inputs, WARM_UP)
    found = rates([batch.tokens for batch in inputs[WARM_UP:]], seconds)
    return {"part": "factors", "name": size, "precision": precision, **found}


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


def loading() -> list[Row]:
    """Return target tokens a second through subwords and batches, and the seconds `train` takes to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        multi30k = None
        name = "built-in corpus"
        if "SEQPAR_DATA" in os.environ:
            multi30k = "recipes/translation/configs/multi30k_en_de.yaml"
            name = "Multi30k"
        config = load_config(multi30k, {"run": f"{folder}/run"})
        report(f"loading {name}")
        prepare(Corpora(config))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the figure is for one core
        tokens, seconds = read_epoch(config)
        torch.set_num_threads(threads)
        first = first_step(config, multi30k)
    return [
        {"part": "loading", "name": f"{name}: target tokens a second, one core", "figure": round(tokens / seconds)},
        {"part": "loading", "name": f"{name}: seconds from start to the first step", "figure": round(first, 1)},
    ]


def read_epoch(config: RunConfig) -> tuple[int, float]:
    """Return the target tokens of an epoch, and the seconds to cut its text into subwords and make its batches."""
    source, target = prepare(Corpora(config))
    text = load_pairs(config.data, "train", config.subwords.lowercase)
    start = time.perf_counter()
    sources = source.encode([pair.source for pair in text])
    targets = target.encode([pair.target for pair in text])
    made = TokenBatches(sources, targets, batch_tokens=config.training.batch_tokens)
    tokens = sum(made.batch(indices).tokens for indices in made.epoch(0))
    return tokens, time.perf_counter() - start


def first_step(config: RunConfig, file: str | None) -> float:
    """Return the seconds from the start of `train`, with subwords made before, to the first line of its metrics."""
    load_corpus(config)  # so that every file is in the system's cache
    given: list[str] = []
    if file:
        given = ["--config", file]
    command = [sys.executable, "-m", "recipes.translation", "train", *given, "--run", config.run]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        metrics = Path(config.run, "metrics.jsonl")
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def tables(rows: list[Row]) -> str:
    """Return a Markdown table for each part that has rows."""
    makers = {"training": _training_table, "factors": _factors_table, "decoding": _decoding_table}
    makers["loading"] = _loading_table
    found = []
    for part, make in makers.items():
        rows_of_part = [row for row in rows if row["part"] == part]
        if rows_of_part:
            found.append(make(rows_of_part))
    return "\n\n".join(found)


def _training_table(rows: list[Row]) -> str:
    header = ["model, lengths in a batch", "dtype", "padding", "target tokens/s: seqpar", "Marian", "nn.Transformer"]
    header += ["to Marian", "to nn.Transformer", "to Marian, if only products took time"]
    cells = []
    for row in rows:
        most = "-"
        if "most" in row:
            most = f"{row['most']:.2f}"
        cells.append([row["name"], row["precision"], f"{row['padding']:.1%}", *_rates(row), *_ratios(row), most])
    return markdown_table(header, cells)


def _factors_table(rows: list[Row]) -> str:
    header = ["with this put back: time to the step as it is", "dtype"]
    header += ["plain loss", "nn.Dropout", "torch's attention", "Adam not fused", "first three"]
    return markdown_table(header, [[row["name"], row["precision"], *_ratios(row)] for row in rows])


def _decoding_table(rows: list[Row]) -> str:
    header = [f"beam {BEAM}, {SENTENCES} sentences", "dtype", "sentences/s: seqpar", "Marian", "to Marian"]
    return markdown_table(header, [[row["name"], row["precision"], *_rates(row), *_ratios(row)] for row in rows])


def _loading_table(rows: list[Row]) -> str:
    return markdown_table(["loading", "figure"], [[row["name"], f"{row['figure']:,}"] for row in rows])


def _rates(row: Row) -> list[str]:
    return [f"{rate:,.0f}" for rate in row["rates"].values()]


def _ratios(row: Row) -> list[str]:
    return [f"{ratio:.2f}" for ratio in row["ratios"].values()]


def machine(device: str = "cpu") -> str:
    """Return what the figures were taken on."""
    import transformers

    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{hardware(device)}, {torch.get_num_threads()} threads"
    )


def write(path: Path, rows: list[Row], device: str) -> None:
    """Put the rows into `<path>.json`, replacing those of the same name, and the tables into `<path>.md`."""
    data = path.with_suffix(".json")
    merged: dict[tuple[str, str, str | None], Row] = {}
    if data.exists():
        merged = {_key(row): row for row in json.loads(data.read_text())}
    for row in rows:
        merged[_key(row)] = {**row, "date": str(date.today()), "on": machine(device)}
    ordered = sorted(merged.values(), key=lambda row: (PARTS.index(row["part"]), str(_key(row))))
    data.write_text(json.dumps(ordered, indent=1) + "\n")
    document = path.with_suffix(".md")
    text = ""
    if document.exists():
        text = document.read_text()
    document.write_text(page(text, ordered))


def page(text: str, rows: list[Row]) -> str:
    """Return the page with new tables between BEGIN and END, and the machines below them; other text stays.

    Without END everything after BEGIN is replaced; without BEGIN the tables go to the end.
    """
    before, _, after = text.partition(BEGIN)
    after = after.partition(END)[2] or "\n"
    machines = "\n".join(sorted({f"- {row['date']}, {row['on']}" for row in rows}))
    return f"{before}{BEGIN}\n\n{tables(rows)}\n\n{machines}\n\n{END}{after}"


def _key(row: Row) -> tuple[str, str, str | None]:
    return row["part"], row["name"], row.get("precision")


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"])
    parser.add_argument("--orders", nargs="+", choices=("similar", "mixed"), default=["similar", "mixed"])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each implementation")
    parser.add_argument("--device", default="cpu", help="where to train; the other parts are of the CPU")
    parser.add_argument("--dry-run", action="store_true", help="train the smallest model on the CPU, one step each")
    parser.add_argument("--write", type=Path, default=None, help="where results are kept, without suffix")
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
    if "factors" in options.parts:
        rows += [factors(size, precision, options.steps) for size in options.sizes for precision in options.precisions]
    if "decoding" in options.parts:
        rows += [decoding(size, options.steps) for size in options.sizes]
    if "loading" in options.parts:
        rows += loading()
    print(f"{tables(rows)}\n\n{date.today()}, {machine(options.device)}")
    if options.write:
        write(options.write, rows, options.device)


if __name__ == "__main__":
    main()
