"""Text and ids of the training pairs in mapped files: made once, found again, and checked before they are used."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.commands.training import prepare
from recipes.translation.data import token_store, training_text
from recipes.translation.data.batches import Steps
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.prepare import draw_indices
from recipes.translation.data.token_store import IDS, TEXT_ITEMS, Kind, flat_ids, map_files
from recipes.translation.data.training_text import write_text
from recipes.translation.errors import DataError
from recipes.translation.run_folder.checkpoint import load_training
from recipes.translation.text.model_text import ModelText
from recipes.translation.text.pair import Pair
from recipes.translation.train import train
from tests.recipes.processes.started import forked
from tests.recipes.tiny import options, tiny

CHANGES: dict[str, Any] = {"data.builtin_pairs": 100, "training.steps": 6, "training.batch_tokens": 300}
TWO: dict[str, Any] = {"a": {"weight": 2}, "b": {"source": "de", "target": "en", "tag": "<bt>"}}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_text, "SLICE", 24)
    monkeypatch.setattr(token_store, "PART", 40)


def stored(folder: Path, **changes: Any) -> Any:
    return tiny(folder / "run", {**CHANGES, "data.cache": str(folder / "cache"), **changes})


def stores(folder: Path, what: str) -> list[Path]:
    return sorted((folder / "cache").glob(f"{what}-*"))


def test_the_ids_are_those_of_every_pair_under_the_tags_of_its_corpus(tmp_path: Path) -> None:
    config = stored(tmp_path, corpora=TWO, **{"data.language_tags": True})
    corpus = load_corpus(config)
    forward = pairs(100, 1)
    sources = [ModelText.of(config).source(pair.source) for pair in forward] + [
        f"<2en> <bt> {pair.target}" for pair in forward
    ]
    targets = [pair.target for pair in forward] + [pair.source for pair in forward]
    assert list(corpus.train.sources) == corpus.source.encode(sources)
    assert list(corpus.train.targets) == corpus.target.encode(targets)
    text = Corpora(config).text
    assert list(zip(text.sources, text.targets, strict=True))[:100] == forward


def test_text_and_ids_are_in_the_folder_of_the_run_unless_data_cache_names_another(tmp_path: Path) -> None:
    load_corpus(tiny(tmp_path / "run", CHANGES))
    own = sorted(path.name for path in (tmp_path / "run" / "data").iterdir())
    load_corpus(stored(tmp_path))
    assert own == sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.partition("-")[0] for name in own] == ["ids", "text"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_resumes_in_the_middle_of_an_epoch_also_where_its_store_is_elsewhere(moved: bool, tmp_path: Path) -> None:
    train(stored(tmp_path, **{"training.steps": 3}))
    train(stored(tmp_path, **({"data.cache": str(tmp_path / "moved")} if moved else {})))
    train(tiny(tmp_path / "whole", CHANGES))
    found, expected = (load_training(tmp_path / name / "last") for name in ("run", "whole"))
    assert 0 < found.state.batch < len(load_corpus(stored(tmp_path)).train)
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)


def test_pairs_are_read_and_divided_once_and_again_when_anything_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_corpus(stored(tmp_path))
    said = capsys.readouterr().out
    assert "training text written" in said
    assert re.search(r"100 training pairs, .* MB of ids in \S+ written", said)
    # Runs of other users may share them, as far as the umask says
    (tmp_path / "ordinary").mkdir()
    first = stores(tmp_path, "ids")
    assert first[0].stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    with monkeypatch.context() as patch:
        patch.setattr(Corpora, "each_corpus", None)
        load_corpus(stored(tmp_path, **{"training.seed": 5, "training.batch_tokens": 500}))
    assert "reused" in capsys.readouterr().out
    for text, (name, value) in (
        (2, ("data.builtin_pairs", 101)),
        (3, ("cleaning.duplicates", True)),
        (3, ("data.language_tags", True)),
        (3, ("subwords.vocab_size", 350)),
        (4, ("subwords.lowercase", True)),
    ):
        before = stores(tmp_path, "ids")
        load_corpus(stored(tmp_path, **{name: value}))
        assert len(stores(tmp_path, "ids")) == len(before) + 1, name
        assert len(stores(tmp_path, "text")) == text, name


def test_prepare_leaves_nothing_to_be_read_or_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stored(tmp_path)
    given = {**CHANGES, "data.cache": config.data.cache, "run": config.run}
    assert prepare(options(tmp_path / "run", given)) == 0
    monkeypatch.setattr(Corpora, "each_corpus", None)
    monkeypatch.setattr("recipes.translation.data.corpus.write_ids", None)
    load_corpus(config)


def test_what_was_noticed_while_the_text_was_read_is_said_at_every_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in ("written", "reused"):
        load_corpus(stored(tmp_path, **{"cleaning.max_words": 8}))
        assert "[data] train: " in capsys.readouterr().err


def test_what_changes_in_a_file_is_read_again(tmp_path: Path) -> None:
    files = {"data.path": str(tmp_path), "data.train": ["a.en", "a.de"], "data.valid": ["a.en", "a.de"]}
    small = {"subwords.vocab_size": 282, "subwords.train_pairs": 20}
    sampled = set(draw_indices(60, 20))
    place = next(n for n in range(60) if n not in sampled)
    models = set()
    for other in ("other", "another"):
        lines = [f"sentence number {n}" for n in range(60)]
        lines[place] = other
        for name in ("a.en", "a.de"):
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        corpus = load_corpus(stored(tmp_path, **files, **small))
        assert corpus.source.decode([corpus.train.sources[place]]) == [other]
        models.add(corpus.source.digest)
    assert len(models) == 1  # the subwords are made from other lines: only the file itself tells
    assert len(stores(tmp_path, "ids")) == 2


def test_numpy_reads_the_files_of_a_store(tmp_path: Path) -> None:
    corpus = load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path, "ids")
    ids = numpy.fromfile(folder / "target.values", "<u2")
    ends = numpy.fromfile(folder / "target.ends", "<u8")
    assert [part.tolist() for part in numpy.split(ids, ends[:-1])] == list(corpus.train.targets)


DAMAGES = ["a byte", "a file", "one more", "the note", "no note", "a link", "a pipe"]


@pytest.mark.parametrize("what", ["text", "ids"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_refused_with_the_way_out(damage: str, what: str, tmp_path: Path) -> None:
    load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path, what)
    path = folder / "source.values"
    content = bytearray(path.read_bytes())
    if damage == "a byte":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "one more":
        shutil.copy(path, folder / "more.values")
    elif damage == "no note":
        (folder / token_store.NOTE).unlink()
    elif damage == "the note":
        (folder / token_store.NOTE).write_text("[" * 100_000)
    else:
        path.unlink()
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a pipe":
        os.mkfifo(path)
    with pytest.raises(
        DataError, match=rf"^{re.escape(str(folder))} is damaged \(.*\): remove it, and it will be made again$"
    ):
        load_corpus(stored(tmp_path))


def resealed(folder: Path) -> None:
    """Compute the digests again, as whoever can write to a shared folder can."""
    note = json.loads((folder / token_store.NOTE).read_text())
    note["files"] = token_store.digests_of(folder)
    (folder / token_store.NOTE).write_text(json.dumps(note))


@pytest.mark.parametrize(
    ("name", "place", "number", "reason"),
    [
        ("source.values", 5, 1_000, "source: a value is 1,000, of 360"),
        ("target.ends", 50, 0, "target: an item ends before it begins"),
        ("target.ends", 40, 3, "target: an item ends before it begins"),
        ("source.ends", 99, 1 << 40, "source: the last item ends at 1,099,511,627,776 of"),
        ("source.ends", None, 1, "source: 101 items for 100 pairs"),
    ],
)
def test_ids_whose_digests_were_computed_again_are_still_ids_of_the_pairs(
    name: str, place: int | None, number: int, reason: str, tmp_path: Path
) -> None:
    load_corpus(stored(tmp_path))
    (folder,) = stores(tmp_path, "ids")
    array = numpy.fromfile(folder / name, "<u2" if name.endswith("values") else "<u8")
    if place is None:
        array = numpy.append(array, array[-1:])
    else:
        array[place] = number
    array.tofile(folder / name)
    resealed(folder)
    with pytest.raises(DataError, match=re.escape(reason)):
        load_corpus(stored(tmp_path))


def test_no_mutation_of_a_store_ends_the_process_or_in_another_error(tmp_path: Path) -> None:
    """Of 100 stores with changed bytes, cut or longer files or another note, each is refused in one line, or used."""
    load_corpus(stored(tmp_path))
    draw = random.Random(1)
    outcomes = []
    for number in range(100):
        what = draw.choice(["text", "ids"])
        (folder,) = stores(tmp_path, what)
        shutil.copytree(folder, tmp_path / "kept")
        path = draw.choice(sorted(folder.iterdir()))
        content = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        length = draw.choice([len(content), draw.randrange(len(content)), len(content) + draw.randint(1, 9)])
        path.write_bytes((content + bytes(9))[:length])
        if path.name != token_store.NOTE:
            resealed(folder)
        try:
            corpus = load_corpus(stored(tmp_path, **{"subwords.sampling": 0.1}))
            for batch in corpus.train.epoch(0):
                corpus.train.batch(batch)
            outcomes.append("used")
        except DataError as error:
            outcomes.append("refused" if "is damaged" in str(error) else f"{number}: {error}")
        shutil.rmtree(folder)
        (tmp_path / "kept").rename(folder)
    assert {"used", "refused"} == set(outcomes)


def test_a_store_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_store, "sha256", full)
    with pytest.raises(OSError, match="No space left"):
        load_corpus(stored(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def killed_in_writing(folder: Path) -> None:
    token_store.sha256 = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    load_corpus(stored(folder))


@pytest.mark.faults
def test_a_store_takes_the_place_of_one_that_was_killed_while_it_was_written(tmp_path: Path) -> None:
    killed = forked(killed_in_writing, tmp_path)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert [path.name[:16] for path in (tmp_path / "cache").iterdir()] == [".unfinished-text"]
    load_corpus(stored(tmp_path))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_runs_that_need_a_store_at_once_write_it_once(tmp_path: Path) -> None:
    began: list[int] = []

    def slow() -> Iterator[Pair]:
        began.append(1)
        time.sleep(0.5)
        yield Pair("a", "b")

    folder = tmp_path / "cache" / "text"
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(write_text, folder, lambda _: [slow()]) for _ in range(3)]:
            done.result()
    assert began == [1]
    assert list((tmp_path / "cache").iterdir()) == [folder]


@given(
    st.lists(st.lists(st.integers(0, 65_535), max_size=4), max_size=70), st.data(), st.sampled_from([IDS, TEXT_ITEMS])
)
def test_a_sequence_in_files_is_the_one_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, items: list[list[int]], data: st.DataObject, kind: Kind
) -> None:
    expected: list[Any] = items
    dtype = "<u2"
    if kind is TEXT_ITEMS:
        expected = ["".join(chr(each % 0xD7FF) for each in item) for item in items]
        dtype = "|u1"
    encoded = [item.encode() for item in expected] if kind is TEXT_ITEMS else items
    folder = tmp_path_factory.mktemp("flat")
    paths = (folder / "values", folder / "ends")
    with paths[0].open("xb") as values, paths[1].open("xb") as ends:
        writer = token_store.FlatWriter(values, ends, dtype)
        start = 0
        while start < len(items):
            part = encoded[start : start + data.draw(st.integers(1, 9))]
            writer.add(numpy.array([each for item in part for each in item], int), list(map(len, part)))
            start += len(part)
    found = map_files(*paths, dtype, kind)
    again = pickle.loads(pickle.dumps(found))
    assert list(found) == list(again) == expected
    assert found.lengths(0, len(items)).tolist() == list(map(len, encoded))
    if kind is IDS:
        assert list(flat_ids(items)) == items
    if items:
        index = data.draw(st.integers(-len(items), len(items) - 1))
        step = data.draw(st.sampled_from([1, 2, -1]))
        assert found[index] == expected[index]
        assert found[index::step] == expected[index::step]
    for outside in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            found[outside]


def test_what_is_mapped_is_sent_to_another_process_by_name(tmp_path: Path) -> None:
    corpus = load_corpus(stored(tmp_path, **{"data.builtin_pairs": 2_000}))
    assert len(pickle.dumps(corpus.train.sources)) < 1_000


@given(st.integers(1, 30), st.integers(0, 40))
def test_as_many_pairs_are_drawn_for_the_subwords_as_there_are_or_as_were_asked_for(pairs: int, count: int) -> None:
    found = draw_indices(pairs, count)
    assert len(set(found)) == len(found) == (min(pairs, count) if count else pairs)
    assert set(found) <= set(range(pairs))
    assert found == draw_indices(pairs, count)


def test_every_pair_is_drawn_for_the_subwords_with_the_same_probability() -> None:
    found = draw_indices(20_000, 2_000)
    tenths = [sum(place * 10 // 20_000 == part for place in found) for part in range(10)]
    assert all(abs(count - 200) < 60 for count in tenths)


def test_steps_are_resumed_anywhere(tmp_path: Path) -> None:
    def steps(epoch: int, done: int, count: int) -> list[object]:
        after = Steps(load_corpus(stored(tmp_path)).train, 2, 0, 1, torch.device("cpu")).after(epoch, done)
        found = (next(after) for _ in range(count))
        return [(position, [batch.src.tolist() for batch in made]) for position, made in found]

    whole = steps(0, 0, 12)
    epoch, done = whole[6][0]
    assert steps(epoch, done, 5) == whole[7:]
