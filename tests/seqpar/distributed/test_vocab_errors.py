"""A split vocabulary that cannot work is one clear line on every rank, and nothing hangs."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import seqpar
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.vocab_cases import PLAIN, message, parts
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
    for first, second, third, fourth in ranks(2, dtensor_errors):
        assert first[0] == second[0] == third[0] == fourth[0] == "TypeError"
        assert "weight is a DTensor with (Shard(dim=1),)" in first[1]
        assert "bias is a plain tensor" in second[1]
        assert "hidden.redistribute(placements=[Replicate()])" in third[1]
        assert "omit vocab" in fourth[1]


def faulty(rank, world, changes):
    """One bad call; then a good one, which the same group must still be able to make."""
    rows = [4, 7][rank]
    vocab = seqpar.VocabShard.of(rows, dist.group.WORLD)
    tensors = parts(PLAIN, vocab, rows) | {"vocab": vocab}
    change = changes[rank](tensors) if rank < len(changes) else {}
    found = message(seqpar.linear_cross_entropy, **(tensors | PLAIN.options | change))
    return found, float(seqpar.linear_cross_entropy(**tensors, **PLAIN.options).total.detach())


def nothing(_):
    return {}


def wide(x):
    return {"hidden": torch.zeros(2, 5, 6).double(), "weight": torch.zeros(len(x["weight"]), 6).double()}


def low(x):
    return {n: x[n].detach().bfloat16() for n in ("hidden", "weight", "bias")}


def other_chunks(_):
    return {"chunk_tokens": 4}


def fewer_rows(x):
    return {"hidden": x["hidden"][:1], "target": x["target"][:1]}


def other_targets(x):
    return {"target": x["target"].flip(0)}


def frozen(x):
    return {"hidden": x["hidden"].detach()}


def other_smoothing(_):
    return {"smoothing_convention": "fairseq"}


def no_bias(_):
    return {"bias": None}


def bad_bias(_):
    return {"bias": torch.zeros(2).double()}


def other_token_weight(x):
    weight = torch.ones(x["target"].shape).double()
    weight[0, 1] = 0.5
    return {"token_weight": weight}


def same_token_weight(x):
    return {"token_weight": torch.ones(x["target"].shape).double()}


def other_size(x):
    return {"vocab": seqpar.VocabShard(dist.group.WORLD, x["vocab"].start, 12)}


def target_out_of_range(x):
    target = x["target"].clone()
    target[1, 2] = 11
    return {"target": target}


def one_weight_too_few(x):
    return {"class_weight": torch.ones(len(x["weight"]) - 1).double()}


def other_hidden(x):
    """One more number dropped."""
    hidden = x["hidden"].detach().clone()
    hidden[1, 3, 2] = 0
    return {"hidden": hidden.requires_grad_()}


def no_number(x):
    return {"hidden": x["hidden"].detach().clone().fill_(torch.nan).requires_grad_()}


def no_hidden(_):
    return {"hidden": None}


def scale_of_nothing(_):
    return {"loss_scale": 0.0}


DISAGREE = {
    "hidden": (other_hidden, "hidden: ranks [1] have different hidden states from rank 0"),
    "hidden without a number": (no_number, "hidden: ranks [1] have different hidden states from rank 0"),
    "no hidden": (no_hidden, "what is wrong: 'nothing' on ranks [0]; 'TypeError: hidden is None; it must be a tensor'"),
    "a loss scale of 0": (scale_of_nothing, "what is wrong: 'nothing' on ranks [0]; 'ValueError: loss_scale is 0; "),
    "width": (wide, "the width of hidden and weight"),
    "dtype": (low, "the dtype"),
    "chunk_tokens": (other_chunks, "chunk_tokens: 3 on ranks [0]; 4 on ranks [1]"),
    "rows": (fewer_rows, "the number of tokens"),
    "targets": (other_targets, "the targets"),
    "frozen hidden": (frozen, "whether hidden needs a gradient: True on ranks [0]; False on ranks [1]"),
    "convention": (other_smoothing, "smoothing_convention: 'torch' on ranks [0]; 'fairseq' on ranks [1]"),
    "bias": (no_bias, "bias: 'given' on ranks [0]; 'none' on ranks [1]"),
    "a bad input": (bad_bias, "what is wrong: 'nothing' on ranks [0]; 'ValueError: bias has shape (2,)"),
    "vocabulary": (other_size, "the vocabulary's size: 11 on ranks [0]; 12 on ranks [1]"),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_ranks_that_disagree_are_named_on_every_rank_and_nothing_hangs(case):
    change, expected = DISAGREE[case]
    good = float(plain_loss(**PLAIN.tensors(), **PLAIN.options).detach())
    for (error, text), again in ranks(2, faulty, [nothing, change]):
        assert error == "RuntimeError"
        assert f"ranks disagree on {expected}" in text
        assert again == pytest.approx(good, rel=1e-12)


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
        assert by_rounding == [None] * 3
        assert "ranks [1] have different hidden states from rank 0" in more[1]


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
            assert said[0] == "TypeError"
            assert said[1].startswith(f"{name} is a DTensor; pass this rank's own tensor")


def gap(x):
    return {"vocab": seqpar.VocabShard(dist.group.WORLD, 0, 11)}


ALIKE = {
    "a target out of range": (target_out_of_range, "IndexError", "target 11 at position (1, 2) is outside"),
    "class weights": (one_weight_too_few, "ValueError", "for this rank's classes, or (11,) for all"),
    "shards that overlap": (gap, "RuntimeError", "[0, 4) on rank 0; [0, 7) on rank 1; together they must be [0, 11)"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_every_rank_gets_wrong_every_rank_says(case):
    change, kind, expected = ALIKE[case]
    if case == "class weights":  # the messages name each rank's sizes, so the ranks do disagree
        kind = "RuntimeError"
    for (error, text), _ in ranks(2, faulty, [change, change]):
        assert error == kind
        assert expected in text


def test_a_shard_is_checked_where_it_is_made():
    with pytest.raises(ValueError, match="vocab_size is 0"):
        seqpar.VocabShard.of(0, None)
    with pytest.raises(ValueError, match=r"start is 12; it must be a whole number in \[0, 11\]"):
        seqpar.VocabShard(None, 12, 11)
    assert seqpar.VocabShard.of(11, None) == seqpar.VocabShard(None, 0, 11)


def test_ranks_with_other_token_weights_all_say_so():
    for (error, text), _ in ranks(2, faulty, [same_token_weight, other_token_weight]):
        assert error == "RuntimeError"
        assert "ranks disagree on token_weight: ranks [1] have different numbers from rank 0" in text


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
    """What each rank says about scores whose second rank was asked for something else."""
    vocab = seqpar.VocabShard.of(3, dist.group.WORLD)
    hidden = torch.ones(2, 4)
    target = torch.tensor([0, 5])
    return message(seqpar.token_scores, hidden, torch.ones(3, 4), target, vocab=vocab, **(options if rank else {}))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"entropy": True}, "entropy"),
        ({"top_k": 2}, "top_k"),
        ({"product_dtype": torch.float64}, "product_dtype"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"rank": True}, "rank"),
        ({"temperature": 2.0}, "temperature"),
        ({"temperature": torch.tensor([1.0, 2.0])}, "temperature of each token"),
        ({"ids": torch.tensor([[1], [5]])}, "ids"),
    ],
)
def test_ranks_that_are_asked_for_different_scores_all_say_which(options, named):
    for kind, text in ranks(2, scores_asked_differently, options):
        assert kind == "RuntimeError"
        assert f"ranks disagree on {named}: " in text


def other_ids_or_temperature(rank, world, name, values):
    vocab = seqpar.VocabShard.of(3, dist.group.WORLD)
    given = {name: torch.as_tensor(values[rank])}
    return message(seqpar.token_scores, torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 5]), vocab=vocab, **given)


@pytest.mark.parametrize(
    ("name", "values"), [("ids", ([[1], [5]], [[5], [1]])), ("temperature", ([1.0, 2.0], [2.0, 1.0]))]
)
def test_ranks_with_other_ids_or_temperatures_all_say_so(name, values):
    for kind, text in ranks(2, other_ids_or_temperature, name, values):
        assert kind == "RuntimeError"
        assert f"ranks disagree on {name}" in text


def ignored_rows_that_differ(rank, world):
    shard, ones = seqpar.VocabShard.of(3, dist.group.WORLD), torch.ones(3, 2, dtype=torch.float64)
    given = {"temperature": torch.tensor([1.0, 1.0 + rank, 2.0]), "ids": torch.tensor([[0], [rank], [5]])}
    return seqpar.token_scores(ones, ones, torch.tensor([0, -100, 4]), **given, vocab=shard).log_prob.tolist()


def test_temperatures_and_ids_of_ignored_rows_may_differ_between_ranks():
    one, other = ranks(2, ignored_rows_that_differ)
    assert one == other
