"""accumulate_gradients: micro-batches and ranks together have the gradient of one batch on one device."""

import functools
import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import (
    Case,
    Communication,
    TwoLayers,
    accumulate,
    assert_answers,
    assert_two_layers,
    build,
    cases,
    count_tokens,
    gradients_of,
    message,
    reference,
    rows_of,
    torch_may_warn,
    watch_buckets,
    wrap,
)

UNEVEN = Case((((2, 3), (1, 4), (3, 2)), ((3, 5),)), (), 7, 4, "bias", "torch", "nothing", 2, 0.3, 1.0, 5)
IDLE = replace(UNEVEN, sizes=(UNEVEN.sizes[0], ()))
"""The second rank has no micro-batch at all."""


def accumulated(rank, world, case, options):
    wrapped = wrap(build(case), "ddp", **options)
    return float(accumulate(wrapped, case, rank, model=wrapped).total), gradients_of(wrapped)


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", [UNEVEN, IDLE], ids=["fewer", "none"])
def test_ddps_options_change_nothing(case, options):
    assert_answers(ranks(2, accumulated, case, options), reference(case))


def three_steps(rank, world, layout, case):
    """As a trainer does: the same wrapped module, step after step, with an optimizer."""
    with torch_may_warn():
        wrapped = wrap(build(case), layout)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for turn in range(3):
            optimizer.zero_grad()
            options = {"model": wrapped, "group": dist.group.WORLD, "agree": {"step": turn}}
            # A rank may be idle in any step
            accumulate(wrapped, case, (rank + turn) % world, **options)
            optimizer.step()
        for p in wrapped.parameters():
            p.grad = p.detach()  # hand the parameters back the way gradients are
    return 0.0, gradients_of(wrapped)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp2, head a unit", "fsdp2, head in a shared unit", "hsdp"])
