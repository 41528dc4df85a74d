"""Measure what training data costs: the memory of each rank, the rate of encoding, the starts, the first batch.

    python -m benchmarks.corpora                                     # 10,000 and 1,000,000 pairs, 1 and 4 ranks
    python -m benchmarks.corpora --pairs 10000 5000000 --ranks 4

The text is made: the sentences of the built-in corpus, again and again, each with a number of its own. The first start
reads it, makes subwords of 10,000 pairs and divides all pairs into them; a second start finds these. Memory is that of
the process alone (RssAnon of /proc/self/status), at its peak during a start or an epoch's first batch, above what the
process had before; mapped files are shared by all ranks and can be dropped by the system at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import islice
from pathlib import Path

from benchmarks.loss.results import hardware
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare
from recipes.translation.data.training_text import write_ids
from recipes.translation.processes.ranks import join_ranks
from recipes.translation.settings.config import RunConfig, load_config
from seqpar.markdown_table import markdown_table

RATED = 100_000
"""Pairs that are encoded to measure the rate."""
REPEATS = 5
DIFFERENT = 20_000


def main() -> None:
    """Measure every number of pairs and ranks in processes of its own, and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.corpora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[10_000, 1_000_000], help="sizes of the corpus")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="numbers of processes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker))
        return
    rows = []
    for count in options.pairs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_text(folder, count)
            for ranks in options.ranks:
                first, second = measured(folder, ranks), measured(folder, ranks)
                figures = [max(each[name] for each in second) for name in ("start", "batch", "peak", "kept")]
                began = f"{first[0]['start']:.1f}" if ranks == options.ranks[0] else "-"
                rows.append([f"{count:,}", str(ranks), began, *(f"{each:.1f}" for each in figures)])
            rates = encoded(config_of(folder), min(count, RATED))
    names = ["pairs", "ranks", "first start, s", "second start, s", "first batch, s", "peak, MB", "kept, MB"]
    print(markdown_table(names, rows))
    print("\nEncoding, pairs a second: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
    print(f"{date.today()}, {hardware('cpu')}")


def write_text(folder: Path, count: int) -> None:
    """Write the files of a corpus with so many pairs."""
    some = pairs(min(count, DIFFERENT), 1)
    for side, suffix in enumerate(("en", "de")):
        with (folder / f"train.{suffix}").open("w") as file:
            file.writelines(f"{some[number % len(some)][side]} {number}\n" for number in range(count))
        (folder / f"valid.{suffix}").write_text("".join(f"{pair[side]}\n" for pair in pairs(100, 2)))


def config_of(folder: Path) -> RunConfig:
    """Return the settings of a run on these files."""
    files = {f"data.{split}": [f"{split}.en", f"{split}.de"] for split in ("train", "valid")}
    return load_config(
        None,
        {
            "run": str(folder / "run"),
            "data.path": str(folder),
            **files,
            "subwords.vocab_size": 2_000,
            "subwords.train_pairs": 10_000,
            "training.batch_tokens": 4_096,
        },
    )


def measured(folder: Path, ranks: int) -> list[dict[str, float]]:
    """Start a run in so many processes; return what each of them has measured."""
    words = [sys.executable, "-m", "benchmarks.corpora", "--worker", str(folder)]
    if ranks > 1:
        words[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=sys.stderr)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def work(folder: Path) -> None:
    """Load the corpus, make the first batch of an epoch, and write what this rank has measured."""
    with join_ranks(300) as ranks:
        before = own_memory()
        found: dict[str, float] = {}
        with watched(found):
            start = time.monotonic()
            corpus = load_corpus(config_of(folder), ranks)
            found["start"] = time.monotonic() - start
            start = time.monotonic()
            batches = corpus.train.epoch(0)
            corpus.train.batch(batches[0])
            found["batch"] = time.monotonic() - start
        found["kept"] = (own_memory() - before) / 1e6
        found["peak"] = (found["peak"] - before) / 1e6
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


@contextmanager
def watched(found: dict[str, float]) -> Iterator[None]:
    """Note the largest own memory of this process in the block."""
    ended = threading.Event()
    found["peak"] = own_memory()

    def watch() -> None:
        while not ended.wait(0.02):
            found["peak"] = max(found["peak"], own_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def own_memory() -> int:
    """Return the bytes of memory that this process has for itself, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def encoded(config: RunConfig, count: int) -> dict[str, float]:
    """Return how many pairs a second are read, and encoded by sentencepiece alone and by the recipe, on two threads.

    Each is the best of REPEATS, which alternate.
    """
    corpora = Corpora(config)
    source, target = prepare(corpora)
    start = time.monotonic()
    read = sum(1 for _, pairs in corpora.each_corpus() for _ in islice(pairs, count))
    rates = {"read and cleaned": read / (time.monotonic() - start)}
    text = corpora.text
    sides = [(source._processor, text.sources[:count]), (target._processor, text.targets[:count])]
    text.corpora = [count]
    alone, written = [], []
    for _ in range(REPEATS):
        start = time.monotonic()
        for processor, sentences in sides:
            processor.encode(sentences, num_threads=2)
        alone.append(time.monotonic() - start)
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            write_ids(Path(folder, "ids"), text, [()], (source, target), 2)
            written.append(time.monotonic() - start)
    return {**rates, "sentencepiece alone": count / min(alone), "written as ids": count / min(written)}


if __name__ == "__main__":
    main()
