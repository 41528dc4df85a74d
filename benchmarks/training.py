"""Training and beam search of the recipe's model against Marian (Hugging Face) and `nn.Transformer`, in one run.

    pip install -c constraints.txt -e '.[recipes,peers]'
    python -m benchmarks.training                                   # every part; about an hour on two cores
    python -m benchmarks.training --parts training --sizes d128 --precisions float32
    python -m benchmarks.training --write docs/results/training     # puts what it measured into .json and .md there

Implementations take turns on the same batches, two steps each, of which the second is timed; a figure is the median of
target tokens (padding not counted) a second over batches, a ratio the median of the ratios on one batch. Parts:

- training: whole steps of about 4,000 target tokens: forward, loss with label smoothing 0.1, backward, clip, Adam.
- factors: our own step with one thing at a time put back to what torch has: the plain loss of all logits, `nn.Dropout`,
  torch's attention kernel, Adam that is not fused; and with all of them.
- decoding: beam 5 for 64 sentences, 20 tokens each, batch after batch. Random weights end sentences at random, so
  nothing may end.
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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.loss.results import hardware
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
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.data.subwords import BOS, EOS, PAD
from recipes.translation.settings.config import RunConfig, load_config

TOKENS, WARM_UP, BEAM, SENTENCES, LENGTH = 4_000, 1, 5, 64, 20
Row = dict[str, Any]


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def in_turn(steps: dict[str, Callable[[Any], object]], inputs: list[Any], warm_up: int) -> dict[str, list[float]]:
    """Seconds of each step on each input, of two in a row the second, as its own steps follow each other in use.

    The first one's memory was another model's, and comes from the system page by page. The first inputs are not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number, given in enumerate(inputs):
        for name, step in steps.items():
            step(given)
            if number >= warm_up:
                start = time.perf_counter()
                step(given)
                seconds[name].append(time.perf_counter() - start)
        say(", ".join(f"{name} {times[-1]:.3f} s" for name, times in seconds.items() if times) or "warming up")
    return seconds


def rates(done: list[float], seconds: dict[str, list[float]]) -> Row:
    """Median work a second by name, and how often ours goes into each other one's time."""
    ours, *others = seconds
    return {
        "rates": {
            name: round(statistics.median(n / t for n, t in zip(done, times, strict=True)), 1)
            for name, times in seconds.items()
        },
        "ratios": {
            name: round(statistics.median(t / own for t, own in zip(seconds[name], seconds[ours], strict=True)), 2)
            for name in others
        },
    }


def products_alone(step: Callable[[Any], object], given: Any) -> float:
    """Seconds that a step's matrix products take, as torch's profiler has them."""
    names = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(given)
    return sum(event.self_cpu_time_total for event in seen.key_averages() if event.key in names) / 1e6


def training(size: str, precision: str, order: str, steps: int) -> Row:
    """Target tokens a second of whole training steps; and the ratio if our step were its products and nothing else."""
    (config, vocab), apart = SIZES[size], check_loss(size)
    say(f"{size} {precision}, {order} lengths; our loss and the plain one are {apart:.0e} apart in float64")
    torch.manual_seed(0)
    built = [kind(config, vocab, precision) for kind in (Ours, Marian, TorchTransformer)]
    made = batches(vocab, TOKENS, order)
    inputs = [next(made) for _ in range(WARM_UP + steps)]
    seconds = in_turn({each.name: each.step for each in built}, inputs, WARM_UP)
    timed = inputs[WARM_UP:]
    bare = [products_alone(built[0].step, batch) for batch in timed]
    cells = sum(batch.src.numel() + batch.tgt_in.numel() for batch in timed)
    real = sum(int((batch.src != PAD).sum()) + batch.tokens for batch in timed)
    return {
        "part": "training",
        "name": f"{size}, {order}",
        "precision": precision,
        "parameters": {each.name: parameters(each.model) for each in built},
        "padding": round(1 - real / cells, 3),
        "most": round(statistics.median(t / own for t, own in zip(seconds[Marian.name], bare, strict=True)), 2),
        **rates([batch.tokens for batch in timed], seconds),
    }


