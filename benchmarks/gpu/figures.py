"""Measure, and tell each number as soon as it is known: a line of JSON, from which the part's table is made."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]


def tell(what: str, **figures: object) -> None:
    """Print one row of a part's table."""
    print(json.dumps({"what": what, **figures}), flush=True)


def options_of(doc: str | None) -> argparse.Namespace:
    """Return the options of a step: `dry_run`, and `only`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--only", default="", help="the one implementation that is measured")
    return parser.parse_args()


def milliseconds(run: Run, device: str, runs: int = 12) -> float:
    """Return the median milliseconds of a run, by the device's own clock where it has one; three runs warm up."""
    if device == "cpu":
        return _of_cpu(run)
    for _ in range(3):
        run()
    found = []
    for _ in range(runs):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended))
    return round(statistics.median(found), 4)


def _of_cpu(run: Run) -> float:
    """Return the milliseconds of one run."""
    start = time.perf_counter()
    run()
    return round((time.perf_counter() - start) * 1e3, 4)


def wall_milliseconds(run: Run, device: str, runs: int = 12) -> float:
    """Return the median milliseconds from the call to the end of its work; four runs warm up."""
    if device == "cpu":
        return _of_cpu(run)
    found = []
    for _ in range(4 + runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(found[4:]), 4)


def peak_mib(run: Run, device: str) -> int | None:
    """Return the most memory of one run above what is allocated before it; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return int((torch.cuda.max_memory_allocated() - before) >> 20)
