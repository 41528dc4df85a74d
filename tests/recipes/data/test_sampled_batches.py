"""Sampled subwords: the published distributions, drawn anew in each epoch, alike wherever an epoch is drawn."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.translation.data.batches import Batch, Steps, TokenBatches
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpus import load_corpus
from recipes.translation.data.drawn_batches import Drawing, DrawnBatches
from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import SubwordConfig
from recipes.translation.text.subwords import Subwords, train_subwords
from tests.recipes.tiny import tiny

ROOT = Path(__file__).parents[3]
PAIRS = pairs(300, 1)
SOURCES = [pair.source for pair in PAIRS]
TARGETS = [pair.target for pair in PAIRS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subwords]:
    folder = tmp_path_factory.mktemp("sampled")
    for kind in ("bpe", "unigram"):
        train_subwords([*SOURCES, *TARGETS], folder / kind, SubwordConfig(vocab_size=500, kind=kind))
    return {kind: Subwords.load(folder / f"{kind}.model") for kind in ("bpe", "unigram")}


def batches(subwords: Subwords, amount: float = 0.2, target: float | None = None, **changes: Any) -> DrawnBatches:
    """The pairs in batches of 300 cells, sampled on both sides unless `target` is another amount."""
    settings = {"batch_tokens": 300, "seed": 5, "max_length": 100, **changes}
    return DrawnBatches(
        TokenBatches(subwords.encode(SOURCES), subwords.encode(TARGETS), **settings),
        Drawing(subwords, amount),
        Drawing(subwords, amount if target is None else target),
    )


def assert_distribution(subwords: Subwords, word: str, amount: float, expected: dict[tuple[str, ...], float]) -> None:
    """Segmentations are drawn as often as expected, within five standard deviations."""
    draws = 4_000
    pieces = subwords.pieces()
    found = Counter(
        tuple(pieces[each] for each in ids)
        for ids in subwords.sample(subwords.encode([word] * draws), range(draws), amount)
    )
    assert_as_often(found, expected)


def assert_as_often(found: Counter[tuple[str, ...]], expected: dict[tuple[str, ...], float]) -> None:
    draws = found.total()
    assert sum(expected.values()) == pytest.approx(1)
    assert found.keys() <= expected.keys()
    for segmentation, probability in expected.items():
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(found[segmentation] - draws * probability) <= 5 * deviation + 1e-6, segmentation


def segmentations(text: str, scores: dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Every way of cutting a text into subwords."""
    if not text:
        yield ()
    for end in range(1, len(text) + 1):
        if text[:end] in scores:
            yield from ((text[:end], *rest) for rest in segmentations(text[end:], scores))


def processor_of(subwords: Subwords) -> sentencepiece.SentencePieceProcessor:
    """sentencepiece's own reading of the same model."""
    return sentencepiece.SentencePieceProcessor(model_proto=subwords.model_bytes())


def scores_of(subwords: Subwords) -> dict[str, float]:
    """The score of each subword but the special ones and the bytes."""
    processor = processor_of(subwords)
    return {
        processor.id_to_piece(each): processor.get_score(each)
        for each in range(len(subwords))
        if not processor.is_control(each) and not processor.is_unknown(each) and not processor.is_byte(each)
    }


@pytest.mark.parametrize("exponent", [0.2, 1.0])
def test_a_unigram_model_draws_by_the_power_of_the_probability(models: dict[str, Subwords], exponent: float) -> None:
    """P(x)^a / sum P(x)^a over every segmentation x, counted out (Kudo 2018, section 3.3)."""
    scores = scores_of(models["unigram"])
    weights = {
        each: math.exp(exponent * sum(scores[piece] for piece in each)) for each in segmentations("▁Haus", scores)
    }
    assert len(weights) > 3
    whole = sum(weights.values())
    assert_distribution(models["unigram"], "Haus", exponent, {each: weight / whole for each, weight in weights.items()})