def parameters(model: nn.Module) -> int:
    """How many are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def factors(size: str, precision: str, steps: int) -> Row:
    """Seconds of our step with parts of it put back, over those of the step as it is; batches of similar lengths."""
    config, vocab = SIZES[size]
    say(f"{size} {precision}, parts put back")
    torch.manual_seed(0)
    ours, plain = Ours(config, vocab, precision), OursWithPlainLoss(config, vocab, precision)
    ordinary = torch.optim.Adam(ours.model.parameters(), **{**ADAM, "fused": False, "foreach": False})
    made = batches(vocab, TOKENS, "similar")
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
    """Sentences a second of beam search; every hypothesis has `LENGTH` tokens, no sentence leaves the batch early."""
    config, vocab = SIZES[size]
    torch.manual_seed(0)
    model, peer = make_transformer(config, vocab, vocab, PAD).eval(), marian(config, vocab).eval()
    with torch.no_grad():
        model.generator.bias[EOS] = peer.final_logits_bias[0, EOS] = -1e4
    made = batches(vocab, TOKENS, "mixed")
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

    say(f"{size}, beam {BEAM}")
    with evaluating(model):  # as the recipe translates, batch after batch
        seconds = in_turn({"seqpar": ours, "Marian": theirs}, sources, 1)
    return {"part": "decoding", "name": size, "precision": "float32", **rates([SENTENCES] * repeats, seconds)}


def loading() -> list[Row]:
    """Subwords and batches a second; the seconds that `train` takes to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        multi30k = "recipes/translation/configs/multi30k_en_de.yaml" if "SEQPAR_DATA" in os.environ else None
        config = load_config(multi30k, {"run": f"{folder}/run"})
        name = "Multi30k" if multi30k else "built-in corpus"
        say(f"loading {name}")
        prepare(config)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        tokens, seconds = read_epoch(config)
        torch.set_num_threads(threads)
        first = first_step(config, multi30k)
    return [
        {"part": "loading", "name": f"{name}: target tokens a second, one core", "figure": round(tokens / seconds)},
        {"part": "loading", "name": f"{name}: seconds from start to the first step", "figure": round(first, 1)},
    ]


def read_epoch(config: RunConfig) -> tuple[int, float]:
    """Target tokens of an epoch, and the seconds to cut its text into subwords and make its batches."""
    source, target = prepare(config)
    text = load_pairs(config.data, "train", config.subwords.lowercase)
    start = time.perf_counter()
    sides = source.encode([pair.source for pair in text]), target.encode([pair.target for pair in text])
    made = TokenBatches(*sides, batch_tokens=config.training.batch_tokens)
    tokens = sum(made.batch(indices).tokens for indices in made.epoch(0))
    return tokens, time.perf_counter() - start


def first_step(config: RunConfig, file: str | None) -> float:
    """Seconds from the start of the `train` command to the first step's line in its metrics; subwords are there."""
    load_corpus(config)
    given = ["--config", file] if file else []
    command = [sys.executable, "-m", "recipes.translation", "train", *given, "--run", config.run]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        metrics = Path(config.run, "metrics.jsonl")
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = []
    heads = {
        "training": "model, lengths in a batch | dtype | padding | target tokens/s: seqpar | Marian | nn.Transformer "
        "| to Marian | to nn.Transformer | to Marian, if only products took time",
        "factors": "with this put back: time to the step as it is | dtype | "
        "plain loss | nn.Dropout | torch's attention | Adam not fused | first three",
        "decoding": f"beam {BEAM}, {SENTENCES} sentences | dtype | sentences/s: seqpar | Marian | to Marian",
        "loading": "loading | figure",
    }
    for part, head in heads.items():
        if found := [row for row in rows if row["part"] == part]:
            lines += [f"\n| {head} |", "|---" * (head.count("|") + 1) + "|"]
        for row in found:
            cells = [row["name"]]
            if part == "loading":
                cells += [f"{row['figure']:,}"]
            else:
                cells += [row["precision"], *([f"{row['padding']:.1%}"] if part == "training" else [])]
                cells += [f"{rate:,.0f}" for rate in row["rates"].values() if part != "factors"]
                cells += [f"{ratio:.2f}" for ratio in row["ratios"].values()]
                cells += [f"{row['most']:.2f}" if "most" in row else "-"] if part == "training" else []
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> str:
    """What the figures were taken on."""
    import transformers

    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{hardware('cpu')}, {torch.get_num_threads()} threads"
    )


def write(path: Path, rows: list[Row]) -> None:
    """Puts the rows into `<path>.json`, over those of the same name, and the tables into `<path>.md` below its line."""
    data, text = path.with_suffix(".json"), path.with_suffix(".md")
    kept = json.loads(data.read_text()) if data.exists() else []

    def key(row: Row) -> tuple[Any, ...]:
        return row["part"], row["name"], row.get("precision")

    merged = {key(row): row for row in kept + [{**row, "date": str(date.today()), "on": machine()} for row in rows]}
    ordered = sorted(merged.values(), key=lambda row: (list(PARTS).index(row["part"]), str(key(row))))
    data.write_text(json.dumps(ordered, indent=1) + "\n")
    above = text.read_text().split(LINE)[0] if text.exists() else ""
    said = "\n".join(sorted({f"{row['date']}, {row['on']}" for row in ordered}))
    text.write_text(f"{above}{LINE}\n\n{said}\n{table(ordered)}\n")


PARTS, LINE = ("training", "factors", "decoding", "loading"), "<!-- below: python -m benchmarks.training --write -->"


def main() -> None:
    """Measures, prints, and writes where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"])
    parser.add_argument("--orders", nargs="+", choices=("similar", "mixed"), default=["similar", "mixed"])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each implementation")
    parser.add_argument("--write", type=Path, default=None, help="where results are kept, without an ending")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    if "training" in options.parts:
        rows += [
            training(size, precision, order, options.steps)
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
    print(f"{date.today()}, {machine()}\n{table(rows)}")
    if options.write:
        write(options.write, rows)


if __name__ == "__main__":
    main()
