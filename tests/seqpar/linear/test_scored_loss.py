"""Any function of a token's own scores: value and every gradient are those of all logits at once, within 1e-12."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import seqpar
from seqpar.core.row_independence import largest_difference
from seqpar.testing import assert_same_gradients, assert_same_results
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.engine.test_engine_scores import generator_of
from tests.seqpar.kernels.interpreted import DEVICE, KERNELS, NUMPY_SAYS, kernels, moved
from tests.seqpar.linear.scored_cases import LOSSES, PER_TOKEN, plain_scored, scored_cases
from tests.seqpar.recording import recorded

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

LEAVES = ("hidden", "weight", "bias", *PER_TOKEN)


def leaves_of(tensors):
    return {name: tensors[name] for name in LEAVES if name in tensors and tensors[name].requires_grad}


def every_leaf(tensors):
    """Also those that need no gradient, which must have none."""
    return {name: tensors[name] for name in LEAVES if name in tensors}


def derivatives(result, leaves):
    """Those of a plain result, which need not depend on every leaf, or on any."""
    if not result.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(result, list(leaves.values()), allow_unused=True)


def plain(case, tensors):
    return plain_scored(case.loss, tensors, **case.options, entropy=case.entropy)


def ours(case, tensors, **more):
    return seqpar.scored_loss(**tensors, loss=LOSSES[case.loss], **case.own_options, **more)


@given(scored_cases(), st.sampled_from([2**23, 200]), st.sampled_from([1.0, -3.0, 0.0]))
def test_every_loss_has_the_value_and_gradients_of_all_logits_at_once(case, cache, upstream):
    tensors = case.tensors()
    with patch("seqpar.linear.projection.CACHE", cache):
        assert_same_gradients(
            lambda: ours(case, tensors).total * upstream, lambda: plain(case, tensors) * upstream, every_leaf(tensors)
        )


@given(scored_cases())
def test_counts_and_the_value_without_gradients(case):
    tensors = case.tensors()
    kept = tensors["target"] != case.scores.linear.padding
    with torch.no_grad():
        found = ours(case, tensors)
        expected = plain(case, tensors)
        of_target = seqpar.token_scores(
            **{n: t for n, t in tensors.items() if n not in PER_TOKEN},
            **{n: v for n, v in case.options.items() if n != "ids"},
            top_k=1,
        )
    assert found.tokens == kept.sum()
    torch.testing.assert_close(found.total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.nll, -of_target.log_prob.sum(), rtol=1e-12, atol=1e-12)
    assert found.correct == ((of_target.top_ids.squeeze(-1) == tensors["target"]) & kept).sum()


@given(scored_cases())
def test_ignored_rows_of_a_recorded_loss_count_for_nothing(case):
    """Not even where their hidden state, or what the loss takes, is no number."""
    tensors = case.tensors()
    reference = case.tensors()
    ignored = tensors["target"] == case.scores.linear.padding
    with torch.no_grad():
        for name in ("hidden", *PER_TOKEN):
            tensors[name][ignored] = torch.nan
    leaves, plain_leaves = leaves_of(tensors), leaves_of(reference)
    with recorded():
        loss = ours(case, tensors)
        grads = torch.autograd.grad(loss.total, list(leaves.values())) if leaves else ()
    expected = plain(case, reference)
    right = derivatives(expected, plain_leaves)
    found = dict(zip(leaves, grads, strict=True))
    plain_found = {n: torch.zeros_like(found[n]) if b is None else b for n, b in zip(found, right, strict=True)}
    assert_same_results((loss.total.detach(), found), (expected.detach(), plain_found))
    assert loss.tokens == (~ignored).sum()


@pytest.mark.unswitched
@pytest.mark.filterwarnings(NUMPY_SAYS)
@settings(max_examples=30)
@given(scored_cases())
def test_the_kernels_have_the_same_losses(case):
    """Few examples: the interpreter is slow, and the kernels' own tests vary their options."""
    tensors = moved(case.tensors())
    with kernels() as launched:
        if DEVICE == "cpu":
            assert_same_gradients(lambda: ours(case, tensors).total, lambda: plain(case, tensors), every_leaf(tensors))
    assert set(launched) <= KERNELS


