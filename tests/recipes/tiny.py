"""A run small enough for tests: seconds, not minutes, through the same code as a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.settings.config import RunConfig, load_config

SETTINGS: dict[str, Any] = {
    "data.builtin_pairs": 250,
    "subwords.vocab_size": 360,
    "model.d_model": 16,
    "model.d_ff": 16,
    "model.heads": 2,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "training.devices": "[cpu]",
    "training.batch_tokens": 900,
    "training.steps": 4,
    "training.validate_every": 100,
    "training.validate_bleu": 0,
    "training.warmup": 2,
    "training.report": False,
    "decoding.beam": 1,
    "decoding.max_length": 8,
}

LEARNS: dict[str, Any] = {
    "training.steps": 60,
    "training.seed": 7,
    "training.learning_rate": 0.01,
    "model.d_model": 32,
    "decoding.max_length": 30,
}
"""Changes with which a run learns enough for sentences to differ in their translations."""

OF_FILES: dict[str, Any] = {
    "data.format": "text",
    "data.train": "[train.en, train.de]",
    "data.valid": "[valid.en, valid.de]",
    "subwords.vocab_size": 320,
}
"""Changes with which a run is trained on files in `data.path`."""


def write_pairs(folder: Path, parts: dict[str, tuple[int, int]]) -> None:
    """Write `<name>.en` and `<name>.de` with pairs of the built-in corpus from one number up to another, by name."""
    folder.mkdir(exist_ok=True)
    every = pairs(max(end for _, end in parts.values()), 3)
    for name, (start, end) in parts.items():
        for language, side in (("en", "source"), ("de", "target")):
            lines = [f"{getattr(pair, side)}\n" for pair in every[start:end]]
            (folder / f"{name}.{language}").write_text("".join(lines))


def tiny(run: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """A tiny run in the folder `run`, with `changes` by dotted name."""
    return load_config(None, {**SETTINGS, "run": str(run), **(changes or {})})


def options(run: Path, changes: dict[str, Any] | None = None) -> list[str]:
    """The same as command-line options."""
    settings = {**SETTINGS, "run": str(run), **(changes or {})}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def tiny_decoder_only(run: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """A tiny run of a language model that translates by prompt."""
    settings = {name: value for name, value in SETTINGS.items() if name != "model.encoder_layers"}
    return load_config(None, {**settings, "model.preset": "decoder_only", "run": str(run), **(changes or {})})
