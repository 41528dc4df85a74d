"""Sampled subwords of several corpora with tags and symbols."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data import training_text
from recipes.translation.data.batches import Steps, batches_of_rank
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpus import Corpus, load_corpus
from recipes.translation.settings.config import SubwordConfig
from recipes.translation.text.subwords import BLANK, EOS, PAD, Subwords, train_subwords
from tests.recipes.tiny import tiny

SAMPLING = {"subwords.sampling": 0.2}
MIXED: dict[str, Any] = {
    "corpora": {"a": {"weight": 3}, "b": {"source": "de", "target": "en", "tag": "<bt>"}},
    "data.language_tags": True,
    "data.builtin_pairs": 60,
    "subwords.symbols": ["dogs"],
    "training.batch_tokens": 300,
    "training.max_length": 45,
}


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_text, "SLICE", 24)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that the subwords are made once."""
    return tmp_path_factory.mktemp("drawn")


def loaded(folder: Path, **changes: Any) -> Corpus:
    return load_corpus(tiny(folder / "run", {**MIXED, **changes}))


def drawn(corpus: Corpus, epoch: int) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """The source texts of an epoch, and the ids of both sides, by pair."""
    batches = corpus.train
    everything = range(len(batches.plain.sources))
    sources, targets = batches.draw(epoch, everything)
    return corpus.source.decode([list(ids) for ids in sources]), list(map(list, sources)), list(map(list, targets))


def test_sampling_draws_the_subwords_of_both_sides_anew_and_leaves_the_text(folder: Path) -> None:
    sampling = loaded(folder, **SAMPLING, **{"training.max_length": 500})  # a longer draw would be replaced
    plain = sampling.train.plain
    clean = sampling.source.decode([list(ids) for ids in plain.sources])
    found = [drawn(sampling, epoch) for epoch in (0, 2)]
    for texts, sources, targets in found:
        assert texts == clean
        assert sources != list(map(list, plain.sources))
        assert targets != list(map(list, plain.targets))
    assert found[0][1:] != found[1][1:]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_tags_are_single_subwords_in_every_draw(folder: Path, kind: str) -> None:
    corpus = loaded(folder / kind, **SAMPLING, **{"subwords.kind": kind})
    pieces = corpus.source.pieces()
    tags = {pieces.index(BLANK + "<2de>"), pieces.index(BLANK + "<2en>")}
    for epoch in range(3):
        _, sources, _ = drawn(corpus, epoch)
        for ids, without in zip(sources, corpus.train.plain.sources, strict=True):
            assert ids[0] == without[0]
            assert ids[0] in tags


@given(st.data())
def test_sampling_splits_no_symbol_whatever_the_alphabet_has(models: dict[str, Subwords], data: st.DataObject) -> None:
    """A unigram model that knows every letter of a symbol would spell it in some draws."""
    subwords = models[data.draw(st.sampled_from(["unigram", "bpe"]))]
    words = st.sampled_from(["<2de>", "<u1>", "see<u1>,", "<u1><u1>", "u", "1", "<", "two", "ü", "<2de", "dogs"])
    text = " ".join(data.draw(st.lists(words, min_size=1, max_size=8)))
    (plain,) = subwords.encode([text])
    symbols = [subwords.pieces().index(piece) for piece in (BLANK + "<2de>", "<u1>")]
    for amount in (0.05, 0.9):
        (found,) = subwords.sample([plain], [data.draw(st.integers(0, 99))], amount)
        assert subwords.decode([found]) == subwords.decode([plain])
        assert [each for each in found if each in symbols] == [each for each in plain if each in symbols]


SENTENCES = [pair.source for pair in pairs(60, 1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subwords]:
    folder = tmp_path_factory.mktemp("symbols")
    text = [*SENTENCES, *["< u 1 > 2 d e ü <1> <u <2 de> u1"] * 9]
    for kind in ("bpe", "unigram"):
        train_subwords(text, folder / kind, SubwordConfig(vocab_size=340, kind=kind, symbols=("<u1>",)), ["<2de>"])
    return {kind: Subwords.load(folder / f"{kind}.model") for kind in ("bpe", "unigram")}


def test_an_epoch_has_the_pairs_of_the_mixture_within_the_budget(folder: Path) -> None:
    batches = loaded(folder, **SAMPLING).train
    count = len(batches.plain.sources)
    assert batches.plain.dropped > 0
    for epoch in range(2):
        made = batches.epoch(epoch)
        found = sorted(index - epoch * count for indices in made for index in indices)
        assert found == sorted(batches.plain.pairs(epoch).tolist())
        assert len(set(found)) < len(found)  # corpus a has the larger share
        for indices in made:
            batch = batches.batch(indices)
            assert len(indices) == 1 or max(batch.src.numel(), batch.tgt_out.numel()) <= 300
            assert max(batch.src.size(1), batch.tgt_out.size(1)) <= 46


def steps(corpus: Corpus, epoch: int, done: int, count: int, rank: int = 0, ranks: int = 1) -> list[Any]:
    after = Steps(corpus.train, 3, rank, ranks, torch.device("cpu")).after(epoch, done)
    found = (next(after) for _ in range(count))
    return [(position, [[side.tolist() for side in batch] for batch in made]) for position, made in found]


def test_a_run_with_sampling_and_mixture_resumes_in_the_middle_of_an_epoch(folder: Path) -> None:
    corpus = loaded(folder, **SAMPLING)
    whole = steps(corpus, 0, 0, 2 * len(corpus.train.epoch(0)) // 3)
    at = len(whole) // 2 + 1
    epoch, done = whole[at][0]
    assert epoch == 1
    assert 0 < done < len(corpus.train.epoch(1))
    assert steps(loaded(folder, **SAMPLING), epoch, done, len(whole) - at - 1) == whole[at + 1 :]


def test_every_rank_has_the_same_batches_and_their_parts_are_the_whole(folder: Path) -> None:
    one, other = loaded(folder, **SAMPLING), loaded(folder, **SAMPLING)
    assert one.fingerprint == other.fingerprint
    assert list(one.train.epoch(1)) == list(other.train.epoch(1))
    step = one.train.epoch(1)[:3]
    parts = [batches_of_rank(step, rank, 2) for rank in range(2)]
    assert sorted(index for part in parts for indices in part for index in indices) == sorted(chain(*step))
    worker = pickle.loads(pickle.dumps(other.train))
    for part, batches in zip(parts, (one.train, worker), strict=True):
        for indices in part:
            batch = batches.batch(indices)
            sources, targets = one.train.draw(1, [index % 120 for index in indices])
            assert [row[row != PAD].tolist() for row in batch.src] == [[*ids, EOS] for ids in sources]
            assert [row[row != PAD].tolist() for row in batch.tgt_out] == [[*ids, EOS] for ids in targets]


def test_an_error_of_the_thread_that_draws_the_next_epoch_is_raised_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = loaded(folder, **SAMPLING).train
    batches.count(0)

    def full(*_: object) -> None:
        raise MemoryError("no room for the draws")

    monkeypatch.setattr(batches, "draw", full)
    batches.epoch(0)
    with pytest.raises(MemoryError, match="no room for the draws"):
        batches.epoch(1)


def test_the_fingerprint_tells_sampling_from_none(folder: Path) -> None:
    assert loaded(folder, **SAMPLING).fingerprint != loaded(folder).fingerprint
