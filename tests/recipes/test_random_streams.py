"""Every stream of random numbers differs for each of the facts it depends on, and for any two combinations of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from models.dropout import Dropout
from recipes.translation.data import drawn_batches
from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.mixing import Mixture
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.train import dropout_seed, train
from recipes.translation.translating.translate import Sampling, SearchOptions, alternatives
from tests.recipes.random_translator import random_translator
from tests.recipes.tiny import tiny

PAIRS = 40


def order_of_an_epoch(seed: int, epoch: int) -> Hashable:
    ids = [[4] * (1 + n % 3) for n in range(PAIRS)]
    return repr(list(TokenBatches(ids, ids, batch_tokens=20, seed=seed).epoch(epoch)))


def order_of_a_corpus(seed: int, corpus: int, times: int) -> Hashable:
    drawn = Mixture([PAIRS] * 3, [1.0] * 3, 1.0, seed).draw_epoch(times, numpy.arange(3 * PAIRS))
    return tuple(drawn[corpus * PAIRS : (corpus + 1) * PAIRS] - corpus * PAIRS)


def subwords_of_a_pair(seed: int, epoch: int, side: int, pair: int) -> Hashable:
    return int(drawn_batches._seeds(seed, epoch, side, PAIRS)[pair])


STREAMS: dict[str, tuple[Callable[..., Hashable], int]] = {
    "dropout of a step on a rank": (dropout_seed, 3),
    "order of an epoch": (order_of_an_epoch, 2),
    "order of a corpus in a mixture": (order_of_a_corpus, 3),
    "sampled subwords": (subwords_of_a_pair, 4),
}
"""How each stream begins, as a function of the facts, and how many these are."""


@pytest.mark.parametrize(("begins", "facts"), STREAMS.values(), ids=list(STREAMS))
def test_no_two_combinations_of_facts_have_the_same_stream(begins: Callable[..., Hashable], facts: int) -> None:
    given = list(itertools.product(range(3), repeat=facts))
    found = [begins(*each) for each in given]
    assert len(set(found)) == len(given)
    assert found == [begins(*each) for each in given]


def test_no_two_seeds_and_sentences_have_the_same_samples(tmp_path: Path) -> None:
    translator = random_translator(tmp_path)
    decoding = DecodingConfig(max_length=30, min_length=20)
    found = []
    for seed in range(3):
        how = SearchOptions(sampling=Sampling(2, temperature=3.0, seed=seed))
        rows = alternatives(translator.with_decoding(decoding), ["The dog is red."] * 4, how)
        found += [one.text for row in rows for one in row]
    assert len(set(found)) == 3 * 4 * 2


def test_dropout_draws_no_numbers_twice_in_a_run(tmp_path: Path) -> None:
    drawn: list[bytes] = []
    forward = Dropout.forward

    def noted(module: Dropout, x: Tensor) -> Tensor:
        if module.training:
            drawn.append(torch.get_rng_state().numpy().tobytes())
        return forward(module, x)

    changes: dict[str, Any] = {"data.builtin_pairs": 60, "training.accumulate": 2, "training.batch_tokens": 400}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dropout, "forward", noted)
        for steps in (2, 4):  # and not after it was resumed
            train(tiny(tmp_path / "run", {**changes, "training.steps": steps}))
    sites = 7  # two embeddings, two sublayers of an encoder's layer, three of a decoder's
    assert len(drawn) == 4 * 2 * sites
    assert len(set(drawn)) == len(drawn)