@given(scored_cases(), st.sampled_from([None, ["cpu"], ["cpu"] * 2, ["cpu"] * 3]))
def test_over_any_device_list_it_is_the_loss_of_one_device(case, devices):
    tensors = case.tensors()
    generator = generator_of(tensors)
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(ignore_index=case.scores.linear.padding), devices)
    options = {n: v for n, v in case.own_options.items() if n not in ("ignore_index", "chunk_tokens")}
    per_token = {name: tensors[name] for name in PER_TOKEN}
    leaves = every_leaf({**tensors, **dict(generator.named_parameters())})
    assert_same_gradients(
        lambda: (
            engine.scored_loss(tensors["hidden"], tensors["target"], LOSSES[case.loss], **options, **per_token).total
        ),
        lambda: plain(case, {**tensors, **dict(generator.named_parameters())}),
        leaves,
    )


def part_of_a_rank(rank, world, case, split, by_kernel):
    tensors = case.tensors()
    vocab = seqpar.VocabShard.of(split[rank], dist.group.WORLD)
    for name in ("weight", "bias"):
        if name in tensors:
            own = tensors[name].detach()[vocab.start : vocab.start + split[rank]]
            tensors[name] = own.requires_grad_(tensors[name].requires_grad)
    leaves = leaves_of(tensors)
    loss = ours(case, tensors, vocab=vocab)
    grads = torch.autograd.grad(loss.total, list(leaves.values())) if leaves else ()
    return float(loss.total.detach()), dict(zip(leaves, (g.numpy() for g in grads), strict=True)), int(loss.correct)


@given(st.data())
def test_a_split_vocabulary_has_the_loss_of_one_device(data):
    world, case = data.draw(st.sampled_from([2, 3])), data.draw(scored_cases())
    split = data.draw(vocabulary_splits(case.scores.linear.vocab_size, world))
    tensors = case.tensors()
    leaves = leaves_of(tensors)
    expected = plain(case, tensors)
    right = derivatives(expected, leaves)
    right = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, right, strict=True)}
    answers = ranks(world, part_of_a_rank, case, split, False)
    correct = int(ours(case, tensors).correct)
    # Every rank has the whole value and gradients, but its own part of the projection's
    parts = {"weight", "bias"} & set(leaves)
    joined = {n: torch.cat([torch.as_tensor(grads[n]) for _, grads, _ in answers]) for n in parts}
    for total, grads, hits in answers:
        found = {n: torch.as_tensor(g) for n, g in grads.items()} | joined
        assert_same_results((torch.tensor(total, dtype=torch.float64), found), (expected.detach(), right))
        assert hits == correct


