"""The memory of the process that trains, and what its records say of the machine."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

from recipes.translation.train import train
from recipes.translation.training import machine
from recipes.translation.training.machine import return_free_memory
from tests.recipes.tiny import tiny

BYTES = 64 * 1024
"""Of a tensor: small enough for the heap, which keeps what was freed."""


def resident_set() -> int:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def test_the_versions_are_those_that_are_imported() -> None:
    found = machine.software()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__  # with the build
    assert list(found) == ["python", *machine.PACKAGES]


def test_freed_memory_between_tensors_that_live_on_is_returned() -> None:
    tensors = [torch.zeros(BYTES // 4) for _ in range(3_000)]
    kept = tensors[::100]
    del tensors
    before = resident_set()
    return_free_memory()
    assert before - resident_set() > 2_000 * BYTES
    assert len(kept) == 30


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    return_free_memory()


def test_training_returns_memory_after_each_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("recipes.translation.train.return_free_memory", lambda: calls.append(1))
    train(tiny(tmp_path / "run", {"data.builtin_pairs": 60, "training.steps": 5, "training.validate_every": 2}))
    assert len(calls) == 3
