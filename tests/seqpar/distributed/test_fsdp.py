"""FSDP2 and HSDP round ModelWithLoss: the single device's gradient, with the collectives of an un-chunked loss."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import (
    Case,
    Communication,
    assert_answers,
    build,
    gradients_of,
    mesh,
    reference,
    shard,
    torch_may_warn,
    wrap,
)
from tests.seqpar.distributed.test_data_parallel_ranks import SMALL, PlainLoss, step

UNTIED = Case(**{**vars(SMALL), "head": "bias", "criterion": "ours", "padding_share": 0.0})


def collectives(rank, world, units, shape, case, chunked):
    both = build(case)
    if not chunked:
        both = seqpar.ModelWithLoss(both.model, PlainLoss(both.model.generator))
    with torch_may_warn():
        wrapped = shard(both, units, mesh(*shape))
        step(wrapped, case, rank, world)  # the first step sets streams and states up
        with Communication() as count:
            step(wrapped, case, rank, world)
    return dict(count.calls)


@pytest.mark.parametrize("units", ["", "mix", "generator", "mix generator", "mix+generator", "embed mix generator"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp2", "hsdp"])
def test_chunks_cost_no_collective(units, shape):
    world = 2 if len(shape) == 1 else 4
    case = Case(**{**vars(UNTIED), "sizes": (((3, 5),),) * world, "chunk_tokens": 1})
    chunked, plain = (ranks(world, collectives, units, shape, case, c) for c in (True, False))
    assert chunked == plain
    root = "embed" not in units  # or nothing is left to it
    assert plain[0]["c10d::_allgather_base_"] == 2 * len(units.split()) + root  # a unit's twice, the root's once


def test_a_tied_head_costs_no_collective():
    chunked, plain = (ranks(2, collectives, "mix", (2,), SMALL, c) for c in (True, False))
    assert chunked == plain


def mixed_precision(rank, world, case, units, chunked):
    both = build(case).float()
    if not chunked:
        both = seqpar.ModelWithLoss(both.model, PlainLoss(both.model.generator))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch_may_warn():
        wrapped = shard(both, units, mp_policy=policy)
        ((tokens, target),) = case.micro_batches(rank)
        loss = wrapped(tokens, target=target)
        (loss.total * world / seqpar.group_sum(loss.tokens, dist.group.WORLD)).backward()
    return str(loss.total.dtype), float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total), gradients_of(wrapped)


@pytest.mark.parametrize(("units", "head"), [("mix", "bias"), ("mix generator", "bias"), ("mix", "tied")])
def test_bf16_parameters_with_fp32_reduction_lose_no_more_than_the_unchunked_loss(units, head):
    """At most twice as far from the float64 truth as the plain loss in the same dtypes, over all parameters."""
    case = Case(**{**vars(UNTIED), "head": head, "width": 16, "vocab_size": 60, "sizes": (((6, 9),), ((5, 8),))})
    total, truth = reference(case)
    away = {}
    for chunked in (True, False):
        dtype, value, gradients = ranks(2, mixed_precision, case, units, chunked)[0]
        errors = [(gradients[n] - g).norm() / g.norm() for n, g in truth.items()]
        away[chunked] = (abs(value - total) / total, max(errors))
        assert all(g.dtype == torch.float32 for g in gradients.values())
        if chunked:
            assert dtype == "torch.float32"
    assert away[True][1] <= 2 * away[False][1]
    assert away[True][0] <= max(2 * away[False][0], 1e-3)


def called_outside(rank, world, how):
    both = build(UNTIED)
    with torch_may_warn():
        if how == "root only":
            shard(both)
        elif how == "inside the generator":
            deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7)).double()
            both = seqpar.ModelWithLoss(nn.Linear(4, 4).double(), seqpar.LossCompute(deep, seqpar.CrossEntropy()))
            fully_shard(deep[0], mesh=mesh(world))
            fully_shard(both, mesh=mesh(world))
        try:
            if how == "root only":
                both.loss(torch.zeros(2, 4).double(), torch.zeros(2).long())
            else:
                both(torch.zeros(2, 4).double(), target=torch.zeros(2).long())
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["root only", "inside the generator"])
def test_the_engine_on_sharded_parameters_names_the_fix(how):
    for message in ranks(2, called_outside, how):
        assert message.startswith("generator.")
        assert "is sharded (a DTensor): the loss was called outside the forward in which FSDP2 unshards it" in message
        assert "wrap both in one module, seqpar.ModelWithLoss(model, loss)" in message
        assert "make the whole generator the unit" in message


def engine_as_unit(rank, world, case):
    """A head that is no part of the model; the engine itself is the unit."""
    both = build(case)
    engine = seqpar.LossCompute(both.model.generator, seqpar.CrossEntropy(), chunk_tokens=2)
    del both.model.generator
    whole = seqpar.ModelWithLoss(both.model, engine)
    with torch_may_warn():
        fully_shard(engine, mesh=mesh(world))
        fully_shard(whole, mesh=mesh(world))
        with Communication() as count:
            total = step(whole, case, rank, world)
    return (total, {n.replace("loss.head", "model"): g for n, g in gradients_of(whole).items()}), count.calls


def test_the_engine_may_be_the_unit_of_a_head_of_its_own():
    results = ranks(2, engine_as_unit, UNTIED)
    assert_answers([answer for answer, _ in results], reference(UNTIED))
    assert [calls["c10d::_allgather_base_"] for _, calls in results] == [3, 3]


def head_alone(rank, world, case):
    """No ModelWithLoss at all: the generator is a root of its own, the engine is called on hidden states."""
    both = build(case)
    with torch_may_warn():
        fully_shard(both.model.generator, mesh=mesh(world))
        ((tokens, target),) = case.micro_batches(rank)
        hidden = both.model(tokens)
        loss = both.loss(hidden, target)
        (loss.total * world / seqpar.group_sum(loss.tokens, dist.group.WORLD)).backward()
    return float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total), {
        n: g for n, g in gradients_of(both).items() if "generator" in n
    }


def test_a_generator_that_is_the_only_unit_is_unsharded_by_its_own_hooks():
    total, gradients = reference(UNTIED)
    heads = {n: g for n, g in gradients.items() if "generator" in n}
    assert_answers(ranks(2, head_alone, UNTIED), (total, heads))


def after_an_error(rank, world):
    """A target out of range raises on every rank; the next step is right."""
    with torch_may_warn():
        wrapped = wrap(build(UNTIED), "fsdp2, head a unit")
        ((tokens, target),) = UNTIED.micro_batches(rank)
        try:
            wrapped(tokens, target=target + 100)
        except IndexError as error:
            said = str(error)
        assert "forward" not in wrapped.model.generator.__dict__
    return said


def test_an_error_inside_a_unit_leaves_the_generator_as_it_was():
    for said in ranks(2, after_an_error):
        assert "outside the vocabulary [0, 7)" in said


def evaluation(rank, world, units):
    with torch_may_warn():
        wrapped = shard(build(UNTIED), units)
        ((tokens, target),) = UNTIED.micro_batches(rank)
        with torch.no_grad():
            loss = wrapped(tokens, target=target)
        assert not loss.total.requires_grad
        after = step(wrapped, UNTIED, rank, world)  # training goes on
    return float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total), {}, after


@pytest.mark.parametrize("units", ["", "mix generator"])
def test_evaluation_between_steps(units):
    total = reference(UNTIED)[0]
    for value, _, after in ranks(2, evaluation, units):
        assert value == pytest.approx(total, rel=1e-12)
        assert after == pytest.approx(total, rel=1e-12)


class Drifting(nn.Linear):
    """A projection of the running sum over time, or of each state alone."""

    def __init__(self, width, vocab_size, sums):
        super().__init__(width, vocab_size)
        self.sums = sums

    def forward(self, hidden):
        return super().forward(hidden.cumsum(-2) if self.sums else hidden.tanh())


def probed(rank, world, wrapper, sums):
    torch.manual_seed(0)
    model = nn.Embedding(9, 4)
    both = seqpar.ModelWithLoss(model, seqpar.LossCompute(Drifting(4, 9, sums), seqpar.CrossEntropy()))
    with torch_may_warn():
        wrapped = shard(both, "") if wrapper == "fsdp2" else DistributedDataParallel(both)
        tokens = torch.arange(12).view(3, 4) % 9
        try:
            wrapped(tokens, target=tokens).total.backward()
        except ValueError as error:
            return str(error)
    return [bool(p.grad.isfinite().all()) for p in both.parameters()]


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_the_probe_of_the_generator_leaves_the_wrappers_alone(wrapper):
    for answer in ranks(2, probed, wrapper, True):
        assert "the generator mixes rows" in answer
        assert "other time steps" in answer
    assert all(all(answer) for answer in ranks(2, probed, wrapper, False))


def patched_unit(rank, world):
    both = build(UNTIED)
    generator = both.model.generator
    with torch_may_warn():
        fully_shard(generator)
    forward = generator.forward
    generator.forward = lambda hidden: 2 * forward(hidden)
    with pytest.raises(TypeError, match="fully_shard unit with a forward of its own, set on the instance"):
        seqpar.LossCompute(generator, seqpar.CrossEntropy())(
            torch.randn(3, generator.in_features), torch.zeros(3).long()
        )
    return "forward" in vars(generator)


def test_a_forward_set_on_a_unit_is_refused_and_stays():
    assert ranks(2, patched_unit) == [True, True]


class Weighted(nn.Module):
    ignore_index = -100

    def forward(self, scores, target, w):
        return (nn.functional.cross_entropy(scores.double(), target, reduction="none") * w).sum()


def given_beside_hidden(rank, world, name, dtype):
    """The loss and hidden's gradient with a generator that a policy casts, and with one that has that dtype."""
    found = []
    for is_cast in (False, True):
        torch.manual_seed(0)
        generator = nn.Linear(8, 20)
        if is_cast:
            fully_shard(generator, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        else:
            generator.to(dtype)
        engine = seqpar.LossCompute(generator, seqpar.CrossEntropy() if name in ("old", "temperature") else Weighted())
        hidden, target, w = torch.randn(6, 8).to(dtype), torch.randint(20, (6,)), 1 + torch.rand(6).double() / 1000
        hidden.requires_grad_()
        if name == "w":
            loss = engine(hidden, target, w=w)
        elif name == "old":
            loss = engine.scored_loss(hidden, target, lambda s, old: (s.log_prob - old).exp(), old=w)
        elif name == "temperature":
            loss = engine.scored_loss(hidden, target, lambda s: -s.log_prob, temperature=w)
        else:
            loss = engine(hidden, target, w=torch.ones(6), loss_scale=torch.tensor(65_540.0))
        loss.total.backward()
        found.append((loss.total.item(), hidden.grad))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w", "old", "temperature", "loss_scale"])
def test_a_mixed_precision_policy_casts_what_the_generator_gets_and_nothing_else(name, dtype):
    """A weight of 1 + k / 1000 would be off by 1e-3, and a scale of 65,540 infinite."""
    for (expected, expected_grad), (found, grad) in ranks(2, given_beside_hidden, name, dtype):
        assert found == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(grad, expected_grad, equal_nan=True)


def hooked_unit(rank, world, register):
    generator = nn.Linear(4, 9).double()
    fully_shard(generator)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy())
    hidden, target = torch.randn(3, 4).double(), torch.tensor([1, 2, 3])
    engine(hidden, target)
    handle = getattr(generator, register)(lambda *_: None)
    try:
        engine(hidden, target)
    except TypeError as error:
        handle.remove()
        engine(hidden, target)
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_of_ones_own_on_a_unit_is_refused_by_name(register):
    for said in ranks(2, hooked_unit, register):
        assert said.startswith("the generator (FSDPLinear) is a fully_shard unit with a hook of its own, <lambda>")