def merged(
    symbols: tuple[tuple[int, int], ...],
    agenda: frozenset[tuple[int, int, int]],
    text: str,
    scores: dict[str, float],
    p: float,
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Each outcome of merging with dropout, and its probability: the best merge is done, or left out for good."""
    if not agenda:
        yield tuple(text[start:end] for start, end in symbols), 1.0
        return
    best = min(agenda, key=lambda each: (-scores[text[each[0] : each[2]]], each[0]))
    start, middle, end = best
    rest = agenda - {best}
    if (start, middle) not in symbols or (middle, end) not in symbols:
        yield from merged(symbols, rest, text, scores, p)
        return
    for outcome, probability in merged(symbols, rest, text, scores, p):
        yield outcome, p * probability
    at = symbols.index((start, middle))
    joined = (*symbols[:at], (start, end), *symbols[at + 2 :])
    new = {(first, start, end) for first, last in joined if last == start}
    new |= {(start, end, last) for first, last in joined if first == end}
    new = {each for each in new if text[each[0] : each[2]] in scores}
    for outcome, probability in merged(joined, rest | new, text, scores, p):
        yield outcome, (1 - p) * probability


def outcomes(subwords: Subwords, text: str, dropout: float) -> dict[tuple[str, ...], float]:
    """The probability of each outcome of merging a text's characters with dropout."""
    scores = scores_of(subwords)
    symbols = tuple((at, at + 1) for at in range(len(text)))
    first = frozenset((at, at + 1, at + 2) for at in range(len(text) - 1) if text[at : at + 2] in scores)
    found: dict[tuple[str, ...], float] = {}
    for outcome, probability in merged(symbols, first, text, scores, dropout):
        found[outcome] = found.get(outcome, 0.0) + probability
    return found


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_a_bpe_model_leaves_out_each_merge_with_the_probability(models: dict[str, Subwords], dropout: float) -> None:
    expected = outcomes(models["bpe"], "▁Haus", dropout)
    assert len(expected) > 3
    assert_distribution(models["bpe"], "Haus", dropout, expected)


def test_sentencepiece_leaves_out_as_many_merges(models: dict[str, Subwords]) -> None:
    """The paper's algorithm 1 draws again after each merge, and leaves out fewer."""
    processor = processor_of(models["bpe"])
    drawn = [
        processor.encode("Haus", out_type=str, enable_sampling=True, alpha=0.3, nbest_size=-1) for _ in range(4_000)
    ]
    assert_as_often(Counter(map(tuple, drawn)), outcomes(models["bpe"], "▁Haus", 0.3))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_draw_is_the_same_text_and_other_subwords(models: dict[str, Subwords], kind: str) -> None:
    sampled = batches(models[kind])
    for which, (texts, drawn) in enumerate(zip((SOURCES, TARGETS), sampled.draw(3, range(300)), strict=True)):
        assert models[kind].decode([list(ids) for ids in drawn]) == texts
        plain = (sampled.plain.sources, sampled.plain.targets)[which]
        assert sum(ids != other for ids, other in zip(drawn, plain, strict=True)) > 200
        later = sampled.draw(4, range(300))[which]
        assert sum(ids != other for ids, other in zip(drawn, later, strict=True)) > 200


@lru_cache
def sampled_once(subwords: Subwords) -> DrawnBatches:
    return batches(subwords)


@given(st.data(), st.lists(st.integers(0, 39), max_size=8), st.integers(0, 3))
def test_a_draw_depends_on_epoch_and_sentence_alone(
    models: dict[str, Subwords], data: st.DataObject, chosen: list[int], epoch: int
) -> None:
    sampled = data.draw(st.sampled_from([sampled_once(subwords) for subwords in models.values()]))
    whole = sampled.draw(epoch, range(40))
    assert sampled.draw(epoch, chosen) == tuple([side[pair] for pair in chosen] for side in whole)


def test_the_sides_have_draws_of_their_own(models: dict[str, Subwords]) -> None:
    """The same sentences on both sides are not cut alike, or a model could copy the cuts."""
    subwords = models["bpe"]
    ids, side = subwords.encode(SOURCES), Drawing(subwords, 0.3)
    source, target = DrawnBatches(TokenBatches(ids, ids, batch_tokens=300, seed=5), side, side).draw(0, range(300))
    assert sum(ids != other for ids, other in zip(source, target, strict=True)) > 200


def test_another_seed_draws_other_subwords(models: dict[str, Subwords]) -> None:
    assert batches(models["bpe"]).draw(0, range(9)) != batches(models["bpe"], seed=6).draw(0, range(9))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_only_the_sides_asked_for_are_sampled(models: dict[str, Subwords], kind: str) -> None:
    sampled = batches(models[kind], target=0.0)
    source, target = sampled.draw(2, range(300))
    assert target == models[kind].encode(TARGETS)
    assert source != models[kind].encode(SOURCES)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_an_epoch_is_the_same_wherever_it_is_drawn(models: dict[str, Subwords], kind: str) -> None:
    """In order with the thread's help, on its own as a resumed run does, and batch by batch in a worker process."""
    through = batches(models[kind])
    worker = pickle.loads(pickle.dumps(through))
    for number in range(3):
        epoch = through.epoch(number)
        resumed = batches(models[kind])
        assert list(resumed.epoch(number)) == list(epoch)
        for indices in epoch[::5]:
            batch = through.batch(indices)
            assert same(resumed.batch(indices), batch)
            assert same(worker.batch(indices), batch)
            # As where several processes divide the sentences of a batch
            assert torch.equal(worker.batch(indices[1::2]).tgt_out[:, :4], batch.tgt_out[1::2, :4])
    earlier = through.epoch(2)[0]
    expected = through.batch(earlier)
    through.epoch(4)
    assert same(through.batch(earlier), expected)


def test_worker_processes_make_the_same_batches_across_the_end_of_an_epoch(models: dict[str, Subwords]) -> None:
    sampled = batches(models["bpe"], batch_tokens=2_000)
    made = Steps(sampled, 3, 0, 1, torch.device("cpu"))
    expected = Steps(batches(models["bpe"], batch_tokens=2_000), 3, 0, 1, torch.device("cpu")).after(0, 0)
    sampled.epoch(0)  # its thread is at work when the workers are forked
    made.workers = 2
    found = made.after(0, 0)
    for _ in range(8):
        (position, ours), (other, theirs) = next(found), next(expected)
        assert tuple(position) == tuple(other)
        assert all(same(one, two) for one, two in zip(ours, theirs, strict=True))
    assert position[0] > 0


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_budget_is_of_the_subwords_that_are_drawn_and_every_pair_comes_once(
    models: dict[str, Subwords], kind: str
) -> None:
    sampled = batches(models[kind])
    plain = len(sampled.plain.epoch(0))
    for number in range(2):
        epoch = sampled.epoch(number)
        assert sorted(index for batch in epoch for index in batch) == [number * 300 + pair for pair in range(300)]
        for indices in epoch:
            batch = sampled.batch(indices)
            assert len(indices) == 1 or max(batch.src.numel(), batch.tgt_out.numel()) <= 300
        assert len(epoch) == sampled.count(number) > plain  # there are more subwords now


def test_a_draw_above_max_length_is_replaced_and_the_pairs_stay_the_same(models: dict[str, Subwords]) -> None:
    subwords = models["unigram"]
    longest = sorted(len(ids) for ids in subwords.encode(SOURCES))[200]
    sampled = batches(subwords, max_length=longest)
    assert 0 < sampled.dropped < 200
    kept = {pair for batch in sampled.plain.epoch(0) for pair in batch}
    replaced = 0
    for number in range(3):
        assert {index % 300 for batch in sampled.epoch(number) for index in batch} == kept
        drawn, _ = sampled.draw(number, range(300))
        long, _ = batches(subwords, max_length=10_000).draw(number, range(300))
        for pair in kept:
            fits = len(long[pair]) <= longest
            assert drawn[pair] == (long[pair] if fits else sampled.plain.sources[pair])
            replaced += not fits
    assert replaced > 10


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_characters_that_no_subword_has_stay_bytes(models: dict[str, Subwords], kind: str) -> None:
    texts = ["漢 Haus 😀", "Das漢Haus", "ⅷ", ""]
    plain = models[kind].encode(texts * 20)
    for ids in models[kind].sample(plain, range(80), 0.3), plain:
        assert models[kind].decode(ids) == models[kind].decode(models[kind].encode(texts * 20))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_another_process_draws_the_same(models: dict[str, Subwords], kind: str, tmp_path: Path) -> None:
    """sentencepiece's own random numbers differ from process to process."""
    models[kind].save(tmp_path / "own.model")
    program = (
        "import sys; from recipes.translation.text.subwords import Subwords; side = Subwords.load(sys.argv[1]); "
        "print(side.sample(side.encode([sys.argv[2]] * 9), range(9), 0.2))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "own.model"), SOURCES[0]]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    plain = models[kind].encode([SOURCES[0]] * 9)
    assert said == f"{models[kind].sample(plain, range(9), 0.2)}\n"


def test_validation_is_never_sampled_and_the_fingerprint_tells_every_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prints = set()
    for name, changes in {
        "plain": {},
        "sampled": {"subwords.sampling": 0.3},
        "more": {"subwords.sampling": 0.4},
        "source": {"subwords.sampling": 0.3, "subwords.sampled": "source"},
        "target": {"subwords.sampling": 0.3, "subwords.sampled": "target"},
        "seed": {"subwords.sampling": 0.3, "training.seed": 2},
    }.items():
        corpus = load_corpus(tiny(tmp_path / "run", {"data.builtin_pairs": 120, **changes}))
        assert isinstance(corpus.train, DrawnBatches) == (name != "plain")
        valid = corpus.valid[0]
        assert list(valid.batches.sources) == corpus.source.encode([pair.source for pair in valid.pairs])
        assert list(valid.batches.targets) == corpus.target.encode([pair.target for pair in valid.pairs])
        prints.add(corpus.fingerprint)
    assert len(prints) == 6
    assert load_corpus(tiny(tmp_path / "run", {"data.builtin_pairs": 120, **changes})).fingerprint in prints
    said = capsys.readouterr().out
    assert (said.count("[prepare] written"), said.count("models of")) == (1, 6)  # sampling makes no other subwords


def test_a_dropout_of_every_merge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^subwords\.sampling is 1: for subwords\.kind bpe .*, and must be below 1$"):
        tiny(tmp_path, {"subwords.kind": "bpe", "subwords.sampling": 1})
