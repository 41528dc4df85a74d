"""The file of measurements: what was measured on what, and the figures, part by part.

{"date", "device", "hardware", "threads", "versions", "commands": [...],
 "torch op options": {dtype: {"best": {...}, "tried": [...]}},
 "checks": {"<dtype> smoothing=<s>": {name: {"errors": {...}, "wrong": [...]}}},
 "parts": {part: {problem: {...}}}}
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.peers import versions

Results = dict[str, Any]
FOLDER = Path("docs/results")


def default_path(device: str) -> Path:
    """Today's file."""
    return FOLDER / f"{stem(device)}-{date.today()}.json"


def newest_path(device: str) -> Path:
    """The file of the latest date."""
    found = sorted(FOLDER.glob(f"{stem(device)}-20*.json"))
    if not found:
        raise SystemExit(f"no {stem(device)}-*.json in {FOLDER}; measure first")
    return found[-1]


def stem(device: str) -> str:
    """What the files about that device are called."""
    return "loss" if device == "cpu" else f"loss-{torch.device(device).type}"


def load(path: Path, device: str, command: str) -> Results:
    """The file's measurements so far, with this command noted."""
    if path.exists():
        results: Results = json.loads(path.read_text())
        here = {"hardware": hardware(device), "threads": torch.get_num_threads(), "versions": versions(device)}
        for name, value in here.items():
            if results[name] != value:
                raise SystemExit(f"{path} was measured with {name} {results[name]}; here it is {value}: use --out")
    else:
        results = {
            "date": str(date.today()),
            "device": device,
            "hardware": hardware(device),
            "threads": torch.get_num_threads(),
            "versions": versions(device),
            "commands": [],
            "torch op options": {},
            "checks": {},
            "parts": {},
        }
    if command not in results["commands"]:
        results["commands"].append(command)
    return results


def save(results: Results, path: Path) -> None:
    """All of it, in one step: a run that is stopped leaves the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def hardware(device: str) -> str:
    """What the figures are taken on."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def floor_seconds(entry: dict[str, Any]) -> float:
    """The three products in the faster of their two ways."""
    return min(statistics.median(times) for times in entry["floor seconds"].values())


def fastest_to_floor(entry: dict[str, Any], name: str) -> float | None:
    """The fastest run of that implementation over the fastest of the products: what a shared machine disturbs least."""
    times = entry["seconds"].get(name)
    floor = min(time for times in entry["floor seconds"].values() for time in times)
    return min(times) / floor if times else None


def median(entry: dict[str, Any], name: str) -> float | None:
    """Seconds of that implementation, or None where it was not run."""
    times = entry["seconds"].get(name)
    return statistics.median(times) if times else None
