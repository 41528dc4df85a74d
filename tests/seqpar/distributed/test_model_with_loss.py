"""ModelWithLoss under DDP, FSDP2 and HSDP: the single device's loss and gradients, with no collective for a chunk."""

import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing.ranks import RankError, ranks
from tests.seqpar.distributed.layouts import (
    SMALL,
    Communication,
    Model,
    PlainLoss,
    assert_answers,
    build,
    cases,
    differentiated,
    gradients_of,
    mesh,
    message,
    reference,
    shard,
    step,
    torch_may_warn,
    watch_buckets,
    wrap,
)

OPTIONS = st.builds(
    lambda graph, more: graph | more,  # both of the first would be redundant, and torch warns
    st.sampled_from([{}, {"find_unused_parameters": True}, {"static_graph": True}]),
    st.fixed_dictionaries(
        {},
        optional={"gradient_as_bucket_view": st.just(True), "bucket_cap_mb": st.sampled_from([1e-6, 1e-4, 25])},
    ),
)


def ddp_steps(rank, world, case, options):
    wrapped = DistributedDataParallel(build(case), **options)
    answers = []
    for _ in range(2):  # DDP orders its buckets anew after the first
        wrapped.zero_grad()
        answers.append((step(wrapped, case, rank, world), gradients_of(wrapped)))
    return answers


@given(cases(2), OPTIONS)
def test_ddp_has_the_gradient_of_the_single_device_whatever_its_options(case, options):
    expected = reference(case)
    for answers in zip(*ranks(2, ddp_steps, case, options), strict=True):
        assert_answers(list(answers), expected)


def ddp_by_hand(rank, world, case):
    """The first micro-batches under no_sync, as a trainer may write it without accumulate_gradients."""
    wrapped = DistributedDataParallel(build(case), bucket_cap_mb=1e-6)
    parts = case.micro_batches(rank)
    tokens = torch.tensor(sum(int((t != case.padding).sum()) for _, t in parts))
    # a Python number: a float over an int64 tensor would be float32
    factor = case.factor * world / max(1, int(seqpar.group_sum(tokens, dist.group.WORLD)))
    total = 0.0
    with wrapped.no_sync():
        for inputs, target in parts[:-1]:
            loss = wrapped(inputs, target=target)
            (loss.total * factor).backward()
            total += loss.total.detach()
    loss = wrapped(parts[-1][0], target=parts[-1][1])
    (loss.total * factor).backward()
    total = seqpar.group_sum(total + loss.total, dist.group.WORLD)
    return float(total), gradients_of(wrapped)


@given(cases(2, micro_batches=(1, 3)))
def test_no_sync_by_hand_adds_up(case):
    assert_answers(ranks(2, ddp_by_hand, case), reference(case))


def built(case, chunked):
    both = build(case)
    return both if chunked else seqpar.ModelWithLoss(both.model, PlainLoss(both.model.generator))


def reductions(rank, world, case, chunked):
    """How often DDP's bucket of gradients is reduced in a step."""
    wrapped = DistributedDataParallel(built(case, chunked))
    buckets = watch_buckets(wrapped)
    step(wrapped, case, rank, world)
    return buckets


def test_ddp_reduces_as_often_as_with_an_unchunked_loss():
    assert ranks(2, reductions, SMALL, True) == ranks(2, reductions, SMALL, False) == [[0], [0]]


def test_the_shared_generator_is_registered_once():
    both = build(SMALL)
    names = [name for name, _ in both.named_parameters()]
    assert names == [f"model.{name}" for name, _ in both.model.named_parameters()]
    assert set(both.state_dict()) == {f"model.{name}" for name in both.model.state_dict()}


def test_a_state_dict_goes_round_and_the_tie_survives():
    both = build(SMALL)
    file = io.BytesIO()
    torch.save(both.state_dict(), file)
    file.seek(0)
    other = build(replace(SMALL, seed=6))
    assert not torch.equal(other.model.embed.weight, both.model.embed.weight)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.model.embed.weight, both.model.embed.weight)
    assert other.loss.head["generator"].weight is other.model.embed.weight
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({k: v for k, v in both.state_dict().items() if "mix" not in k})


