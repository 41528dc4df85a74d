"""Layouts of several processes, and runs whose weights are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import RunConfig
from recipes.translation.train import train
from seqpar.testing.ranks import ranks
from tests.recipes.saved import saved_file
from tests.recipes.tiny import tiny

EXACT: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "training.precision": "float64",
    "training.devices": "auto",
    "training.batch_tokens": 300,
    "training.steps": 12,  # across the end of an epoch
    "training.accumulate": 2,
    "training.chunk_tokens": 50,
    "training.validate_bleu": 20,
    "model.dropout": 0,
    "model.tie": "all",
}


def trained(rank: int, world: int, config: RunConfig) -> int:
    """Train in one of several processes; the number of steps made."""
    return train(config).state.step


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "data 3": (3, {}),
    "shard 2": (2, {"layout.shard": 2}),
    "data 2 x shard 2": (4, {"layout.shard": 2}),
    "vocab 2": (2, {"layout.vocab": 2}),
    "data 2 x vocab 2": (4, {"layout.vocab": 2}),
    "shard 2 x vocab 2": (4, {"layout.shard": 2, "layout.vocab": 2}),
}


def train_in(layout: str, run: Path, settings: dict[str, Any]) -> None:
    """Train in one of LAYOUTS, or in "one" process."""
    world, changes = LAYOUTS.get(layout, (1, {}))
    config = tiny(run, {**settings, **changes})
    if world == 1:
        train(config)
    else:
        ranks(world, trained, config)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights and moments of a run."""
    return load_file(saved_file(run, "last", "model.safetensors")) | load_file(
        saved_file(run, "last", "training.safetensors")
    )


def assert_same_weights(run: Path, other: Path, tolerance: float) -> None:
    """Each tensor within `tolerance` of its largest number.

    A key's bias moves all scores of a query alike, so its true gradient is zero. What rounding leaves, Adam divides
    by its own size: those numbers (a half of `key_value.bias`) are held against the weights' size instead.
    """
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        theirs, ours = tensor, found[name]
        assert ours.dtype == theirs.dtype, name
        if name.endswith(("key_value.bias", "key_value.bias/exp_avg", "key_value.bias/exp_avg_sq")):
            (key, ours), (true_key, theirs) = ours.chunk(2), theirs.chunk(2)
            assert float((key - true_key).abs().max()) <= tolerance, name
        apart, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
        assert apart <= tolerance * size, f"{name} is off by {apart:.3g} where it is {size:.3g} large"


def records(run: Path, kind: str) -> list[float]:
    """What `metrics.jsonl` has of one kind."""
    return [record[kind] for record in read_metrics(run / "metrics.jsonl") if kind in record]
