"""Read and write the file of measurements: what was measured on what, and the figures, part by part.

{"date", "device", "hardware", "threads", "versions", "commands": [...],
 "checks": {dtype and kind: {name: [what is wrong]}},
 "parts": {part: {problem: {...}}}}
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.problems import Problem
from conformance.report import installed_version
from recipes.translation.training.machine import processor

Results = dict[str, Any]
Entry = dict[str, Any]
"""The figures of one problem in one part."""
MIB = 2**20
FOLDER = Path("docs/results")


def default_path(device: str, subject: str) -> Path:
    """Return today's file."""
    return FOLDER / f"{stem(device, subject)}-{date.today()}.json"


def newest_path(device: str, subject: str) -> Path:
    """Return the file of the latest date."""
    name = stem(device, subject)
    found = sorted(FOLDER.glob(f"{name}-20*.json"))
    if not found:
        raise SystemExit(f"no {name}-*.json in {FOLDER}; measure first")
    return found[-1]


def stem(device: str, subject: str) -> str:
    """Return how the names of the files about that device begin."""
    if device == "cpu":
        return subject
    return f"{subject}-{torch.device(device).type}"


def load(path: Path, device: str, command: str, peers: Sequence[str]) -> Results:
    """Return the file's measurements so far, with this command added; `peers` are packages."""
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {name: installed_version(name) for name in ("seqpar", *peers)}
    here = {"hardware": hardware(device), "threads": torch.get_num_threads(), "versions": versions}
    if path.exists():
        results = read(path)
        # Figures of different machines or versions must not be compared within one file
        for name, value in here.items():
            if results[name] != value:
                raise SystemExit(f"{path} was measured with {name} {results[name]}; here it is {value}: use --out")
    else:
        results = {
            "date": str(date.today()),
            "device": device,
            **here,
            "commands": [],
            "checks": {},
            "parts": {},
        }
    if command not in results["commands"]:
        results["commands"].append(command)
    return results


def read(path: Path) -> Results:
    """Return the measurements of a file."""
    results: Results = json.loads(path.read_text())
    return results


def save(results: Results, path: Path) -> None:
    """Write the file in one step, so that a run that is stopped leaves it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)


def hardware(device: str) -> str:
    """Return the name of the processor and its cores, or of the GPU."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {os.cpu_count()} cores"


def entries_of(results: Results, part: str) -> list[Entry]:
    """Return the entries of a part, those that were measured first first."""
    return list(results["parts"].get(part, {}).values())


def problem_of(entry: Entry) -> Problem:
    """Return the problem of an entry."""
    return Problem.read(entry["problem"])


def peak(entry: Entry, name: str) -> int | None:
    """Return the peak bytes of an implementation, or None where there is no figure."""
    found = entry["peak bytes"].get(name)
    return found if isinstance(found, int) else None  # text says what became of the process


def floor_seconds(entry: Entry) -> float:
    """Return the median time of the three products, all rows at once or in chunks, whichever is faster."""
    return min(statistics.median(times) for times in entry["floor seconds"].values())


def fastest_to_floor(entry: Entry, name: str) -> float | None:
    """Return the fastest run of an implementation over that of the products, which a shared machine disturbs least."""
    times = entry["seconds"].get(name)
    floor = min(time for times in entry["floor seconds"].values() for time in times)
    if not times:
        return None
    return min(times) / floor


def median(entry: Entry, name: str) -> float | None:
    """Return the median seconds of an implementation, or None where it was not run."""
    times = entry["seconds"].get(name)
    if not times:
        return None
    return statistics.median(times)