def without_tokens(rank, world):
    hidden, weight = torch.zeros(1, 0, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    vocab, old = seqpar.VocabShard.of(2, dist.group.WORLD), torch.zeros(1, 0, 2, requires_grad=True)
    target = torch.zeros(1, 0, dtype=torch.long)
    loss = seqpar.scored_loss(hidden, weight, target, lambda s, old: s.lse - old[:, 0], vocab=vocab, old=old)
    loss.total.backward()
    return int(loss.tokens), float(loss.total.detach()), weight.grad.numpy(), tuple(old.grad.shape)


def test_a_split_vocabulary_without_tokens_has_the_loss_0():
    """As on a sequence rank that has no time steps."""
    for tokens, total, grad, shape in ranks(2, without_tokens):
        assert (tokens, total, shape) == (0, 0.0, (1, 0, 2))
        assert not grad.any()


class Policy(nn.Module):
    """A trunk, a projection and the loss inside, as DDP and FSDP2 wrap them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 7).double()
        self.engine = seqpar.LossCompute(self.head, seqpar.CrossEntropy())

    def forward(self, inputs, target, old, advantage):
        per_token = {"old": old, "advantage": advantage, "ids_weight": torch.zeros_like(old)}
        return self.engine.scored_loss(self.trunk(inputs), target, LOSSES["surrogate"], entropy=True, **per_token)


def micro_batches(rank):
    random = torch.Generator().manual_seed(rank)
    batches = []
    for rows in (5, 2 + rank):
        inputs = torch.randn(rows, 3, generator=random).double()
        target = torch.randint(7, (rows,), generator=random)
        target[0] = -100
        batches.append((inputs, target, inputs[:, 0] - 2, inputs[:, 1]))
    return batches


def trained_over_ranks(rank, world, wrapper):
    from torch.distributed.fsdp import fully_shard

    model = Policy()
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model.head)
        wrapped = fully_shard(model)
    loss = seqpar.accumulate_gradients(
        micro_batches(rank),
        lambda batch: wrapped(*batch),
        lambda batch: int((batch[1] != -100).sum()),
        model=wrapped,
        group=dist.group.WORLD,
    )
    wholes = {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in model.named_parameters()}
    return float(loss.total), {n: g.numpy() for n, g in wholes.items()}


@pytest.mark.unswitched  # the ranks start from the CPU's random numbers
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_over_data_ranks_and_micro_batches_the_step_is_that_of_one_device(wrapper):
    model = Policy()
    losses = [model(*batch) for rank in range(2) for batch in micro_batches(rank)]
    whole = sum(losses)
    (whole.total / whole.tokens).backward()
    for total, grads in ranks(2, trained_over_ranks, wrapper):
        assert total == pytest.approx(float(whole.total.detach()), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.as_tensor(grads[name]), parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.unswitched  # the emulated device's own addmm is an mm of the CPU, which would be counted as well
@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
@pytest.mark.parametrize("name", LOSSES)
def test_no_more_products_than_the_documented_ones(name, frozen, products):
    rows, width, classes = 64, 48, 80
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=not frozen)
    target, per_token = torch.randint(classes, (rows,)), {n: torch.randn(rows) for n in PER_TOKEN[:2]}
    entropy = name in ("surrogate", "confident")

    def step():
        loss = seqpar.scored_loss(
            hidden, weight, target, LOSSES[name], entropy=entropy, **per_token, ids_weight=torch.zeros(rows, 0)
        )
        loss.total.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as counted:
        step()
    flops = sum(event.flops for event in counted.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    assert flops == products * 2 * rows * width * classes


MIXING = {
    "a mean": lambda s: s.log_prob - s.log_prob.mean(),
    "a detached mean": lambda s: s.log_prob * (s.entropy.detach().mean() + 1),
    "a share of the rows": lambda s: s.log_prob / len(s.log_prob),
    "a softmax over the rows": lambda s: s.entropy.softmax(0),
    "a place": lambda s: s.log_prob * torch.arange(len(s.log_prob)),
    "the row before": lambda s: s.log_prob - s.lse.roll(1),
    "a running sum": lambda s: s.log_prob.cumsum(0),
    "the largest": lambda s: s.log_prob - s.log_prob.amax(),
    "the order": lambda s: s.log_prob.sort().values,
    "a weight of another row": lambda s, advantage: s.log_prob * advantage.flip(0),
}


NEIGHBOURS, THREE_APART, OPPOSITE = [1, 0, 3, 2, 5, 4, 7, 6], [3, 1, 2, 0, 7, 5, 6, 4], [4, 5, 6, 7, 0, 1, 2, 3]
FIRST_OPPOSITE, LAST_OPPOSITE = [4, 1, 2, 3, 0, 5, 6, 7], [0, 1, 2, 7, 4, 5, 6, 3]


@pytest.mark.parametrize("other", [NEIGHBOURS, THREE_APART, OPPOSITE, FIRST_OPPOSITE, LAST_OPPOSITE])
def test_mixing_that_shows_in_the_gradient_alone_is_found_in_the_same_half_and_in_the_other_one(other):
    """Its value is that of the row alone; within a half one of the two rows is even, and opposite ones are both."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(9, 4)

    def loss(scores):
        return scores.log_prob + 0.01 * (scores.lse[other] - scores.lse[other].detach())

    with pytest.raises(ValueError, match=r"^loss mixes rows: a row's loss has a gradient in other rows"):
        seqpar.scored_loss(hidden, weight, torch.zeros(8, dtype=torch.long), loss)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("rows", [2, 7])
def test_a_loss_that_mixes_rows_is_found_and_refused(name, grad, rows):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 4, requires_grad=grad), torch.randn(9, 4)
    given = {"advantage": torch.randn(rows)} if "weight" in name else {}
    with pytest.raises(ValueError, match=r"^loss mixes rows: .*pass it as a per-token keyword"):
        seqpar.scored_loss(hidden, weight, torch.arange(rows), MIXING[name], entropy=True, **given)


