"""The training text is resolved once, and known by the bytes of its files."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data import corpora as corpora_module
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.sentence_pairs import fingerprint
from recipes.translation.train import train
from tests.recipes.tiny import tiny

FORMATS = ["text", "tsv", "jsonl"]


def made(folder: Path, format: str) -> dict[str, Any]:
    """Write training files of this format and validation files of text; return the settings that name them."""
    folder.mkdir()
    some = pairs(220, 1)
    (folder / "valid.en").write_text("".join(f"{pair.source}\n" for pair in some[:20]))
    (folder / "valid.de").write_text("".join(f"{pair.target}\n" for pair in some[:20]))
    names = [f"train.{format}"]
    if format == "tsv":
        (folder / names[0]).write_text("en\tde\n" + "".join(f"{pair.source}\t{pair.target}\n" for pair in some))
    elif format == "jsonl":
        lines = [json.dumps({"en": pair.source, "de": pair.target}) for pair in some]
        (folder / names[0]).write_text("\n".join(lines))
    else:
        names = ["train.en.gz", "train.de"]
        (folder / names[0]).write_bytes(gzip.compress("".join(f"{pair.source}\n" for pair in some).encode()))
        (folder / names[1]).write_text("".join(f"{pair.target}\n" for pair in some))
    return {
        "data.path": str(folder),
        "corpora": {"a": {"train": names}, "b": {"valid": ["valid.en", "valid.de"]}},
    }


@pytest.mark.parametrize("format", FORMATS)
def test_what_identifies_a_text_is_the_same_whether_it_is_read_before_or_not(format: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", made(tmp_path / "data", format))
    read = Corpora(config)
    read.text.read()
    identity = read.text.identity()
    (corpus,) = read.training
    digest = hashlib.sha256()
    for name in corpus.data.train:
        content = (tmp_path / "data" / name).read_bytes()
        digest.update(f"{len(content)} bytes:".encode() + hashlib.sha256(content).digest())
    settings = {name: getattr(corpus.data, name) for name in ("format", "source", "target", "builtin_pairs")}
    assert identity == {"a": {**settings, "text": digest.hexdigest()}}
    assert Corpora(config).text.identity() == identity
    assert fingerprint(corpus.data, "train") == digest.hexdigest()


def test_the_corpora_of_a_training_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path / "run", made(tmp_path / "data", "text"))
    resolved: list[object] = []
    resolve = corpora_module.training_corpora

    def noted(given: Any) -> Any:
        resolved.append(given)
        return resolve(given)

    monkeypatch.setattr(corpora_module, "training_corpora", noted)
    train(config)
    assert resolved == [config]
