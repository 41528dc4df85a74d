"""Start-up and memory with a large corpus that is tokenised once: `python -m benchmarks.data_size --pairs 5000000`.

The pairs come from the built-in grammar. One process makes subwords and the tokenised file; a second one, like every
later start of a run, loads the corpus, makes the first step's batches, and resumes in the middle of the epoch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_SECONDS = 10.0
TARGET_BYTES = 1_500_000_000
BATCHES = 200
"""Batches that are read at the start and in the middle of the epoch."""


def main() -> None:
    """Measure both processes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500_000)
    parser.add_argument("--folder", help="keep the files in this folder, and use those that are there")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)  # what the processes are started with
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure, options.pairs)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        starts = {name: start(folder, options.pairs) for name in ("first preparation", "every later start")}
        print(f"{options.pairs:,} pairs of the built-in grammar\n")
        print(report(starts))
        size = sum(path.stat().st_size for path in Path(folder, "cache").glob("*/pairs.arrow"))
        later = starts["every later start"]
        print(f"\ntokenised file: {size / 1e6:,.0f} MB, {size / options.pairs:.0f} bytes a pair")
        print(
            f"first batches after at most {TARGET_SECONDS:g} s: {'yes' if later['ready'] <= TARGET_SECONDS else 'NO'}"
        )
        print(f"resident at most {TARGET_BYTES / 1e9:g} GB: {'yes' if later['peak'] <= TARGET_BYTES else 'NO'}")


def start(folder: str, pairs: int) -> dict[str, float]:
    """Run a process that loads the corpus, and return what it has measured."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.data_size", "--measure", folder, "--pairs", str(pairs)]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return {**found, "whole process": time.monotonic() - began}


def measured(folder: str, pairs: int) -> dict[str, float]:
    """Load the corpus in this process, read batches, and resume; return seconds and bytes."""
    began = time.monotonic()
    import torch

    from recipes.translation.data.batches import Steps
    from recipes.translation.data.corpus import load_corpus
    from recipes.translation.settings.config import load_config

    imported = time.monotonic()
    given = {
        "run": f"{folder}/run",
        "data.builtin_pairs": pairs,
        "data.cache": f"{folder}/cache",
        "subwords.train_pairs": 40_000,
    }
    corpus = load_corpus(load_config(None, given))
    loaded = time.monotonic()
    steps = Steps(corpus.train, 1, 0, 1, torch.device("cpu"))
    from_start = steps.after(0, 0)
    next(from_start)
    ready = time.monotonic()
    used = time.process_time()
    for _ in range(BATCHES):
        next(from_start)
    read = time.monotonic()
    middle = steps.after(0, corpus.train.count(0) // 2)
    next(middle)
    resumed = time.monotonic()
    for _ in range(BATCHES):
        next(middle)
    return {
        "imports": imported - began,
        "corpus": loaded - imported,
        "first batch": ready - loaded,
        "ready": ready - began,
        "ready, CPU": used,
        "one batch": (read - ready) / BATCHES,
        "resume": resumed - read,
        "batches": corpus.train.count(0),
        **memory(),
    }


def memory() -> dict[str, float]:
    """Return the bytes of this process that are resident: at most so far, and now by kind."""
    text = Path("/proc/self/status").read_text()
    names = {"peak": "VmHWM", "own": "RssAnon", "mapped": "RssFile"}
    found = {what: re.search(rf"{name}:\s+(\d+) kB", text) for what, name in names.items()}
    return {what: 1024.0 * int(match[1]) for what, match in found.items() if match}


def report(starts: dict[str, dict[str, float]]) -> str:
    """Return the measurements as a table."""
    lines = ["| | " + " | ".join(starts) + " |", "|---|" + "---|" * len(starts)]
    for name in next(iter(starts.values())):
        cells = []
        for found in starts.values():
            if name in ("peak", "own", "mapped"):
                cells.append(f"{found[name] / 1e6:,.0f} MB")
            elif name == "batches":
                cells.append(f"{found[name]:,.0f}")
            elif name == "one batch":
                cells.append(f"{1e3 * found[name]:.2f} ms")
            else:
                cells.append(f"{found[name]:.1f} s")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
