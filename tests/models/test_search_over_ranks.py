"""A model whose weights are split over ranks finds, within `whole_outputs`, what the whole one finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models import (
    DecoderOnlyConfig,
    EncoderDecoder,
    TransformerConfig,
    beam_search,
    greedy,
    make_decoder_only,
    make_transformer,
)
from models.alignment import attention_weights
from models.decoding_rules import NoRepeatedNgrams
from models.sharding import split_weights, whole_outputs
from seqpar.testing.ranks import ranks

VOCAB = 23


def model(kind: str) -> EncoderDecoder:
    torch.manual_seed(6)
    if kind == "decoder only":
        made = make_decoder_only(DecoderOnlyConfig(16, 24, 4, 2, dropout=0.0), VOCAB)
    else:
        made = make_transformer(TransformerConfig(16, 24, 4, 2, 2, dropout=0.0, norm="pre", tie=kind), VOCAB, VOCAB)
    for parameter in made.parameters():  # biases are zero at first, and sentences would be all alike
        torch.nn.init.normal_(parameter, std=0.3)
    return made.double()


def sentences() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(3, VOCAB, (5, 7), generator=generator)
    src[1, 4:] = src[3, 2:] = 0
    return src


def found(searched: EncoderDecoder) -> dict[str, Any]:
    """What each search finds, and the attention of the second layer."""
    src = sentences()
    given: dict[str, Any] = {"bos": 1, "eos": 2, "max_length": 9}
    tgt = torch.randint(3, VOCAB, (5, 4), generator=torch.Generator().manual_seed(4))
    return {
        "greedy": greedy(searched, src, **given),
        "rules": greedy(searched, src, rules=[NoRepeatedNgrams(1)], **given),
        "beam": beam_search(searched, src, beam=3, n_best=2, **given),
        "attention": attention_weights(searched, src, tgt, 1),
    }


def over_ranks(rank: int, world: int, kind: str) -> dict[str, Any]:
    split = model(kind)
    split_weights(split, torch.distributed.group.WORLD)
    with whole_outputs(split):
        inside = found(split)
    for search in (greedy, beam_search):
        for given in (split, [model(kind), split]):
            with pytest.raises(ValueError, match=REFUSED):
                search(given, sentences(), bos=1, eos=2)
    return inside


REFUSED = (
    r"^the model is split over ranks: search within models\.sharding\.whole_outputs\(model\), where all ranks that "
    "split the vocabulary translate the same sentences$"
)


@pytest.mark.parametrize("kind", ["none", "all", "decoder only"])
def test_searches_and_attention_are_those_of_the_whole_model(kind: str) -> None:
    expected = found(model(kind))
    assert len({tuple(tokens) for tokens in expected["greedy"]}) > 1 or kind == "decoder only"
    for one in ranks(2, over_ranks, kind):
        assert one["greedy"] == expected["greedy"]
        assert one["rules"] == expected["rules"]
        for ours, theirs in zip(one["beam"], expected["beam"], strict=True):
            assert [each.tokens for each in ours] == [each.tokens for each in theirs]
            assert [each.score for each in ours] == pytest.approx([each.score for each in theirs], rel=1e-12)
        torch.testing.assert_close(one["attention"], expected["attention"], rtol=1e-12, atol=1e-14)
