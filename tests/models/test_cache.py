"""What a decoder keeps between steps: the memory is read once, and room grows by doubling."""

from __future__ import annotations

import pytest
import torch

from models import padding_mask
from models.attention import KeyValues
from models.cache import LayerCache
from tests.models.examples import PAD, random_batch, small_transformer


def test_with_a_cache_the_memory_is_read_at_the_first_step_alone() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    memory, mask, cache = model.encode(src), padding_mask(src, PAD), model.decoder.empty_cache()
    expected = model.decode(memory, mask, tgt)
    found = [model.decode(memory, mask, tgt[:, :1], cache=cache)]
    found += [model.decode(torch.full_like(memory, 7.0), mask, tgt[:, [step]], cache=cache) for step in range(1, 6)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-12)
    assert all(layer.memory is not None and layer.memory.keys.is_contiguous() for layer in cache.layers)


def test_a_thousand_steps_move_what_is_kept_ten_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.cache.FIRST_ROOM", 2)
    layer, places = LayerCache(), set()
    steps = torch.randn(1_000, 2, 1, 3, 1, 4).unbind()
    for keys, values in steps:
        kept = layer.extend(KeyValues(keys, values))
        places.add(kept.keys.data_ptr())
    assert len(places) <= 10
    assert torch.equal(kept.keys, torch.cat([keys for keys, _ in steps], 2))
    assert torch.equal(kept.values, torch.cat([values for _, values in steps], 2))
