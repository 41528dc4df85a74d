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


def test_no_steps_leave_a_cache_as_it_was() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    memory, mask, cache = model.encode(src), padding_mask(src, PAD), model.decoder.empty_cache()
    parts = (tgt[:, :0], tgt[:, :2], tgt[:, :0], tgt[:, 2:])
    found = [model.decode(memory, mask, steps, cache=cache) for steps in parts]
    torch.testing.assert_close(torch.cat(found, 1), model.decode(memory, mask, tgt), rtol=1e-12, atol=1e-12)


def test_a_gradient_through_earlier_steps_of_a_cache_is_refused_by_torch_and_that_of_one_call_is_right() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    parameters = [each for name, each in model.named_parameters() if name.startswith("decoder")]
    memory, mask = model.encode(src).detach(), padding_mask(src, PAD)
    expected = torch.autograd.grad(model.decode(memory, mask, tgt).square().sum(), parameters)
    cache = model.decoder.empty_cache()
    hidden = model.decode(memory, mask, tgt, cache=cache)
    for one, other in zip(
        torch.autograd.grad(hidden.square().sum(), parameters, retain_graph=True), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    model.decode(memory, mask, tgt[:, :1], cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(hidden.square().sum(), parameters)
