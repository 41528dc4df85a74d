"""Measure how long samples of translations take, beside searches and a loop over torch.multinomial.

    python -m benchmarks.sampling --run RUN                        # 256 sentences of the run's validation set
    python -m benchmarks.sampling --run RUN/averaged --sentences 64 --rounds 5

All ways take turns on the same batches of 64 sentences; the fastest turn of each counts, in the processor time of one
thread, which other work on the machine does not change. The loop is what a page of plain PyTorch would be: at each step
it computes the whole prefix of every sample again, without a cache, and draws from the softmax by torch.multinomial.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.distilled import folder_of
from benchmarks.loss.results import hardware
from models import EncoderDecoder, beam_search, default_limit, evaluating, greedy, sample
from recipes.translation.data.batches import padded
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.run_folder.checkpoint import Translator, load_translator
from recipes.translation.text.subwords import BOS, EOS, PAD
from seqpar.testing.markdown_table import markdown_table

BATCH = 64
SAMPLING: dict[str, dict[str, float]] = {
    "1 sample": {"samples": 1},
    "8 samples": {"samples": 8},
    "8 samples, top_k 10": {"samples": 8, "top_k": 10},
    "8 samples, top_p 0.9": {"samples": 8, "top_p": 0.9},
}


def main() -> None:
    """Measure one model, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="a run (its best model), or a checkpoint folder")
    parser.add_argument("--sentences", type=int, default=256, help="of the validation set (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    translator = load_translator(folder_of(options.run))
    sources = batches_of(translator, options.sentences)
    seconds = measured(translator.model, sources, options.rounds)
    print(table(seconds, sum(len(src) for src in sources)))
    print(
        f"\n{date.today()}, {hardware('cpu')}, one thread; torch {torch.__version__}; "
        f"{translator.model.generator.out_features:,} subwords, width {translator.model.generator.in_features}"
    )


def batches_of(translator: Translator, sentences: int) -> list[Tensor]:
    """Return sentences of the validation set in batches of similar length, (B, S) each."""
    config = translator.config
    pairs = load_pairs(config.data, "valid", config.subwords.lowercase)[:sentences]
    ids = sorted(translator.source.encode([pair.source for pair in pairs]), key=len)
    rows = [translator.source.symbols.source(each) for each in ids]
    return [padded(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]


def measured(model: EncoderDecoder, sources: list[Tensor], rounds: int) -> dict[str, float]:
    """Return the processor seconds of the fastest turn of each way."""
    ways: dict[str, Callable[[Tensor], object]] = {
        "greedy search": lambda src: greedy(model, src, bos=BOS, eos=EOS),
        "beam 4": lambda src: beam_search(model, src, bos=BOS, eos=EOS, beam=4),
    }
    for name, how in SAMPLING.items():
        ways[name] = lambda src, how=how: sample(model, src, bos=BOS, eos=EOS, seeds=range(len(src)), **how)
    for count in (1, 8):
        way = f"torch.multinomial, {count} sample{'s' * (count > 1)}"
        ways[way] = lambda src, count=count: plain_samples(model, src, count)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.process_time()
            for src in sources:
                way(src)
            best[name] = min(best[name], time.process_time() - started)
    return best


def plain_samples(model: EncoderDecoder, src: Tensor, samples: int) -> Tensor:
    """Draw translations as a page of plain PyTorch does."""
    rows = src.repeat_interleave(samples, 0)
    longest = default_limit(int((src != PAD).sum(1).max()))
    with evaluating(model):
        tokens = torch.full((len(rows), 1), BOS)
        done = torch.zeros(len(rows), dtype=torch.bool)
        while tokens.size(1) <= longest and not bool(done.all()):
            logits = model.generator(model(rows, tokens)[:, -1])
            drawn = torch.multinomial(logits.softmax(-1), 1).masked_fill(done[:, None], PAD)
            tokens = torch.cat([tokens, drawn], 1)
            done |= drawn[:, 0] == EOS
    return tokens


def table(seconds: dict[str, float], sentences: int) -> str:
    """Return the figures as markdown."""
    one = seconds["greedy search"]
    rows = [
        (name, f"{found:.2f}", f"{sentences / found:,.0f}", f"{found / one:.2f}") for name, found in seconds.items()
    ]
    return markdown_table(("", "seconds", "sentences/s", "x greedy search"), rows)


if __name__ == "__main__":
    main()