def test_three_steps_of_training_are_the_single_devices(layout, world):
    case = replace(IDLE, sizes=IDLE.sizes * (world // 2))
    both = build(case)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    for turn in range(3):
        optimizer.zero_grad()
        micro_batches = [m for rank in range(world) for m in case.micro_batches((rank + turn) % world)]
        losses = [both(tokens, target=target) for tokens, target in micro_batches]
        sum(losses[1:], start=losses[0]).mean.backward()
        optimizer.step()
    expected = 0.0, {n: p.detach() for n, p in both.named_parameters()}
    assert_answers(ranks(world, three_steps, layout, case), expected)


class PlantedError(KeyboardInterrupt):
    """Ctrl-C, which any error of a step must be handled as."""


def raise_planted(*_):
    raise PlantedError


def planted_in_the_backward(module, args, output):
    output.register_hook(raise_planted)


def step_after_an_error(rank, world, layout, place, case):
    """The second micro-batch of a step fails on every rank; then `zero_grad`, and the same step once more."""
    with torch_may_warn():
        wrapped = wrap(build(case), layout)
        inner = wrapped.module if layout == "ddp" else wrapped
        calls = []

        def loss_of(micro_batch):
            calls.append(micro_batch)
            hooks = []
            if len(calls) == 2 and place == "in the forward":
                hooks.append(inner.model.embed.register_forward_hook(raise_planted))
            if len(calls) == 2 and place == "in the backward":
                hooks.append(inner.model.embed.register_forward_hook(planted_in_the_backward))
            try:
                return wrapped(micro_batch[0], target=micro_batch[1])
            finally:
                for hook in hooks:
                    hook.remove()

        def backward(loss):
            if len(calls) == 2 and place == "between them":
                raise_planted()
            loss.backward()

        def step():
            given = case.micro_batches(rank), loss_of, count_tokens(case)
            return seqpar.accumulate_gradients(*given, model=wrapped, group=dist.group.WORLD, backward=backward)

        with pytest.raises(PlantedError):
            step()
        wrapped.zero_grad()
        return float(step().total), gradients_of(wrapped)


PLACES = ["in the forward", "between them"]
# Older ones cannot go on after an error in the middle of a backward
if hasattr(FSDPModule, "reset_iter_state"):
    PLACES.append("in the backward")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp2, head a unit"])
def test_the_step_after_an_error_has_nothing_of_the_failed_one(layout, place):
    assert_answers(ranks(2, step_after_an_error, layout, place, UNEVEN), reference(UNEVEN))


@given(cases(1, micro_batches=(1, 4)))
def test_without_ranks_it_is_gradient_accumulation(case):
    both = build(case)
    loss = accumulate(both, case, 0)
    assert_answers([(float(loss.total), {n: p.grad for n, p in both.named_parameters()})], reference(case))
    assert not loss.total.requires_grad


def summed_by_hand(rank, world, case):
    both = build(case)
    loss = accumulate(both, case, rank, group=dist.group.WORLD)
    for p in both.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
    return float(loss.total), gradients_of(both)


@given(cases(2, micro_batches=(0, 2)))
def test_without_a_wrapper_each_rank_has_its_part_of_the_sum(case):
    assert_answers(ranks(2, summed_by_hand, case), reference(case))


def reductions(rank, world, layout, case):
    """How often a step reduces gradients."""
    with torch_may_warn(), Communication() as count:
        wrapped = wrap(build(case), layout)
        buckets = watch_buckets(wrapped) if layout == "ddp" else []
        accumulate(wrapped, case, rank, model=wrapped, group=dist.group.WORLD)
    return buckets, count.calls["c10d::_reduce_scatter_base_"]


@pytest.mark.parametrize("case", [UNEVEN, IDLE], ids=["fewer", "none"])
def test_gradients_are_reduced_once_a_step(case):
    assert ranks(2, reductions, "ddp", case) == [([0], 0)] * 2  # one bucket
    assert ranks(2, reductions, "fsdp2", case) == [([], 2)] * 2  # two units


def error_of(rank, world, wrong):
    case = UNEVEN
    count = count_tokens(case)
    if wrong == "count" and rank == 1:
        count = lambda m: m[1].numel() + 1  # noqa: E731
    if wrong == "parameters" and rank == 1:
        case = replace(case, frozen="head")
    both = build(case)
    wrapped = Reducing(both) if wrong in ("parameters", "dtype") else wrap(both, "ddp")
    if wrong == "dtype" and rank == 1:
        wrapped.float()
    micro_batches = [] if wrong == "empty" else case.micro_batches(rank)
    agree = {"facts": {"vocabulary": 7 + rank}, "steps": {"step": 10 + rank}}.get(wrong)
    given = micro_batches, lambda m: wrapped(m[0], target=m[1]), count
    return message(seqpar.accumulate_gradients, *given, model=wrapped, group=dist.group.WORLD, agree=agree)


class Reducing(nn.Module):
    """Stands for a wrapper that reduces gradients."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def no_sync(self):
        raise AssertionError("nothing may run before ranks agree")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("facts", r"ranks disagree on vocabulary: 7 on ranks \[0\]; 8 on ranks \[1\]"),
        ("steps", r"ranks disagree on step: 10 on ranks \[0\]; 11 on ranks \[1\]"),
        ("parameters", r"ranks disagree on the trainable parameters: .* on ranks \[0\]; .* on ranks \[1\]"),
        ("dtype", r"ranks disagree on the parameters' dtypes: .*float64.* on ranks \[0\]; .*float32.* on ranks \[1\]"),
        ("count", r"tokens_of counted \d+ tokens in this step and the losses \d+"),
        ("empty", "there is no micro-batch on any of 2 ranks"),
    ],
)
def test_every_rank_names_what_is_wrong(wrong, message):
    for said in ranks(2, error_of, wrong):
        assert re.search(message, said), said


def group_errors(rank, world):
    alone = dist.new_group([0]), dist.new_group([1])
    with torch_may_warn():
        wrapped = wrap(build(UNEVEN), "fsdp2"), wrap(build(UNEVEN), "ddp")
    groups = None, alone[rank]
    pairs = zip(wrapped, groups, strict=True)
    return [message(seqpar.accumulate_gradients, [], len, len, model=model, group=group) for model, group in pairs]


def test_the_group_must_be_the_one_that_gradients_are_reduced_over():
    for fsdp, ddp in ranks(2, group_errors):
        assert fsdp.startswith("ValueError: name the group of ranks that FSDP2 reduces over")
        reduced = r"ValueError: the gradients of the model are summed over the 2 ranks \[0, 1\] and divided by 2"
        assert re.match(rf"{reduced}, and group has the 1 ranks \[[01]\]; pass the group of those ranks", ddp), ddp


def on_two_axes(rank, world, axis, above, factor):
    """The gradients, or the error, of a model on 2 x 2 ranks, its upper layer on both axes or on the shards alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = TwoLayers()
    fully_shard(model.above, mesh=mesh if above == "both" else mesh["shard"])
    fully_shard(model, mesh=mesh)
    if factor is not None:
        model.above.set_gradient_divide_factor(factor)
    group = dist.group.WORLD if axis == "both" else mesh.get_group(axis)
    said = message(seqpar.accumulate_gradients, [rows_of(rank)], model, len, model=model, group=group)
    return gradients_of(model) if said == "no error" else said


@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_a_group_of_one_axis_of_a_models_mesh_is_refused(axis):
    for said in ranks(4, on_two_axes, axis, "both", None):
        reduced = r"ValueError: the gradients of the model are summed over the 4 ranks \[0, 1, 2, 3\] and divided by 4"
        assert re.match(rf"{reduced}, and group has the 2 ranks \[\d, \d\]; pass the group of those ranks", said), said


def on_one_axis(rank, world, axis):
    """The gradients of a model that one axis of a mesh of 2 x 2 reduces, as beside tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = TwoLayers()
    fully_shard(model, mesh=mesh[axis])
    seqpar.accumulate_gradients([rows_of(rank)], model, len, model=model, group=mesh.get_group(axis))
    return gradients_of(model)


@pytest.mark.parametrize(("axis", "together"), [("shard", ((0, 1), (2, 3))), ("replicate", ((0, 2), (1, 3)))])
def test_a_model_on_one_axis_takes_the_group_of_that_axis(axis, together):
    found = ranks(4, on_one_axis, axis)
    for members in together:
        assert_two_layers(members, [found[rank] for rank in members])


def test_units_on_fewer_ranks_than_the_group_need_the_factor():
    for said in ranks(4, on_two_axes, "both", "shards", None):
        summed = r"ValueError: the gradients of above are summed over the 2 ranks \[[0-3], [0-3]\] and divided by 2"
        assert re.match(rf"{summed}, and group has the 4 ranks .*set_gradient_divide_factor\(4\)", said), said
    for found in ranks(4, on_two_axes, "both", "shards", 4.0):
        assert sorted(found) == ["above.bias", "above.weight", "below.bias", "below.weight"]


def test_a_changed_factor_is_refused():
    for said in ranks(4, on_two_axes, "both", "both", 1.0):
        summed = r"ValueError: the gradients of above are summed over the 4 ranks .* and divided by 1"
        assert re.match(rf"{summed}, and group has the 4 ranks .*; .* leave the divide factor unchanged", said), said


def test_the_group_of_both_axes_has_the_gradient_of_all_ranks_tokens():
    assert_two_layers(range(4), ranks(4, on_two_axes, "both", "both", None))


def test_a_model_that_reduces_nothing_is_refused():
    with pytest.raises(TypeError, match="model is a Linear; it must be what reduces the gradients"):
        seqpar.accumulate_gradients([1], lambda m: m, lambda m: 1, model=nn.Linear(1, 1))


def test_the_loss_is_divided_by_the_tokens_of_all_micro_batches_not_by_each_ones():
    """A mean of means would differ by far."""
    hidden = torch.ones(1, requires_grad=True)
    loss = seqpar.accumulate_gradients(
        [1, 3], lambda n: seqpar.TokenLoss(hidden.sum() * n * n, torch.tensor(n)), lambda n: n
    )
    assert hidden.grad is not None
    assert hidden.grad.item() == (1 + 9) / 4
    assert (loss.total.item(), loss.tokens.item(), loss.mean.item()) == (10, 4, 2.5)
    assert loss.nll is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_sum_over_no_group_is_the_loss_itself(counts):
    losses = [
        seqpar.TokenLoss(torch.tensor(float(n)), torch.tensor(n), torch.tensor(1.0 * n), torch.tensor(n))
        for n in counts
    ]
    whole = seqpar.sum_over_ranks(sum(losses[1:], start=losses[0]), None)
    assert [t.item() for t in whole] == [sum(counts)] * 4
    assert [t.dtype for t in whole] == [t.dtype for t in losses[0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_counts_of_a_narrow_dtype_are_summed_in_a_wide_one(dtype):
    tokens = torch.tensor({torch.uint8: 200, torch.int16: 20_000}.get(dtype, 1), dtype=dtype)

    def loss_of(weight):
        return seqpar.TokenLoss(weight.sum() * tokens, tokens.long())

    weight = torch.ones(3, requires_grad=True)
    loss = seqpar.accumulate_gradients([weight] * 3, loss_of, lambda _: tokens)
    assert loss.tokens == 3 * int(tokens)
    torch.testing.assert_close(weight.grad, torch.ones(3))


class Keeping(torch.autograd.Function):
    """A sum whose node keeps something besides saved tensors, which backward would free."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.detach().clone()
        Keeping.all_kept.append(weakref.ref(ctx.kept))
        return x.sum()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * torch.ones_like(ctx.kept)


def test_the_graph_of_a_micro_batch_is_freed_before_the_next_ones_forward():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    Keeping.all_kept = []

    def loss_of(x):
        gc.collect()
        assert all(kept() is None for kept in Keeping.all_kept), "an earlier micro-batch's graph is still held"
        return seqpar.TokenLoss(Keeping.apply(x * weight), torch.tensor(3))

    seqpar.accumulate_gradients([torch.ones(3).double() for _ in range(4)], loss_of, len)
    assert len(Keeping.all_kept) == 4


def without_group_or_model(rank, world, layout):
    """The refusal on this rank; then the gradient of one that is alone, and where it is."""
    weight = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)

    def step(**given):
        return seqpar.accumulate_gradients(
            [torch.ones(3) * (rank + 1)], lambda m: seqpar.TokenLoss((m * weight).sum(), torch.tensor(3)), len, **given
        )

    with pytest.raises(ValueError, match="neither model nor group is given, and there are 2 ranks") as error:
        step()
    assert weight.grad is None
    step(group=seqpar.THIS_PROCESS)
    alone = weight.grad.tolist()
    with torch_may_warn():
        wrapped = wrap(build(UNEVEN), layout)
    other = message(seqpar.accumulate_gradients, [], len, len, model=wrapped, group=seqpar.THIS_PROCESS)
    return str(error.value), other, alone


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_several_ranks_need_a_group_or_a_model_or_the_word_that_this_process_is_meant(layout):
    for rank, (refusal, other, alone) in enumerate(ranks(2, without_group_or_model, layout)):
        for way_out in ("model=", "group=", "torch.distributed.group.WORLD", "seqpar.THIS_PROCESS"):
            assert way_out in refusal
        assert re.match(rf"ValueError: .* over the 2 ranks .* group has the 1 ranks \[{rank}\]", other), other
        assert alone == [(rank + 1) / 3] * 3


class HolderWithSlots:
    __slots__ = ("wrapped",)

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __call__(self, m):
        return of_first(self.wrapped, m)


class Holder:
    """A trainer: its loss calls what it holds, or the module inside that."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def loss_of(self, m):
        return self.wrapped(m[0], target=m[1])

    def __call__(self, m):
        return self.loss_of(m)


def of_first(wrapped, m):
    return wrapped(m[0], target=m[1])


def of_inner(modules, m):
    return of_first(modules[0], m)


HELD = None


def of_global(m):
    return of_first(HELD, m)


REACHED = {
    "a lambda": lambda w: lambda m: w(m[0], target=m[1]),
    "a method": lambda w: Holder(w).loss_of,
    "an object": Holder,
    "an object with slots": HolderWithSlots,
    "a partial": lambda w: functools.partial(of_first, w),
    "a default": lambda w: lambda m, w=w: of_first(w, m),
    "a function of a function": lambda w: lambda m: (lambda m: {"w": w}["w"](m[0], target=m[1]))(m),
    "a global": lambda w: of_global,
    "a module around it": lambda w: functools.partial(of_inner, nn.ModuleList([w])),
}


def unnamed(rank, world, layout, case):
    """Whether each way to call the wrapper is refused, and the gradient where it is not called."""
    global HELD
    with torch_may_warn():
        HELD = wrapped = wrap(build(case), layout)
        count = count_tokens(case)
        said = {}
        for group in (dist.group.WORLD, seqpar.THIS_PROCESS):
            for name, reach in REACHED.items():
                given = case.micro_batches(rank), reach(wrapped), count
                said[name, str(group)] = message(seqpar.accumulate_gradients, *given, group=group)
        if layout != "ddp":
            return said, None
        wrapped.zero_grad()

        def inside(m):
            with torch.no_grad():
                wrapped(m[0], target=m[1])
            return wrapped.module(m[0], target=m[1])

        loss = seqpar.accumulate_gradients(case.micro_batches(rank), inside, count, group=dist.group.WORLD)
        for p in wrapped.parameters():
            dist.all_reduce(p.grad)
        return said, (float(loss.total), gradients_of(wrapped))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_wrapper_that_the_loss_calls_and_that_is_not_given_is_refused(layout):
    """It takes the mean over ranks, in silence. The module inside it may be called, whose gradients are a sum."""
    answers = ranks(2, unnamed, layout, UNEVEN)
    for said, _ in answers:
        assert len(said) == 2 * len(REACHED)
        for text in said.values():
            assert re.fullmatch("ValueError: .* but model is not given.* pass that module as model=.*", text), text
    if layout == "ddp":
        assert_answers([answer for _, answer in answers], reference(UNEVEN))


def of_a_later_micro_batch(rank, world, which, at):
    """What only one micro-batch uses: a parameter beside the model, or a wrapper that is not given."""
    torch.manual_seed(0)
    alone = nn.Linear(4, 5).double()
    wrapped = DistributedDataParallel(nn.Linear(4, 5).double())
    extra = nn.Parameter(torch.ones(4).double())
    batches = [(torch.randn(n, 4).double(), torch.arange(n) % 5, place == at) for place, n in enumerate((3, 5, 2))]

    def loss_of(m):
        hidden, target, is_it = m
        model = wrapped if which == "parameter" or is_it else alone
        scores = model(hidden * extra if which == "parameter" and is_it else hidden)
        loss = F.cross_entropy(scores, target, reduction="sum")
        return seqpar.TokenLoss(loss, torch.tensor(len(target)))

    given = {"model": wrapped} if which == "parameter" else {"group": dist.group.WORLD}
    return message(seqpar.accumulate_gradients, batches, loss_of, lambda m: len(m[1]), **given)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("parameter", r"ValueError: the loss depends on a parameter of shape \(4,\) that model does not have"),
        ("wrapper", r"ValueError: loss_of calls a DistributedDataParallel, which takes the mean of gradients"),
    ],
)
def test_what_nothing_reduces_is_looked_for_in_every_micro_batch(which, said, at):
    for answer in ranks(2, of_a_later_micro_batch, which, at):
        assert re.match(said, answer), answer


def unfrozen_in_turn(rank, world, steps):
    """Two layers of a model in DDP, of which one is frozen after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)).double()
    model[1].requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    batch = (torch.randn(3, 4).double(), torch.arange(3))

    def step():
        wrapped.zero_grad()
        seqpar.accumulate_gradients(
            [batch],
            lambda m: seqpar.TokenLoss(F.cross_entropy(wrapped(m[0]), m[1], reduction="sum"), torch.tensor(3)),
            lambda m: 3,
            model=wrapped,
        )

    for frozen in steps:
        for number in (0, 1):
            model[number].requires_grad_(number not in frozen)
        if (said := message(step)) != "no error":
            return said
    return "no error"


