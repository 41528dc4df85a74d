"""The data of a run: what is trained on is cut by the settings, what it is held against is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.sentence_pairs import DataError
from tests.recipes.tiny import tiny


def test_training_pairs_above_max_length_are_left_out_and_validation_keeps_every_pair(tmp_path: Path) -> None:
    whole = load_corpus(tiny(tmp_path / "run"))
    corpus = load_corpus(tiny(tmp_path / "run", {"training.max_length": 20}))
    sides = zip(corpus.train.sources, corpus.train.targets, strict=True)
    short = [index for index, (source, target) in enumerate(sides) if max(len(source), len(target)) <= 20]
    assert 0 < len(short) < len(corpus.train.sources)
    assert sorted(index for batch in corpus.train.epoch(0) for index in batch) == short
    assert corpus.train.dropped == len(corpus.train.sources) - len(short)
    assert whole.train.dropped == corpus.valid[0].batches.dropped == 0
    assert max(map(len, corpus.valid[0].batches.sources)) > 20
    assert len(corpus.valid[0].batches.sources) == len(corpus.valid[0].pairs) == 1_000


def test_a_max_length_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train pair is within training\.max_length 1"):
        load_corpus(tiny(tmp_path / "run", {"training.max_length": 1}))


@pytest.mark.parametrize("lowercase", [False, True])
def test_both_splits_are_lower_cased_or_neither(lowercase: bool, tmp_path: Path) -> None:
    corpus = load_corpus(tiny(tmp_path / "run", {"subwords.lowercase": lowercase}))
    for batches, side in ((corpus.train, corpus.source), (corpus.valid[0].batches, corpus.source)):
        texts = side.decode([list(ids) for ids in batches.sources[:50]])
        assert any(text != text.lower() for text in texts) != lowercase
    assert any(text != text.lower() for pair in corpus.valid[0].pairs for text in pair) != lowercase
