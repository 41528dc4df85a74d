"""Each file of training and validation data is opened once in a process, and known by the bytes that were read."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data import corpora as corpora_module
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import fingerprint
from recipes.translation.train import train
from tests.recipes.files.watching import opened_files
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


def counts(files: list[Path], folder: Path) -> dict[str, int]:
    """How often each of the files in the folder was opened."""
    return dict(Counter(file.name for file in files if file.parent == folder))


@pytest.mark.parametrize("format", FORMATS)
def test_a_training_opens_each_file_of_its_data_once(format: str, tmp_path: Path) -> None:
    settings = made(tmp_path / "data", format)
    everything = {path.name: 1 for path in (tmp_path / "data").iterdir()}
    for steps in (1, 2):  # the second resumes, and its subwords are there
        config = tiny(tmp_path / "run", {**settings, "training.steps": steps})
        with opened_files() as files:
            train(config)
        assert counts(files, tmp_path / "data") == everything


def test_subwords_alone_need_each_file_once_too(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", made(tmp_path / "data", "text"))
    for _ in ("made", "reused"):
        with opened_files() as files:
            prepare(Corpora(config))
        assert counts(files, tmp_path / "data") == {"train.en.gz": 1, "train.de": 1}


def test_text_beyond_memory_is_read_for_its_hash_for_the_subwords_and_for_the_store(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {**made(tmp_path / "data", "text"), "data.cache": str(tmp_path / "cache")})
    for times in (3, 1):  # the second finds subwords and store
        with opened_files() as files:
            load_corpus(config)
        found = counts(files, tmp_path / "data")
        assert found == {"train.en.gz": times, "train.de": times, "valid.en": 1, "valid.de": 1}


@pytest.mark.parametrize("format", FORMATS)
def test_what_identifies_a_text_is_the_same_whether_it_is_read_before_or_not(format: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", made(tmp_path / "data", format))
    read = Corpora(config)
    read.read()
    with opened_files() as files:
        identity = read.identity
    assert counts(files, tmp_path / "data") == {}
    (corpus,) = read.training
    digest = hashlib.sha256()
    for name in corpus.data.train:
        content = (tmp_path / "data" / name).read_bytes()
        digest.update(f"{len(content)} bytes:".encode() + hashlib.sha256(content).digest())
    settings = {name: getattr(corpus.data, name) for name in ("format", "source", "target", "builtin_pairs")}
    assert identity == {"a": {**settings, "text": digest.hexdigest()}}
    assert Corpora(config).identity == identity
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
