"""replicate, scatter, parallel_apply, gather: one meaning for any device list."""

import contextlib
import dataclasses
import gc
import threading
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import seqpar
from seqpar.multi_device.parallel_apply import side_by_side
from seqpar.multi_device.replicas import bind
from tests.approved import assert_no_other_line, assert_refused


def run_twice_and_sum(module, x, devices):
    """The gradients of all replicas' summed outputs, in the original's parameters."""
    replicas = seqpar.replicate(module, devices)
    for replica in replicas:
        out = replica(x.to(next(replica.parameters()).device))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return [p.grad for p in module.parameters()]


MODULES = {
    "linear": lambda: nn.Linear(3, 3),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "lstm": lambda: nn.LSTM(3, 3, batch_first=True),
    "weight-normed gru": lambda: parametrizations.weight_norm(nn.GRU(3, 3, batch_first=True), "weight_hh_l0"),
    "layers in lists": lambda: nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])[0]),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_of_three_replicas_sum_into_the_original(kind):
    torch.manual_seed(0)
    module, x = MODULES[kind]().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    out = module(x)
    (3 * (out[0] if isinstance(out, tuple) else out).sum()).backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    got = run_twice_and_sum(module, x, ["cpu"] * 3)
    assert len(expected) > 1
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_a_replicas_parameters_are_listed_linked_and_not_the_originals():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    (replica,) = seqpar.replicate(module, ["cpu"])
    assert [n for n, _ in replica.named_parameters()] == [n for n, _ in module.named_parameters()]
    for mine, original in zip(replica.parameters(), module.parameters(), strict=True):
        assert mine is not original
        assert mine.grad_fn is not None
        assert torch.equal(mine, original)


def test_an_rnns_replica_reads_its_own_flat_weights_and_leaves_the_originals_alone():
    module = nn.LSTM(3, 3)
    before = list(module._flat_weights)
    for replica in seqpar.replicate(module, ["cpu"] * 2):
        assert all(flat is own for flat, own in zip(replica._flat_weights, replica.parameters(), strict=True))
    assert all(now is then for now, then in zip(module._flat_weights, before, strict=True))


def test_ties_inside_a_module_stay_tied_in_its_replicas():
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "out": nn.Linear(3, 4, bias=False)})
    module["out"].weight = module["embed"].weight
    module["again"] = module["out"]
    for replica in seqpar.replicate(module, ["cpu"] * 2):
        assert replica["out"].weight is replica["embed"].weight
        assert replica["again"] is replica["out"]
        assert len(list(replica.parameters())) == 1


def test_the_first_replica_shares_buffers_and_the_others_have_copies():
    module = nn.BatchNorm1d(2)
    first, second = seqpar.replicate(module, ["cpu"] * 2)
    first(torch.randn(8, 2))
    assert module.num_batches_tracked == 1
    assert second.num_batches_tracked == 0
    assert torch.equal(first.running_mean, module.running_mean)


def test_without_gradients_replicas_are_not_linked():
    with torch.no_grad():
        (replica,) = seqpar.replicate(nn.Linear(2, 2), ["cpu"])
    assert all(p.grad_fn is None for p in replica.parameters())


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    name: str


LEAVES = st.sampled_from(["text", 3, None, 2.5, True])


def structures(rows):
    tensor = st.integers(0, 3).map(lambda seed: torch.arange(rows * 2).reshape(rows, 2) + seed)
    return st.recursive(
        tensor | LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.builds(Pair, tensor, inner),
            st.builds(Batch, tensor, st.text(max_size=2)),
        ),
        max_leaves=6,
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(st.data(), st.integers(0, 12), st.integers(1, 9))
def test_gather_is_the_opposite_of_scatter_for_any_structure(data, rows, devices):
    structure = data.draw(structures(rows))
    shards = seqpar.scatter(structure, ["cpu"] * devices)
    assert same(seqpar.gather(shards, "cpu"), structure)


@given(rows=st.integers(1, 40), devices=st.integers(1, 9))
def test_every_device_has_work_and_sizes_differ_by_at_most_one(rows, devices):
    sizes = [len(shard) for shard in seqpar.scatter(torch.zeros(rows, 1), ["cpu"] * devices)]
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, devices)
    assert max(sizes) - min(sizes) <= 1


def test_six_rows_on_four_devices_use_all_four():
    assert [len(s) for s in seqpar.scatter(torch.zeros(6), ["cpu"] * 4)] == [2, 2, 1, 1]


def test_rows_are_cut_where_the_sizes_say():
    parts = seqpar.scatter({"x": torch.arange(6), "y": torch.ones(6, 2)}, ["cpu"] * 3, sizes=[1, 4, 1])
    assert [part["x"].tolist() for part in parts] == [[0], [1, 2, 3, 4], [5]]
    assert [len(part["y"]) for part in parts] == [1, 4, 1]


def test_scatter_along_another_dimension_and_gather_back():
    x = torch.arange(24).reshape(2, 6, 2)
    shards = seqpar.scatter({"x": x}, ["cpu"] * 4, dim=1)
    assert [s["x"].shape[1] for s in shards] == [2, 2, 1, 1]
    assert torch.equal(seqpar.gather(shards, "cpu", dim=1)["x"], x)