def test_a_layer_that_is_unfrozen_in_the_place_of_another_is_not_reduced():
    for answer in ranks(2, unfrozen_in_turn, [(1,), (0,)]):
        assert answer.startswith(
            "ValueError: module.1.weight is trainable and was not when DistributedDataParallel was"
        )
    # Those that it reduces may be frozen, and trained again
    for answer in ranks(2, unfrozen_in_turn, [(1,), (0, 1), (1,)]):
        assert answer == "no error"


def losses_of_two_kinds(rank, world, missing):
    fields = {"nll": torch.tensor(2.0), "correct": torch.tensor(3)}
    if rank == 1:
        fields |= dict.fromkeys(missing)
    loss = seqpar.TokenLoss(torch.tensor(4.0), torch.tensor(5), **fields)
    return seqpar.sum_over_ranks(loss, dist.group.WORLD)


@pytest.mark.parametrize("missing", [(), ("nll",), ("correct",), ("nll", "correct")])
def test_losses_of_which_some_ranks_count_less_are_summed_by_field(missing):
    for found in ranks(2, losses_of_two_kinds, missing):
        assert (found.total, found.tokens) == (8, 10)
        assert found.nll == (None if "nll" in missing else 4)
        assert found.correct == (None if "correct" in missing else 6)
        assert found.tokens.dtype == torch.int64


def left_without_reduction(rank, world, switch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    fully_shard(model[1])
    fully_shard(model)
    getattr(model, switch)(False)
    batch = torch.ones(2, 3).double()

    def loss_of(x):
        return seqpar.TokenLoss(model(x).square().sum(), torch.tensor(2))

    def step():
        seqpar.accumulate_gradients([batch], loss_of, len, model=model, group=dist.group.WORLD)

    said = message(step)
    getattr(model, switch)(True)
    step()
    return said, all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_an_fsdp2_module_that_is_told_not_to_reduce_is_refused(switch):
    for said, has_gradients in ranks(2, left_without_reduction, switch):
        assert said.startswith("RuntimeError: FSDP2 is told not to reduce the gradients of ")
        assert has_gradients