def test_a_criterion_with_state_is_saved_and_moves_with_the_module():
    both = build(replace(SMALL, criterion="class weights"))
    assert "loss.head.criterion.weight" in both.state_dict()
    assert both.to(torch.float32).loss.head["criterion"].weight.dtype == torch.float32


def test_a_loss_with_a_head_of_its_own_keeps_its_names():
    engine = seqpar.LossCompute(nn.Linear(4, 7), seqpar.CrossEntropy())
    both = seqpar.ModelWithLoss(Model(SMALL), engine)
    assert "loss.head.generator.weight" in both.state_dict()
    both.load_state_dict(both.state_dict())


def with_lora(both):
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["head.generator"], r=2), both)


def replaced(both):
    both.model.head["generator"] = nn.Linear(4, 7)


class Headed(nn.Module):
    """A model whose generator lies two levels down."""

    def __init__(self):
        super().__init__()
        self.head = nn.ModuleDict({"generator": nn.Linear(4, 7)})

    def forward(self, x):
        return x


@pytest.mark.parametrize("change", [with_lora, replaced])
def test_a_generator_replaced_in_the_model_alone_is_refused(change):
    model = Headed()
    both = seqpar.ModelWithLoss(model, seqpar.LossCompute(model.head["generator"], seqpar.CrossEntropy()))
    hidden, target = torch.ones(3, 4), torch.tensor([1, 2, 3])
    both(hidden, target=target)
    change(both)
    with pytest.raises(RuntimeError, match=r"loss.head.generator is no longer the module model.head.generator: one of"):
        both(hidden, target=target)


def test_a_model_may_return_per_token_tensors_for_the_generator():
    class Scaled(nn.Linear):
        def forward(self, hidden, scale, shift):
            return super().forward(hidden) * scale.unsqueeze(-1) + shift.unsqueeze(-1)

    class Trunk(nn.Module):
        def forward(self, x, double=False):
            return (x * 2 if double else x), {"scale": x.sum(-1)}

    generator, x, target = Scaled(3, 5).double(), torch.randn(2, 4, 3, dtype=torch.float64), torch.zeros(2, 4).long()
    both = seqpar.ModelWithLoss(Trunk(), seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=3))
    shift = torch.randn(2, 4, dtype=torch.float64)
    loss = both(x, target=target, per_token={"shift": shift}, double=True)
    logits = generator(x * 2, x.sum(-1), shift).flatten(0, 1)
    plain = nn.functional.cross_entropy(logits, target.flatten(), reduction="sum")
    torch.testing.assert_close(loss.total, plain, rtol=1e-12, atol=0)


