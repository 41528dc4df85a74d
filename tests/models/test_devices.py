"""Whatever a model or a search creates is on the device of its inputs, not on the default one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import (
    ForcedPrefixes,
    MinimumLength,
    NoRepeatedNgrams,
    Phrase,
    beam_search,
    constrained_beam_search,
    greedy,
    sample,
)
from models.alignment import attention_weights
from tests.models.examples import BOS, EOS, random_batch, small_decoder_only, small_transformer

SRC, TGT = random_batch(1), random_batch(2)
LIMIT = {"max_length": 5}
PHRASES = [[Phrase([4, 3], whole=True)], [], [], [Phrase([7])], []]
RULES = [MinimumLength(2, EOS), NoRepeatedNgrams(2), ForcedPrefixes([[4], [], [5, 6], [], []])]


MODELS = {
    "vaswani": small_transformer(1, spread=2.0),
    "marian": small_transformer(1, spread=2.0, architecture="marian"),
    "decoder-only": small_decoder_only(),
}
SEARCHES: dict[str, Callable[[Any], object]] = {
    "forward": lambda model: model(SRC, TGT).tolist(),
    "without a mask": lambda model: model.decode(model.encode(SRC), None, TGT).tolist(),
    "greedy": lambda model: greedy(model, SRC, bos=BOS, eos=EOS, **LIMIT),
    "beam": lambda model: beam_search(model, SRC, bos=BOS, eos=EOS, beam=3, n_best=3, **LIMIT),
    "prompt": lambda model: beam_search(model, SRC, bos=[BOS, 5, 6], eos=EOS, beam=2, **LIMIT),
    "rules": lambda model: beam_search(
        model,
        SRC,
        bos=BOS,
        eos=EOS,
        rules=RULES,
        **LIMIT,
    ),
    "sample": lambda model: sample(model, SRC, bos=BOS, eos=EOS, seeds=range(5), samples=2, **LIMIT),
    "nucleus": lambda model: sample(model, SRC, bos=BOS, eos=EOS, seeds=range(5), top_p=0.7, **LIMIT),
    "constraints": lambda model: constrained_beam_search(
        model, SRC, PHRASES, bos=BOS, eos=EOS, beam=6, boundaries=[5, 8], **LIMIT
    ),
    "alignment": lambda model: attention_weights(model, SRC, TGT).tolist(),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_created_on_the_default_device(name: str, search: str) -> None:
    expected = SEARCHES[search](MODELS[name])
    with torch.device("meta"):
        assert SEARCHES[search](MODELS[name]) == expected