def test_scatter_and_gather_are_differentiable():
    x = torch.randn(5, 2, requires_grad=True)
    y = seqpar.gather([s * (i + 1) for i, s in enumerate(seqpar.scatter(x, ["cpu"] * 2))], "cpu")
    y.sum().backward()
    assert x.grad[:, 0].tolist() == [1, 1, 1, 2, 2]


def test_tensors_without_dimensions_go_to_every_shard_and_come_back_as_a_vector():
    shards = seqpar.scatter((torch.zeros(4), torch.tensor(7.0)), ["cpu"] * 3)
    assert [s[1].item() for s in shards] == [7, 7, 7]
    assert seqpar.gather([s[1] for s in shards], "cpu").tolist() == [7, 7, 7]


def test_non_tensors_alone_go_to_every_device():
    assert seqpar.scatter({"name": "x"}, ["cpu"] * 2) == [{"name": "x"}] * 2


PACKED = pack_padded_sequence(torch.zeros(1, 3, 2), [3], batch_first=True)
REFUSED = {
    "inputs of different sizes": lambda: seqpar.scatter({"a": torch.zeros(4, 2), "b": torch.zeros(3, 2)}, ["cpu"]),
    "a missing dimension": lambda: seqpar.scatter([torch.zeros(4)], ["cpu"], dim=1),
    "sizes": lambda: seqpar.scatter(torch.zeros(4), ["cpu"] * 2, sizes=[1, 1]),
    "a packed sequence": lambda: seqpar.scatter(PACKED, ["cpu"] * 2),
    "outputs of different sizes": lambda: seqpar.gather([torch.zeros(2, 3), torch.zeros(2, 4)], "cpu"),
    "different numbers": lambda: seqpar.gather([1, 2], "cpu"),
    "different structures": lambda: seqpar.gather([[1], 1], "cpu"),
    "no outputs": lambda: seqpar.gather([], "cpu"),
    "too few inputs": lambda: seqpar.parallel_apply([torch.add] * 2, [torch.ones(1)], [{}]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_its_approved_line(case):
    assert_refused("multi_device", case, REFUSED[case])


def test_every_approved_line_has_its_case():
    assert_no_other_line("multi_device", REFUSED)


def test_token_losses_pass_through_gather():
    loss = seqpar.TokenLoss(torch.tensor(1.5), torch.tensor(2))
    both = seqpar.gather([loss, loss], "cpu")
    assert isinstance(both, seqpar.TokenLoss)
    assert both.total.tolist() == [1.5, 1.5]
    assert both.nll is None


class Fails(nn.Module):
    def forward(self, x):
        if x.sum() > 5:
            raise KeyError("the module's own message")
        return x


@pytest.mark.unswitched
def test_a_failing_replica_raises_its_own_type_with_a_note_naming_replica_and_device():
    with pytest.raises(KeyError, match="the module's own message") as error:
        seqpar.data_parallel(Fails(), torch.tensor([[1.0], [1.0], [9.0]]), ["cpu"] * 3)
    assert error.value.__notes__ == ["in replica 2 of 3 (counted from 0) on cpu"]


def test_parallel_apply_takes_positional_and_keyword_arguments():
    def scale(x, y, *, by=1):
        return (x + y) * by

    x = torch.ones(1)
    assert [t.item() for t in seqpar.parallel_apply([scale] * 2, [(x, x), (x, 2 * x)], [{}, {"by": 2}])] == [2, 6]


def modes(_=None):
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


CONTEXTS = {
    "nothing": lambda: torch.enable_grad(),
    "no grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_have_the_callers_modes(context):
    """Real threads, as for distinct accelerators; two places on the CPU stand in for two devices."""
    threads, both_at_work = set(), threading.Barrier(2)

    def job(i):
        if i < 2:
            both_at_work.wait(timeout=30)
        threads.add(threading.get_ident())
        return modes()

    with CONTEXTS[context]():
        assert side_by_side(job, ["one place", "another", "one place"]) == [modes()] * 3
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_one_place_runs_in_order_and_an_error_in_any_thread_arrives():
    order = []
    side_by_side(order.append, ["here"] * 4)
    assert order == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda i: 1 // (i - 2), ["a", "b", "a"])


def test_tensors_of_threads_that_failed_are_freed_with_the_error():
    """A caller that ran out of memory and tries again with fewer rows needs theirs before Python looks for cycles."""
    alive, all_at_work = [], threading.Barrier(3)

    def job(i):
        rows = torch.ones(5)
        alive.append(weakref.ref(rows))
        all_at_work.wait(timeout=30)
        if i < 2:
            raise torch.OutOfMemoryError

    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            side_by_side(job, ["a", "b", "c"])
        assert [tensor() for tensor in alive] == [None] * 3
    finally:
        gc.enable()


class Replicating(nn.Module):
    """A class that replicates in its own way."""

    def _replicate_for_data_parallel(self):
        copy = super()._replicate_for_data_parallel()
        copy.is_own_copy = True
        return copy


def test_a_class_that_replicates_in_its_own_way_is_asked_to() -> None:
    assert bind(nn.Sequential(Replicating()), {})[0].is_own_copy


def test_a_structural_copy_is_freed_without_the_garbage_collector() -> None:
    """One is made for each chunk; a cycle would keep all of them, with their gradients' leaves."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    gc.collect()
    gc.disable()
    try:
        copy = bind(module, {id(p): p.detach() for p in module.parameters()})
        left = [weakref.ref(part) for part in copy.modules()]
        del copy
        assert not [part for part in left if part() is not None]
    finally:
        gc.enable()