def test_data_parallel_in_one_process_takes_the_module_too():
    """Replicas of the module must compute with their own generator, not the original's."""
    both, ((tokens, target),) = build(SMALL), SMALL.micro_batches(1)
    losses = seqpar.DataParallel(both, ["cpu", "cpu"])(tokens, target=target)
    assert losses.total.shape == (2,)
    losses.total.sum().backward()
    other = build(SMALL)
    other(tokens, target=target).total.backward()
    for mine, theirs in zip(both.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def wraps_too_little(rank, world, how):
    model, loss = build(SMALL).children()
    if how == "generator":
        return message(seqpar.LossCompute, DistributedDataParallel(model.generator), seqpar.CrossEntropy())
    if how == "model":
        return message(seqpar.ModelWithLoss, DistributedDataParallel(model), loss)
    return message(seqpar.ModelWithLoss, model, DistributedDataParallel(loss))


@pytest.mark.parametrize("how", ["generator", "model", "loss"])
def test_ddp_round_a_part_is_refused_and_the_fix_is_named(how):
    for said in ranks(2, wraps_too_little, how):
        assert said.startswith(f"RuntimeError: {how}")
        assert "wrap both in one module, seqpar.ModelWithLoss(model, loss)" in said


def ddp_round_the_model_alone(rank, world, case, options):
    """What ModelWithLoss is there to prevent: the engine is called on what the wrapped model returns."""
    both = build(case)
    wrapped = DistributedDataParallel(both.model, **options)
    ((tokens, target),) = case.micro_batches(rank)
    total = differentiated(both.loss(wrapped(tokens), target), world, case.factor)
    return total, {f"model.{n}": g for n, g in gradients_of(wrapped).items()}


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("head", ["tied", "bias"])
def test_ddp_round_the_model_alone_is_right_or_refused_and_never_wrong(head, options):
    """A generator inside the model has its hooks on its parameters; DDP itself refuses what it took for unused."""
    case = replace(SMALL, head=head)
    if options == {"find_unused_parameters": True} and head == "bias":
        with pytest.raises(RankError, match=r"generator\.weight has been marked as ready twice"):
            ranks(2, ddp_round_the_model_alone, case, options)
    else:
        assert_answers(ranks(2, ddp_round_the_model_alone, case, options), reference(case))


def test_module_and_loss_survive_pickling():
    both = pickle.loads(pickle.dumps(build(SMALL)))
    assert both.loss.head["generator"] is both.model.generator


@pytest.mark.parametrize("part", ["model", "loss"])
def test_what_is_no_module_is_refused(part):
    parts = {"model": nn.Linear(1, 1), "loss": nn.Linear(1, 1)} | {part: 3}
    with pytest.raises(TypeError, match=f"{part} is an int; it must be a torch.nn.Module"):
        seqpar.ModelWithLoss(**parts)


@pytest.mark.parametrize("around", [lambda both: both, lambda both: nn.ModuleDict({"inner": both})])
def test_functional_call_puts_the_parameters_of_a_shared_generator_back(around):
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "generator": nn.Sequential(nn.Linear(3, 7))})
    model.forward = lambda tokens: model["embed"](tokens)
    both = seqpar.ModelWithLoss(model, seqpar.LossCompute(model["generator"], seqpar.CrossEntropy()))
    outer = around(both)
    if outer is not both:
        outer.forward = lambda *inputs, **keywords: both(*inputs, **keywords)
    own = dict(outer.named_parameters())
    other = {name: torch.randn_like(p).requires_grad_() for name, p in own.items()}
    tokens = torch.randint(7, (2, 5))
    loss = torch.func.functional_call(outer, other, (tokens,), {"target": tokens})
    loss.total.backward()
    assert all(p.grad is not None for p in other.values())
    assert all(p is own[name] for name, p in outer.named_parameters())
    assert list(dict(outer.named_parameters(remove_duplicate=False))) == list(own) == list(outer.state_dict())


UNTIED = replace(SMALL, head="bias", criterion="ours", padding_share=0.0)


def collectives(rank, world, units, shape, case, chunked):
    with torch_may_warn():
        wrapped = shard(built(case, chunked), units, mesh(*shape))
        step(wrapped, case, rank, world)  # the first step sets streams and states up
        with Communication() as count:
            step(wrapped, case, rank, world)
    return dict(count.calls)


