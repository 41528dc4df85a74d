"""DistributedDataParallel round ModelWithLoss has the single device's loss and gradients, whatever its options."""

import io
import pickle

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing.ranks import RankError, ranks
from tests.seqpar.distributed.layouts import Case, Model, assert_answers, build, cases, gradients_of, reference

OPTIONS = st.builds(
    lambda graph, more: graph | more,  # both of the first would be redundant, and torch warns
    st.sampled_from([{}, {"find_unused_parameters": True}, {"static_graph": True}]),
    st.fixed_dictionaries(
        {},
        optional={"gradient_as_bucket_view": st.just(True), "bucket_cap_mb": st.sampled_from([1e-6, 1e-4, 25])},
    ),
)

SMALL = Case((((2, 3),), ((3, 5),)), (), 7, 4, "tied", "torch", "nothing", 2, 0.3, 1.0, 5)
"""Two ranks with 6 and 15 targets, a tied head."""


def step(wrapped, case, rank, world):
    """The two lines of ModelWithLoss's docstring, with an upstream factor."""
    ((tokens, target),) = case.micro_batches(rank)
    loss = wrapped(tokens, target=target)
    count = seqpar.group_sum(loss.tokens, dist.group.WORLD).clamp(min=1)
    (loss.total * case.factor * world / count).backward()
    return float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total)


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


def reductions(rank, world, case, chunked):
    """How often DDP's bucket of gradients is reduced in a step."""
    both = build(case)
    if not chunked:
        both = seqpar.ModelWithLoss(both.model, PlainLoss(both.model.generator))
    calls = []

    def counting(state, bucket):
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    wrapped = DistributedDataParallel(both)
    wrapped.register_comm_hook(None, counting)
    step(wrapped, case, rank, world)
    return calls


class PlainLoss(nn.Module):
    """The un-chunked loss, in ModelWithLoss's place."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, hidden, target):
        logits, target = self.generator(hidden).flatten(0, 1), target.flatten()
        total = nn.functional.cross_entropy(logits, target, reduction="sum")
        return seqpar.TokenLoss(total, (target != -100).sum())


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
    other = build(Case(**{**vars(SMALL), "seed": 6}))
    assert not torch.equal(other.model.embed.weight, both.model.embed.weight)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.model.embed.weight, both.model.embed.weight)
    assert other.loss.head["generator"].weight is other.model.embed.weight
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({k: v for k, v in both.state_dict().items() if "mix" not in k})


def test_a_criterion_with_state_is_saved_and_moves_with_the_module():
    case = Case(**{**vars(SMALL), "criterion": "class weights"})
    both = build(case)
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
    both = build(SMALL)
    try:
        if how == "generator":
            seqpar.LossCompute(DistributedDataParallel(both.model.generator), seqpar.CrossEntropy())
        elif how == "model":
            seqpar.ModelWithLoss(DistributedDataParallel(both.model), both.loss)
        else:
            seqpar.ModelWithLoss(both.model, DistributedDataParallel(both.loss))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["generator", "model", "loss"])
def test_ddp_round_a_part_is_refused_and_the_fix_is_named(how):
    for message in ranks(2, wraps_too_little, how):
        assert message.startswith(how)
        assert "wrap both in one module, seqpar.ModelWithLoss(model, loss)" in message


def ddp_round_the_model_alone(rank, world, case, options):
    """What ModelWithLoss is there to prevent: the engine is called on what the wrapped model returns."""
    both = build(case)
    wrapped = DistributedDataParallel(both.model, **options)
    ((tokens, target),) = case.micro_batches(rank)
    loss = both.loss(wrapped(tokens), target)
    (loss.total * case.factor * world / seqpar.group_sum(loss.tokens, dist.group.WORLD)).backward()
    total = float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total)
    return total, {f"model.{n}": g for n, g in gradients_of(wrapped).items()}


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("head", ["tied", "bias"])
def test_ddp_round_the_model_alone_is_right_or_refused_and_never_wrong(head, options):
    """A generator inside the model has its hooks on its parameters; DDP itself refuses what it took for unused."""
    case = Case(**{**vars(SMALL), "head": head})
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
