"""DataParallel over any device list equals the module itself: outputs and every gradient."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqpar


class Model(nn.Module):
    """Takes a nested batch, returns a dict; one part is used twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, batch, *, scale=1.0):
        x = self.inner(batch["x"])
        return {"y": self.inner(x) * batch["weight"].unsqueeze(1) * scale, "sum": x.sum(-1)}


def loss_of(out):
    return (out["y"].square().sum() + out["sum"].sin().sum()) / 7


@given(rows=st.integers(1, 12), devices=st.integers(1, 9), scale=st.sampled_from([1.0, -2.0]))
def test_outputs_and_gradients_are_the_modules_own(rows, devices, scale):
    torch.manual_seed(rows)
    model = Model().double()
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    batch = {"x": x, "weight": torch.rand(rows, dtype=torch.float64)}
    inputs = (x, *model.parameters())
    expected = model(batch, scale=scale)
    got = seqpar.DataParallel(model, ["cpu"] * devices)(batch, scale=scale)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-14)
    for a, b in zip(
        torch.autograd.grad(loss_of(got), inputs), torch.autograd.grad(loss_of(expected), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_stays_sparse_and_is_the_modules_own(kind, devices):
    torch.manual_seed(0)
    module, ids = kind(10, 4, sparse=True).double(), torch.randint(10, (6, 3))
    (expected,) = torch.autograd.grad(module(ids).square().sum(), module.weight)
    seqpar.DataParallel(module, ["cpu"] * devices)(ids).square().sum().backward()
    assert module.weight.grad.layout == torch.sparse_coo
    torch.testing.assert_close(module.weight.grad.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_uneven_last_batches_work(devices):
    model = seqpar.DataParallel(nn.Linear(2, 1), ["cpu"] * devices)
    for rows in (30, 10, 1):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(model(x), model.module(x))


def test_one_block_of_a_model_may_be_wrapped():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    wrapped = copy.deepcopy(plain)
    wrapped[0] = seqpar.DataParallel(wrapped[0], ["cpu"] * 3)
    x = torch.randn(7, 2, dtype=torch.float64)
    plain(x).sum().backward()
    wrapped(x).sum().backward()
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def test_outputs_can_stay_scattered_for_the_engine():
    torch.manual_seed(0)
    trunk, generator = nn.Linear(3, 4).double(), nn.Linear(4, 9).double()
    x, target = torch.randn(5, 6, 3, dtype=torch.float64), torch.randint(9, (5, 6))
    shards = seqpar.DataParallel(trunk, ["cpu"] * 3, gather_outputs=False)(x)
    assert [len(s) for s in shards] == [2, 2, 1]
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 3, chunk_tokens=4)(shards, target)
    plain = nn.functional.cross_entropy(generator(trunk(x)).flatten(0, 1), target.flatten(), reduction="sum")
    parameters = [*trunk.parameters(), *generator.parameters()]
    for a, b in zip(
        torch.autograd.grad(loss.total / 30, parameters), torch.autograd.grad(plain / 30, parameters), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_without_rows_to_share_the_module_runs_once():
    calls = []

    class Counts(nn.Module):
        def forward(self, name="x"):
            calls.append(name)
            return torch.ones(2)

    assert seqpar.DataParallel(Counts(), ["cpu"] * 3)(name="y").tolist() == [1, 1]
    assert calls == ["y"]


def test_functional_form_takes_keywords_and_another_dimension():
    x = torch.arange(6.0).reshape(1, 6)
    out = seqpar.data_parallel(nn.Identity(), x, ["cpu"] * 4, dim=1)
    assert torch.equal(out, x)
    out = seqpar.data_parallel(
        Model(), ({"x": torch.ones(2, 3), "weight": torch.ones(2)},), ["cpu"] * 2, "cpu", 0, {"scale": 0}
    )
    assert out["y"].abs().sum() == 0


def test_the_default_device_list_is_what_the_machine_has():
    expected = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    assert len(seqpar.DataParallel(nn.Linear(1, 1)).device_ids) == expected


def test_state_dict_is_that_of_torchs_data_parallel():
    assert list(seqpar.DataParallel(nn.Linear(1, 1), ["cpu"]).state_dict()) == ["module.weight", "module.bias"]


def test_autocast_reaches_the_replicas():
    model = seqpar.DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(4, 2)).dtype == torch.bfloat16


def test_hugging_face_style_outputs_pass_through():
    """An ordered dict that is a dataclass too keeps its type."""
    import collections
    import dataclasses

    @dataclasses.dataclass
    class Output(collections.OrderedDict):
        logits: torch.Tensor = None

        def __post_init__(self):
            self["logits"] = self.logits

    class Makes(nn.Module):
        def forward(self, x):
            return Output(x * 2)

    out = seqpar.data_parallel(Makes(), torch.ones(3, 1), ["cpu"] * 2)
    assert type(out) is Output
    assert out["logits"].tolist() == [[2], [2], [2]]


LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CACHING = {
    "whole": lambda hf: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=37, **LLAMA)),
    "of a window": lambda hf: hf.MistralForCausalLM(
        hf.MistralConfig(vocab_size=37, num_key_value_heads=2, sliding_window=4, **LLAMA)
    ),
}


def caching(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return CACHING[name](transformers).double().eval()


@pytest.mark.unswitched
@pytest.mark.parametrize("name", CACHING)
def test_caches_of_the_replicas_are_joined_and_can_be_continued(name):
    model = caching(name)
    first, second = torch.randint(37, (5, 9)), torch.randint(37, (5, 2))
    plain = model(first)
    out = seqpar.DataParallel(model, ["cpu"] * 3)(first)
    torch.testing.assert_close(out.logits, plain.logits, rtol=1e-12, atol=1e-14)
    assert type(out.past_key_values) is type(plain.past_key_values)
    found, expected = (model(second, cache=o.past_key_values).logits for o in (out, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.unswitched
def test_a_cache_that_several_replicas_would_fill_together_is_refused():
    from transformers import DynamicCache

    model, tokens = caching("whole"), torch.randint(37, (4, 9))
    with pytest.raises(TypeError, match=r"a cache of transformers, which all replicas would fill together: leave"):
        seqpar.DataParallel(model, ["cpu"] * 2)(tokens, cache=DynamicCache())
    cache = DynamicCache()
    out = seqpar.DataParallel(model, ["cpu"])(tokens, cache=cache)
    torch.testing.assert_close(out.logits, model(tokens).logits)
    assert cache.get_seq_length() == 9


def test_keys_and_values_in_tuples_lists_and_records_are_scattered_and_joined():
    import dataclasses

    @dataclasses.dataclass
    class Cache:
        keys: list[torch.Tensor]
        values: tuple[torch.Tensor, ...]

    class Appends(nn.Module):
        def forward(self, x, cache):
            return Cache([torch.cat([k, x], 1) for k in cache.keys], tuple(v + x for v in cache.values))

    x, cache = torch.randn(5, 2), Cache([torch.randn(5, 3)], (torch.randn(5, 2),))
    expected = Appends()(x, cache)
    found = seqpar.data_parallel(Appends(), (x, cache), ["cpu"] * 2)
    assert torch.equal(found.keys[0], expected.keys[0])
    assert torch.equal(found.values[0], expected.values[0])