@pytest.mark.parametrize("units", ["", "mix", "generator", "mix generator", "mix+generator", "embed mix generator"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp2", "hsdp"])
def test_chunks_cost_no_collective(units, shape):
    world = 2 if len(shape) == 1 else 4
    case = replace(UNTIED, sizes=(((3, 5),),) * world, chunk_tokens=1)
    chunked, plain = (ranks(world, collectives, units, shape, case, c) for c in (True, False))
    assert chunked == plain
    root = "embed" not in units  # or nothing is left to it
    assert plain[0]["c10d::_allgather_base_"] == 2 * len(units.split()) + root  # a unit's twice, the root's once


def test_a_tied_head_costs_no_collective():
    chunked, plain = (ranks(2, collectives, "mix", (2,), SMALL, c) for c in (True, False))
    assert chunked == plain


def mixed_precision(rank, world, case, units, chunked):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch_may_warn():
        wrapped = shard(built(case, chunked).float(), units, mp_policy=policy)
        ((tokens, target),) = case.micro_batches(rank)
        loss = wrapped(tokens, target=target)
        total = differentiated(loss, world)
    return str(loss.total.dtype), total, gradients_of(wrapped)


@pytest.mark.parametrize(("units", "head"), [("mix", "bias"), ("mix generator", "bias"), ("mix", "tied")])
def test_bf16_parameters_with_fp32_reduction_lose_no_more_than_the_unchunked_loss(units, head):
    """At most twice as far from the float64 truth as the plain loss in the same dtypes, over all parameters."""
    case = replace(UNTIED, head=head, width=16, vocab_size=60, sizes=(((6, 9),), ((5, 8),)))
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
    hidden, target = torch.zeros(2, 4).double(), torch.zeros(2).long()
    with torch_may_warn():
        if how == "root only":
            return message(shard(build(UNTIED)).loss, hidden, target)
        deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7)).double()
        both = seqpar.ModelWithLoss(nn.Linear(4, 4).double(), seqpar.LossCompute(deep, seqpar.CrossEntropy()))
        fully_shard(deep[0], mesh=mesh(world))
        return message(fully_shard(both, mesh=mesh(world)), hidden, target=target)


@pytest.mark.parametrize("how", ["root only", "inside the generator"])
def test_the_engine_on_sharded_parameters_names_the_fix(how):
    for said in ranks(2, called_outside, how):
        assert said.startswith("RuntimeError: generator.")
        assert "is sharded (a DTensor): the loss was called outside the forward in which FSDP2 unshards it" in said
        assert "wrap both in one module, seqpar.ModelWithLoss(model, loss)" in said
        assert "make the whole generator the unit" in said


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
        total = differentiated(both.loss(both.model(tokens), target), world)
    return total, {n: g for n, g in gradients_of(both).items() if "generator" in n}


def test_a_generator_that_is_the_only_unit_is_unsharded_by_its_own_hooks():
    total, gradients = reference(UNTIED)
    heads = {n: g for n, g in gradients.items() if "generator" in n}
    assert_answers(ranks(2, head_alone, UNTIED), (total, heads))


def after_an_error(rank, world):
    """A target out of range raises on every rank; the next step is right."""
    with torch_may_warn():
        wrapped = wrap(build(UNTIED), "fsdp2, head a unit")
        ((tokens, target),) = UNTIED.micro_batches(rank)
        said = message(wrapped, tokens, target=target + 100)
        assert "forward" not in wrapped.model.generator.__dict__
    return said


def test_an_error_inside_a_unit_leaves_the_generator_as_it_was():
    for said in ranks(2, after_an_error):
        assert re.match(r"IndexError: .* outside the vocabulary \[0, 7\)", said), said


def evaluation(rank, world, units):
    with torch_may_warn():
        wrapped = shard(build(UNTIED), units)
        ((tokens, target),) = UNTIED.micro_batches(rank)
        with torch.no_grad():
            loss = wrapped(tokens, target=target)
        assert not loss.total.requires_grad
        after = step(wrapped, UNTIED, rank, world)  # training goes on
    return float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total), after


@pytest.mark.parametrize("units", ["", "mix generator"])
def test_evaluation_between_steps(units):
    total = reference(UNTIED)[0]
    for answers in ranks(2, evaluation, units):
        assert answers == pytest.approx([total, total], rel=1e-12)


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
        said = message(lambda: wrapped(tokens, target=tokens).total.backward())
    return said, all(p.grad is not None and bool(p.grad.isfinite().all()) for p in both.parameters())


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_the_probe_of_the_generator_leaves_the_wrappers_alone(wrapper):
    for said, _ in ranks(2, probed, wrapper, True):
        assert re.match("ValueError: the generator mixes rows.* other time steps", said), said
    assert ranks(2, probed, wrapper, False) == [("no error", True)] * 2


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
    said = message(engine, hidden, target)
    handle.remove()
    engine(hidden, target)
    return said


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
        assert said.startswith(
            "TypeError: the generator (FSDPLinear) is a fully_shard unit with a hook of its own, <lambda>"
        )
