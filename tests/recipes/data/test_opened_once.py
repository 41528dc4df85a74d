"""Each file of training and validation data is opened once in a process, and known by the bytes that were read."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.errors import DataError
from recipes.translation.train import train
from tests.recipes.files.watching import opened_files
from tests.recipes.tiny import tiny

FORMATS = ["text", "tsv", "jsonl", "tmx"]


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
    elif format == "tmx":
        variants = "<tu><tuv xml:lang='en-GB'><seg>{}</seg></tuv><tuv lang='DE'><seg>{}</seg></tuv></tu>"
        units = "".join(variants.format(*pair) for pair in some)
        (folder / names[0]).write_text(f'<tmx version="1.4"><header/><body>{units}</body></tmx>')
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
def test_a_training_reads_its_data_once_and_is_then_sure_of_the_hash_alone(format: str, tmp_path: Path) -> None:
    settings = made(tmp_path / "data", format)
    training = set(settings["corpora"]["a"]["train"])
    for steps, times in ((1, 2), (2, 1)):  # the second resumes, and finds subwords and ids
        config = tiny(tmp_path / "run", {**settings, "training.steps": steps})
        with opened_files() as files:
            train(config)
        expected = {path.name: times if path.name in training else 1 for path in (tmp_path / "data").iterdir()}
        assert counts(files, tmp_path / "data") == expected


@pytest.mark.parametrize("format", FORMATS)
def test_a_text_is_identified_by_the_contents_of_its_files(format: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", made(tmp_path / "data", format))
    (corpus,) = Corpora(config).training
    digest = hashlib.sha256()
    for name in corpus.data.train:
        content = (tmp_path / "data" / name).read_bytes()
        digest.update(f"{len(content)} bytes:".encode() + hashlib.sha256(content).digest())
    settings = {name: getattr(corpus.data, name) for name in ("format", "source", "target", "builtin_pairs")}
    assert Corpora(config).identity == {"a": {**settings, "text": digest.hexdigest()}}


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changes_after_its_hash_is_refused(format: str, tmp_path: Path) -> None:
    settings = made(tmp_path / "data", format)
    corpora = Corpora(tiny(tmp_path / "run", settings))
    assert corpora.identity
    (name, *_) = settings["corpora"]["a"]["train"]
    path = tmp_path / "data" / name
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match=f"{name} has changed since this run started reading it: start again"):
        corpora.text
    assert not list((tmp_path / "run" / "data").iterdir())


def test_the_corpora_of_a_training_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path / "run", made(tmp_path / "data", "text"))
    resolved: list[object] = []
    resolve = Corpora._training

    def noted(given: Corpora) -> Any:
        resolved.append(given.config)
        return resolve(given)

    monkeypatch.setattr(Corpora, "_training", noted)
    train(config)
    assert resolved == [config]
