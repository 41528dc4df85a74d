"""A split vocabulary that cannot work is one clear line on every rank, and nothing hangs."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import seqpar
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import message
from tests.seqpar.distributed.vocab_cases import PLAIN, parts
from tests.seqpar.linear.linear_loss import plain_loss


def dtensor_errors(rank, world):
    mesh, made = init_device_mesh("cpu", (world,)), PLAIN.tensors()

    def sharded(name, placement):
        return distribute_tensor(made[name].detach(), mesh, [placement])

    weight, bias = sharded("weight", Shard(0)), sharded("bias", Shard(0))
    hidden, target = made["hidden"].detach(), made["target"]
    loss = seqpar.linear_cross_entropy
    return [
        message(loss, hidden, sharded("weight", Shard(1)), target),
        message(loss, hidden, weight, target, bias=made["bias"].detach()),
        message(loss, sharded("hidden", Shard(0)), weight, target, bias=bias),
        message(loss, hidden, weight, target, vocab=seqpar.VocabShard(None, 0, 11)),
    ]


def test_other_layouts_of_dtensors_are_refused_with_the_way_out():
    ways_out = (
        r"weight is a DTensor with \(Shard\(dim=1\),\)",
        "bias is a plain tensor",
        r"hidden\.redistribute\(placements=\[Replicate\(\)\]\)",
        "omit vocab",
    )
    for messages in ranks(2, dtensor_errors):
        for said, way_out in zip(messages, ways_out, strict=True):
            assert re.match(f"TypeError: .*{way_out}", said), said


def with_number(tensor, at, number):
    """A copy with another number in one place."""
    copy = tensor.detach().clone()
    copy[at] = number
    return copy.requires_grad_(tensor.requires_grad)


def ones_for(target):
    return torch.ones(target.shape).double()


OTHER_HIDDEN = "hidden: ranks [1] have different hidden states from rank 0"
CHANGES = {
    "nothing": lambda x: {},
    "hidden": lambda x: {"hidden": with_number(x["hidden"], (1, 3, 2), 0)},  # one more number dropped
    "hidden without a number": lambda x: {"hidden": (x["hidden"].detach() * torch.nan).requires_grad_()},
    "no hidden": lambda x: {"hidden": None},
    "a loss scale of 0": lambda x: {"loss_scale": 0.0},
    "width": lambda x: {"hidden": torch.zeros(2, 5, 6).double(), "weight": torch.zeros(len(x["weight"]), 6).double()},
    "dtype": lambda x: {n: x[n].detach().bfloat16() for n in ("hidden", "weight", "bias")},
    "chunk_tokens": lambda x: {"chunk_tokens": 4},
    "rows": lambda x: {"hidden": x["hidden"][:1], "target": x["target"][:1]},
    "targets": lambda x: {"target": x["target"].flip(0)},
    "frozen hidden": lambda x: {"hidden": x["hidden"].detach()},
    "convention": lambda x: {"smoothing_convention": "fairseq"},
    "bias": lambda x: {"bias": None},
    "a bad input": lambda x: {"bias": torch.zeros(2).double()},
    "vocabulary": lambda x: {"vocab": seqpar.VocabShard(dist.group.WORLD, x["vocab"].start, 12)},
    "a target out of range": lambda x: {"target": with_number(x["target"], (1, 2), 11)},
    "class weights": lambda x: {"class_weight": torch.ones(len(x["weight"]) - 1).double()},
    "shards that overlap": lambda x: {"vocab": seqpar.VocabShard(dist.group.WORLD, 0, 11)},
    "weights of 1": lambda x: {"token_weight": ones_for(x["target"])},
    "a weight of 1/2": lambda x: {"token_weight": with_number(ones_for(x["target"]), (0, 1), 0.5)},
}
"""What is changed in a good call, by name, because a lambda cannot be sent to the ranks."""


def faulty(rank, world, names):
    """One bad call; then a good one, which the same group must still be able to make."""
    rows = [4, 7][rank]
    vocab = seqpar.VocabShard.of(rows, dist.group.WORLD)
    tensors = parts(PLAIN, vocab, rows) | {"vocab": vocab}
    change = CHANGES[names[rank]](tensors)
    found = message(seqpar.linear_cross_entropy, **(tensors | PLAIN.options | change))
    return found, float(seqpar.linear_cross_entropy(**tensors, **PLAIN.options).total.detach())


ON_RANK_1 = {
    "hidden": OTHER_HIDDEN,
    "hidden without a number": OTHER_HIDDEN,
    "no hidden": "what is wrong: 'nothing' on ranks [0]; 'TypeError: hidden is None; it must be a tensor'",
    "a loss scale of 0": "what is wrong: 'nothing' on ranks [0]; 'ValueError: loss_scale is 0; ",
    "width": "the width of hidden and weight",
    "dtype": "the dtype",
    "chunk_tokens": "chunk_tokens: 3 on ranks [0]; 4 on ranks [1]",
    "rows": "the number of tokens",
    "targets": "the targets",
    "frozen hidden": "whether hidden needs a gradient: True on ranks [0]; False on ranks [1]",
    "convention": "smoothing_convention: 'torch' on ranks [0]; 'fairseq' on ranks [1]",
    "bias": "bias: 'given' on ranks [0]; 'none' on ranks [1]",
    "a bad input": "what is wrong: 'nothing' on ranks [0]; 'ValueError: bias has shape (2,)",
    "vocabulary": "the vocabulary's size: 11 on ranks [0]; 12 on ranks [1]",
}
DISAGREE = {("nothing", name): said for name, said in ON_RANK_1.items()}
DISAGREE["weights of 1", "a weight of 1/2"] = "token_weight: ranks [1] have different numbers from rank 0"


@pytest.mark.parametrize("names", DISAGREE, ids=" and ".join)
def test_ranks_that_disagree_are_named_on_every_rank_and_nothing_hangs(names):
    good = float(plain_loss(**PLAIN.tensors(), **PLAIN.options).detach())
    for said, again in ranks(2, faulty, names):
        assert said.startswith(f"RuntimeError: ranks disagree on {DISAGREE[names]}")
        assert again == pytest.approx(good, rel=1e-12)


ALIKE = {
    "a target out of range": ("IndexError", "target 11 at position (1, 2) is outside"),
    # The messages name each rank's sizes, so the ranks do disagree
    "class weights": ("RuntimeError", "for this rank's classes, or (11,) for all"),
    "shards that overlap": ("RuntimeError", "[0, 4) on rank 0; [0, 7) on rank 1; together they must be [0, 11)"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_every_rank_gets_wrong_every_rank_says(name):
    kind, expected = ALIKE[name]
    for said, _ in ranks(2, faulty, (name, name)):
        assert said.startswith(f"{kind}: ")
        assert expected in said


def rounded(rank, world, dtype):
    """Hidden states that two machines would round in other places, and nan on both."""
    vocab, x = seqpar.VocabShard(dist.group.WORLD, 4 * rank, 8), torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 32, generator=x).to(dtype)
    weight, target = torch.randn(4, 32, generator=x).to(dtype), torch.zeros(20).long()
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # of checksums, which are in float32
    noise = 1 + torch.finfo(dtype).eps * torch.randint(-1, 2, hidden.shape).to(dtype) * rank
    more = 1 + 64 * eps * rank
    every = hidden, hidden * noise, hidden * torch.nan, hidden * more
    return [message(seqpar.linear_cross_entropy, h, weight, target, vocab=vocab) for h in every]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_that_differ_by_rounding_are_the_same_and_by_sixty_four_times_as_much_are_not(dtype):
    for *by_rounding, more in ranks(2, rounded, dtype):
        assert by_rounding == ["no error"] * 3
        assert "ranks [1] have different hidden states from rank 0" in more


def plain_weight_beside_dtensors(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name, tensor in {**PLAIN.tensors(), "token_weight": torch.rand(2, 5).double()}.items():
        sharded = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
        given = {k: t.detach() for k, t in PLAIN.tensors().items()} | {name: sharded}
        if name != "weight":
            found[name] = message(seqpar.linear_cross_entropy, **given)
    return found


def test_a_dtensor_beside_a_plain_weight_is_named():
    for found in ranks(2, plain_weight_beside_dtensors):
        assert {"hidden", "target", "bias", "token_weight"} == found.keys()
        for name, said in found.items():
            assert said.startswith(f"TypeError: {name} is a DTensor; pass this rank's own tensor")


def test_a_shard_is_checked_where_it_is_made():
    with pytest.raises(ValueError, match="vocab_size is 0"):
        seqpar.VocabShard.of(0, None)
    with pytest.raises(ValueError, match=r"start is 12; it must be a whole number in \[0, 11\]"):
        seqpar.VocabShard(None, 12, 11)
    assert seqpar.VocabShard.of(11, None) == seqpar.VocabShard(None, 0, 11)


def in_an_order_of_its_own(rank, world):
    """The loss on each rank, whose keywords come in another order on the second one."""
    hidden, target = torch.arange(8.0).view(2, 4), torch.tensor([0, 5])
    given = {
        "advantage": torch.tensor([1.0, 3.0]),
        "old": torch.tensor([-1.0, -2.0]),
        "extra": torch.tensor([5.0, 7.0]),
    }
    options = dict(sorted({**given, "entropy": True, "chunk_tokens": 1}.items(), reverse=bool(rank)))
    seqpar.check_agreement({name: str(value) for name, value in options.items()}, dist.group.WORLD)

    def loss(scores, *, advantage, old, extra):
        return -scores.log_prob * advantage + old * scores.entropy + extra

    vocab = seqpar.VocabShard.of(3, dist.group.WORLD)
    return seqpar.scored_loss(hidden, torch.ones(3, 4), target, loss, vocab=vocab, **options).total.item()


def test_the_order_of_keywords_may_differ_between_ranks():
    found = ranks(2, in_an_order_of_its_own)
    # log p = -log 6 and the entropy log 6 in both rows
    assert found == pytest.approx([4 * math.log(6) - 3 * math.log(6) + 12] * 2, rel=1e-6)


def scores_asked_differently(rank, world, options):
    """What each rank says about scores that each is asked for with options of its own."""
    vocab = seqpar.VocabShard.of(3, dist.group.WORLD)
    given = torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 5])
    return message(seqpar.token_scores, *given, vocab=vocab, **options[rank])


def each(numbers):
    return {"temperature": torch.tensor(numbers)}


def ids(*numbers):
    return {"ids": torch.tensor(numbers).unsqueeze(1)}


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {"entropy": True}, "entropy: "),
        ({}, {"top_k": 2}, "top_k: "),
        ({}, {"product_dtype": torch.float64}, "product_dtype: "),
        ({}, {"batch_invariant": True}, "batch_invariant: "),
        ({}, {"rank": True}, "rank: "),
        ({}, {"temperature": 2.0}, "temperature: "),
        ({}, each([1.0, 2.0]), "temperature of each token: "),
        ({}, ids(1, 5), "ids: "),
        (ids(1, 5), ids(5, 1), "ids"),
        (each([1.0, 2.0]), each([2.0, 1.0]), "temperature"),
    ],
)
def test_ranks_that_are_asked_for_different_scores_all_say_which(first, second, named):
    for said in ranks(2, scores_asked_differently, (first, second)):
        assert said.startswith(f"RuntimeError: ranks disagree on {named}")


def ignored_rows_that_differ(rank, world):
    shard, ones = seqpar.VocabShard.of(3, dist.group.WORLD), torch.ones(3, 2, dtype=torch.float64)
    given = {"temperature": torch.tensor([1.0, 1.0 + rank, 2.0]), "ids": torch.tensor([[0], [rank], [5]])}
    return seqpar.token_scores(ones, ones, torch.tensor([0, -100, 4]), **given, vocab=shard).log_prob.tolist()


def test_temperatures_and_ids_of_ignored_rows_may_differ_between_ranks():
    one, other = ranks(2, ignored_rows_that_differ)
    assert one == other
