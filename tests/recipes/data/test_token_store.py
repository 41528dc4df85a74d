"""Tokenised pairs in a memory-mapped file: the same batches as from memory, made once, and found again."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data import token_store
from recipes.translation.data.batches import Steps
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import drawn
from recipes.translation.data.token_store import StoredIds
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import load_training
from recipes.translation.text.pair import Pair
from recipes.translation.train import train
from tests.recipes.tiny import tiny

CHANGES: dict[str, Any] = {"data.builtin_pairs": 100, "training.steps": 6, "training.batch_tokens": 300}


@pytest.fixture(autouse=True)
def small_record_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "ROWS", 32)


def stored(folder: Path, **changes: Any) -> Any:
    return tiny(folder / "run", {**CHANGES, "data.cache": str(folder / "cache"), **changes})


def stores(folder: Path) -> list[Path]:
    return sorted((folder / "cache").iterdir())


def test_stored_pairs_give_the_batches_that_pairs_in_memory_give(tmp_path: Path) -> None:
    corpora = {"a": {"weight": 2}, "b": {"source": "de", "target": "en", "tag": "<bt>"}}
    changes = {"corpora": corpora, "data.language_tags": True, "noise.swap": 0.1, "training.max_length": 25}
    memory = load_corpus(tiny(tmp_path / "run", {**CHANGES, **changes})).train
    mapped = load_corpus(stored(tmp_path, **changes)).train
    assert isinstance(mapped.plain.sources, StoredIds)
    assert list(mapped.plain.sources) == memory.plain.sources
    assert list(mapped.plain.targets) == memory.plain.targets
    assert mapped.dropped == memory.dropped > 0
    for epoch in (0, 3):
        assert mapped.epoch(epoch) == memory.epoch(epoch)
    for indices in mapped.epoch(1):
        for found, expected in zip(mapped.batch(indices), memory.batch(indices), strict=True):
            assert torch.equal(found, expected)


def test_training_from_a_store_is_training_from_memory_bit_for_bit(tmp_path: Path) -> None:
    train(stored(tmp_path))
    train(tiny(tmp_path / "memory", CHANGES))
    found, expected = (load_training(tmp_path / name / "last").weights for name in ("run", "memory"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_from_a_store_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    train(stored(tmp_path, **{"training.steps": 3}))
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    moved = {"data.cache": str(tmp_path / "moved")}
    train(stored(tmp_path, **moved))
    train(tiny(tmp_path / "memory", CHANGES))
    found, expected = (load_training(tmp_path / name / "last") for name in ("run", "memory"))
    assert 0 < found.state.batch < len(load_corpus(stored(tmp_path)).train)
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)


def test_pairs_are_tokenised_once_and_again_when_anything_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_corpus(stored(tmp_path))
    assert "tokenised pairs written" in capsys.readouterr().out
    (first,) = stores(tmp_path)
    # Runs of other users may share it, as far as the umask says
    (tmp_path / "ordinary").mkdir()
    assert first.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    with monkeypatch.context() as patch:
        patch.setattr(Corpora, "each_corpus", None)
        load_corpus(stored(tmp_path, **{"training.seed": 5, "training.batch_tokens": 500, "noise.case": 0.5}))
    assert "reused" in capsys.readouterr().out
    changes: list[dict[str, Any]] = [
        {"data.builtin_pairs": 101},
        {"cleaning.duplicates": True},
        {"data.language_tags": True},
        {"subwords.vocab_size": 350},
        {"subwords.lowercase": True},
    ]
    for number, change in enumerate(changes, start=2):
        load_corpus(stored(tmp_path, **change))
        assert len(stores(tmp_path)) == number, change
    assert first in stores(tmp_path)


def test_what_changes_in_a_file_is_tokenised_again(tmp_path: Path) -> None:
    files = {
        "data.path": str(tmp_path),
        "data.train": ["a.en", "a.de"],
        "data.valid": ["a.en", "a.de"],
        "subwords.vocab_size": 282,
        "subwords.train_pairs": 20,
    }
    sampled = {int(pair.source) for pair in drawn((Pair(str(n), "") for n in range(60)), 20)}
    place = next(n for n in range(60) if n not in sampled)
    models = set()
    for other in ("other", "another"):
        lines = [f"sentence number {n}" for n in range(60)]
        lines[place] = other
        for name in ("a.en", "a.de"):
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        corpus = load_corpus(stored(tmp_path, **files))
        assert corpus.source.decode([corpus.train.sources[place]]) == [other]
        models.add(corpus.source.digest)
    assert len(models) == 1  # the subwords are made from other lines: only the file itself tells
    assert len(stores(tmp_path)) == 2


def test_datasets_opens_the_file_of_a_store(tmp_path: Path) -> None:
    corpus = load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path)
    rows = datasets.Dataset.from_file(str(folder / token_store.PAIRS.format(0)))
    assert list(rows["source"]) == list(corpus.train.sources)
    assert list(rows["target"]) == list(corpus.train.targets)


@pytest.mark.parametrize("damage", ["a byte", "a file", "one more", "the digests", "no digests"])
def test_a_damaged_store_is_refused_with_the_way_out(damage: str, tmp_path: Path) -> None:
    load_corpus(stored(tmp_path, corpora={"a": {}, "b": {"source": "de", "target": "en"}}))
    (folder,) = stores(tmp_path)
    path = folder / token_store.PAIRS.format(1)
    if damage == "a byte":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "a file":
        path.unlink()
    elif damage == "one more":
        shutil.copy(path, folder / token_store.PAIRS.format(2))
    elif damage == "no digests":
        (folder / token_store.DIGESTS).unlink()
    else:
        (folder / token_store.DIGESTS).write_text("[" * 100_000)
    with pytest.raises(
        DataError, match=rf"^{re.escape(str(folder))} is damaged \(.*\): remove it, and it is made again$"
    ):
        load_corpus(stored(tmp_path, corpora={"a": {}, "b": {"source": "de", "target": "en"}}))


def test_a_store_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stored(tmp_path)
    load_corpus(config)
    shutil.rmtree(tmp_path / "cache")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_store, "sha256", full)
    with pytest.raises(OSError, match="No space left"):
        load_corpus(config)
    assert stores(tmp_path) == []


def test_two_writers_of_the_same_store_leave_one(tmp_path: Path) -> None:
    corpus = load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    token_store.write_store(folder, [[("other", Pair("other", "text"))]], corpus.source, corpus.target, 1)
    assert stores(tmp_path) == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.faults
def test_a_store_takes_the_place_of_one_that_was_killed_while_it_was_written(tmp_path: Path) -> None:
    load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path)
    shutil.rmtree(folder)
    killed = (
        "import os; from pathlib import Path; from recipes.translation.data import token_store; "
        "from tests.recipes.data.test_token_store import load_corpus, stored; "
        f"token_store.sha256 = lambda _: os.kill(os.getpid(), 9); load_corpus(stored(Path({str(tmp_path)!r})))"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -signal.SIGKILL
    assert list((tmp_path / "cache").iterdir())
    load_corpus(stored(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_runs_that_need_a_store_at_once_tokenise_once(tmp_path: Path) -> None:
    corpus = load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path)
    shutil.rmtree(folder)
    began: list[int] = []

    def slow() -> Iterator[tuple[str, Pair]]:
        began.append(1)
        time.sleep(0.5)
        yield "a", Pair("a", "b")

    with ThreadPoolExecutor() as pool:
        subwords = (corpus.source, corpus.target)
        for done in [pool.submit(token_store.write_store, folder, [slow()], *subwords, 1) for _ in range(3)]:
            done.result()
    assert began == [1]
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_switching_the_cache_on_or_off_in_a_run_is_refused(tmp_path: Path) -> None:
    train(stored(tmp_path, **{"training.steps": 1}))
    with pytest.raises(ConfigError, match=r"data is not what .* was trained on"):
        train(tiny(tmp_path / "run", CHANGES))


@given(
    st.lists(st.lists(st.integers(0, 65_535), max_size=4), min_size=1, max_size=70)
    | st.integers(33, 99).map(lambda n: [[each] for each in range(n)]),
    st.sampled_from([[32], [1, 50, 3], [7, 0, 2]]),
    st.data(),
)
def test_stored_ids_are_the_sequence_that_was_written(
    rows: list[list[int]], sizes: list[int], data: st.DataObject
) -> None:
    chunks = []
    start = 0
    for size in cycle(sizes):  # a corpus ends with a smaller part, or has none
        if start >= len(rows):
            break
        part = rows[start : start + size]
        start += size
        chunks.append(pyarrow.array(part, pyarrow.list_(pyarrow.uint16())))
    found = StoredIds(pyarrow.chunked_array(chunks))
    assert list(found) == rows
    assert found.lengths.tolist() == list(map(len, rows))
    index = data.draw(st.integers(-len(rows), len(rows) - 1))
    assert found[index] == rows[index]
    assert found[index:] == rows[index:]
    for outside in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            found[outside]


@given(st.integers(1, 30), st.integers(0, 12))
def test_as_many_pairs_are_drawn_for_the_subwords_as_there_are_or_as_were_asked_for(pairs: int, count: int) -> None:
    given = [Pair(str(n), "") for n in range(pairs)]
    found = drawn(iter(given), count)
    assert len(set(found)) == len(found) == (min(pairs, count) if count else pairs)
    assert set(found) <= set(given)
    assert found == drawn(iter(given), count)


def test_every_pair_is_drawn_for_the_subwords_with_the_same_probability() -> None:
    found = drawn((Pair(str(n), "") for n in range(20_000)), 2_000)
    thirds = [sum(int(pair.source) * 10 // 20_000 == part for pair in found) for part in range(10)]
    assert all(abs(count - 200) < 60 for count in thirds)


def test_steps_from_a_store_are_resumed_anywhere(tmp_path: Path) -> None:
    def steps(epoch: int, done: int, count: int) -> list[object]:
        after = Steps(load_corpus(stored(tmp_path)).train, 2, 0, 1, torch.device("cpu")).after(epoch, done)
        found = (next(after) for _ in range(count))
        return [(position, [batch.src.tolist() for batch in made]) for position, made in found]

    whole = steps(0, 0, 12)
    epoch, done = whole[6][0]  # type: ignore[index]
    assert steps(epoch, done, 5) == whole[7:]