@pytest.mark.parametrize("padding", [slice(47, 48), slice(20, 22), slice(0, 1), slice(8, 48)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_weight_by_the_share_of_padding_is_found_wherever_the_padding_is(padding, wide, dtype):
    """In the first chunk, of 8 rows, there may be none, or nothing else."""
    torch.manual_seed(0)
    hidden, weight, mask = torch.randn(48, 4, requires_grad=True), torch.randn(9, 4), torch.ones(48).to(dtype)
    mask[padding] = 0

    def loss(scores, mask):
        mask = mask.double().reshape(len(mask), -1)[:, 0]
        return scores.log_prob * mask * mask.mean()

    mask = mask.unsqueeze(1).expand(48, 2) if wide else mask
    with pytest.raises(ValueError, match=r"^loss mixes rows"):
        seqpar.scored_loss(hidden, weight, torch.arange(48) % 9, loss, mask=mask, chunk_tokens=8)


@pytest.mark.parametrize("grad", [True, False])
def test_mixing_that_only_a_later_batch_shows_is_found_in_its_call(grad):
    """Where the largest loss is limited to twice the mean of the chunk's, most chunks have none that large."""
    hidden, weight, bias = torch.zeros(8, 4, requires_grad=grad), torch.zeros(9, 4), torch.zeros(9)

    def limited(scores):
        return torch.minimum(-scores.log_prob, -2 * scores.log_prob.detach().mean())

    for _ in range(3):
        seqpar.scored_loss(hidden, weight, torch.zeros(8, dtype=torch.long), limited, bias=bias)
    bias[3] = -40
    with pytest.raises(ValueError, match=r"^loss mixes rows: a row's loss changes with the other rows"):
        seqpar.scored_loss(hidden, weight, torch.tensor([0] * 7 + [3]), limited, bias=bias)


def test_a_difference_is_relative_to_the_largest_number_that_is_finite_in_both():
    inf = float("inf")
    assert largest_difference(torch.tensor([inf, 2.0, 4.0]), torch.tensor([inf, 2.0, 3.0])) == 0.25
    assert largest_difference(torch.tensor([0.25, -inf]), torch.tensor([0.5, -inf])) == 0.5
    assert largest_difference(torch.tensor([2.0, float("nan")]), torch.tensor([-2.0, 1.0])) == 2
    assert largest_difference(torch.zeros(2), torch.zeros(2)) == 0


def test_mixing_is_found_beside_a_target_that_is_impossible():
    """The loss of its row is infinite."""
    hidden, weight, bias = torch.randn(7, 4), torch.randn(9, 4), torch.zeros(9)
    bias[3] = -torch.inf
    with pytest.raises(ValueError, match=r"^loss mixes rows: a row's loss changes with the other rows"):
        seqpar.scored_loss(hidden, weight, torch.arange(7), lambda s: s.lse.mean() - s.log_prob, bias=bias)


def test_a_random_loss_is_no_mixing_and_costs_no_random_number():
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4)

    def dropped(scores):
        return -scores.log_prob * torch.randint(2, scores.log_prob.shape)

    torch.manual_seed(5)
    loss = seqpar.scored_loss(hidden, weight, torch.arange(7), dropped).total
    log_p = (hidden @ weight.t()).log_softmax(-1)[torch.arange(7), torch.arange(7)]
    torch.manual_seed(5)
    torch.testing.assert_close(loss, -(log_p * torch.randint(2, (7,))).sum())
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.randint(2, (7,))
    assert torch.equal(after, torch.rand(1))


def test_a_gradient_that_would_be_lost_is_refused():
    hidden, weight = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4)
    elsewhere = torch.ones(7, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"loss used a tensor of shape \(7,\) that needs a gradient"):
        seqpar.scored_loss(hidden, weight, torch.arange(7), lambda s: s.log_prob * elsewhere)
    with pytest.raises(RuntimeError, match="result of loss does not require grad"):
        seqpar.scored_loss(hidden, weight, torch.arange(7), lambda s: s.log_prob.detach())


def test_all_padding_and_one_row_and_no_rows():
    weight = torch.randn(9, 4, requires_grad=True)
    for rows, target in ((3, -100), (1, 2), (0, 0)):
        hidden = torch.randn(rows, 4, requires_grad=True)
        loss = seqpar.scored_loss(hidden, weight, torch.full((rows,), target), lambda s: -s.log_prob)
        (loss.total / loss.tokens).backward()
        assert loss.tokens == (rows if target >= 0 else 0)
        assert hidden.grad.isfinite().all()
