"""The vocabulary split over real ranks has the value and every gradient of the plain loss on one device."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import seqpar
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.distributed.vocab_cases import (
    PLAIN,
    answer,
    assert_close,
    counted,
    leaves_and_gradients,
    numbers,
    own_rows,
    parts,
    shard_of,
    whole_gradients,
)
from tests.seqpar.linear.linear_loss import linear_cases, plain_logits, plain_loss
from tests.seqpar.linear.score_cases import assert_ranks, plain_scores, score_cases, weighted

WORLDS = st.sampled_from([1, 2, 2, 3, 4])


def losses(rank, world, drawn):
    """Every (case, split, order) in turn; its loss and gradients."""
    answers = []
    for case, split, order, full_class_weight in drawn:
        vocab, rows = shard_of(case, split, order, rank)
        if order == sorted(order):
            assert seqpar.VocabShard.of(rows, dist.group.WORLD) == vocab
        tensors = parts(case, vocab, rows, full_class_weight)
        loss = seqpar.linear_cross_entropy(**tensors, **case.options, vocab=vocab)
        answers.append(answer(loss, tensors, case.upstream))
    return answers


def assert_answers(case, order, per_rank):
    """Every rank's answer is the plain loss's; the shards' gradients together are the weight's."""
    tensors = case.tensors()
    reference = plain_loss(**tensors, **case.options)
    leaves, gradients = leaves_and_gradients(tensors, reference, case.upstream)
    kept, target = tensors["target"].flatten() != case.padding, tensors["target"].flatten()
    logits = plain_logits(tensors["hidden"], tensors["weight"], tensors.get("bias"), case.softcap, case.temperature)
    nll = F.cross_entropy(logits, target, ignore_index=case.padding, reduction="sum")
    total, tokens, got_nll, correct = per_rank[0][0]
    assert_close("the loss", total, reference)
    assert_close("nll", got_nll, nll)
    assert tokens == kept.sum()
    assert correct == ((logits.argmax(-1) == target) & kept).sum()
    for rank, found in enumerate(whole_gradients(per_rank, leaves, order)):
        for name, expected in zip(leaves, gradients, strict=True):
            assert_close(f"the gradient of {name} on rank {rank}", found[name], expected)


@given(st.data())
def test_any_split_has_the_gradient_of_one_device(data):
    """All conventions, z-loss, softcap, class weights, frozen parts; several losses in one call to the ranks."""
    world, drawn = data.draw(WORLDS), []
    for _ in range(data.draw(st.integers(1, 3))):
        case = data.draw(linear_cases())
        order = data.draw(st.one_of(st.just(list(range(world))), st.permutations(range(world)).map(list)))
        drawn.append((case, data.draw(vocabulary_splits(case.vocab_size, world)), order, data.draw(st.booleans())))
    answers = ranks(world, losses, drawn)
    for i, (case, _, order, _) in enumerate(drawn):
        assert_answers(case, order, [theirs[i] for theirs in answers])


def count_a_step(rank, world, options):
    rows = [4, 0, 7][rank]
    vocab = seqpar.VocabShard.of(rows, dist.group.WORLD)
    tensors = parts(PLAIN, vocab, rows)
    with counted() as calls:
        loss = seqpar.linear_cross_entropy(**tensors, **(PLAIN.options | options), vocab=vocab)
        forward = dict(calls)
        loss.total.backward()
    return forward, dict(calls)


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.0}, {"z_loss": 0.1, "softcap": 2.0}, {"class_weight": torch.ones(11).double()}],
)
def test_a_step_is_one_all_gather_a_chunk_a_small_one_and_an_all_reduce_for_hidden(options):
    """Class weights are added up once: w_y of each row and, with smoothing, W."""
    weights = {"all_reduce": 2} if "class_weight" in options else {}
    for forward, step in ranks(3, count_a_step, options):
        assert forward == {"all_gather": 4 + 1} | weights
        assert step == {"all_gather": 4 + 1, "all_reduce": 1 + weights.get("all_reduce", 0)}


def automatic_chunks(rank, world, split):
    """A budget so small that the vocabulary's size decides how many rows a chunk has."""
    vocab = seqpar.VocabShard.of(split[rank], dist.group.WORLD)
    tensors = parts(PLAIN, vocab, split[rank])
    small = patch("seqpar.core.chunks.CPU_BUDGET", 200), patch("seqpar.core.chunks.FEWEST_ROWS", 1)
    with small[0], small[1], counted() as calls:
        loss = seqpar.linear_cross_entropy(**tensors, vocab=vocab)
    return float(loss.total.detach()), calls["all_gather"]


def test_ranks_with_different_parts_choose_the_same_chunks():
    tensors = PLAIN.tensors()
    reference = plain_loss(**tensors, **(PLAIN.options | {"label_smoothing": 0.0}))
    for total, gathers in ranks(2, automatic_chunks, [1, 10]):
        assert_close("the loss", total, reference)
        # One of checks; 200 bytes are 4 rows of half the 11 classes, and 10 rows are 3 chunks
        assert gathers == 1 + 3


def evaluate(rank, world):
    vocab = seqpar.VocabShard.of([6, 5][rank], dist.group.WORLD)
    tensors = parts(PLAIN, vocab, [6, 5][rank])
    trained = seqpar.linear_cross_entropy(**tensors, **PLAIN.options, vocab=vocab)
    with torch.no_grad():
        evaluated = seqpar.linear_cross_entropy(**tensors, **PLAIN.options, vocab=vocab)
    return float(trained.total.detach()), float(evaluated.total), evaluated.total.requires_grad


def test_evaluation_has_the_same_numbers_without_a_graph():
    for trained, evaluated, graph in ranks(2, evaluate):
        assert trained == evaluated
        assert not graph


def dtensor_head(rank, world, case, vocab_size, how):
    """A head sharded by torch's own tools."""
    mesh = init_device_mesh("cpu", (world,))
    made = case.tensors()
    head = nn.Linear(case.width, vocab_size).double()
    head.load_state_dict({"weight": made["weight"], "bias": made["bias"]})
    if how == "parallelize_module":
        head = parallelize_module(head, mesh, ColwiseParallel())
        weight, bias = head.weight, head.bias
    else:
        weight = distribute_tensor(made["weight"].detach(), mesh, [Shard(0)]).requires_grad_()
        bias = distribute_tensor(made["bias"].detach(), mesh, [Shard(0)]).requires_grad_()
    hidden = made["hidden"]
    given = DTensor.from_local(hidden, mesh, [Replicate()]) if how == "hidden is one too" else hidden
    loss = seqpar.linear_cross_entropy(given, weight, made["target"], bias=bias, **case.options)
    loss.total.backward()
    placements = [str(g.placements) for g in (weight.grad, bias.grad)]
    whole = [numbers(g.full_tensor()) for g in (weight.grad, bias.grad)]
    return float(loss.total.detach()), placements, [numbers(hidden.grad), *whole]


@pytest.mark.parametrize("how", ["parallelize_module", "distribute_tensor", "hidden is one too"])
@pytest.mark.parametrize(("world", "vocab_size"), [(1, 5), (2, 11), (4, 5)])  # 4 ranks, 5 classes: 2, 2, 1, 0
def test_a_dtensor_weight_says_itself_how_it_is_split_and_gets_a_dtensor_gradient(how, world, vocab_size):
    case = replace(PLAIN, vocab_size=vocab_size, padding_share=0.3, convention="fairseq", z_loss=0.1, softcap=5.0)
    tensors = case.tensors()
    reference = plain_loss(**tensors, **case.options)
    expected = torch.autograd.grad(reference, [tensors[n] for n in ("hidden", "weight", "bias")])
    for total, placements, gradients in ranks(world, dtensor_head, case, vocab_size, how):
        assert_close("the loss", total, reference)
        assert placements == ["(Shard(dim=0),)"] * 2
        for name, got, want in zip(("hidden", "weight", "bias"), gradients, expected, strict=True):
            assert_close(f"the gradient of {name}", got, want)


def whole_shard_masked(rank, world):
    """A bias of -inf on all of rank 1's classes: none of them has a share of the softmax."""
    vocab = seqpar.VocabShard.of([6, 5][rank], dist.group.WORLD)
    tensors = parts(PLAIN, vocab, [6, 5][rank])
    tensors["bias"] = torch.full((len(tensors["weight"]),), -torch.inf if rank else 0.0).double()
    tensors["target"] = tensors["target"] % 6
    return answer(seqpar.linear_cross_entropy(**tensors, chunk_tokens=3, vocab=vocab), tensors)


def test_a_rank_whose_classes_are_all_masked_out_does_no_harm():
    tensors = PLAIN.tensors()
    reference = F.cross_entropy(
        (tensors["hidden"] @ tensors["weight"][:6].t()).flatten(0, 1), tensors["target"].flatten() % 6, reduction="sum"
    )
    hidden, weight = torch.autograd.grad(reference, (tensors["hidden"], tensors["weight"]))
    first, second = ranks(2, whole_shard_masked)
    assert first[0] == second[0]
    assert_close("the loss", first[0][0], reference)
    for _, grads in (first, second):
        assert_close("the gradient of hidden", grads["hidden"], hidden)
    assert_close(
        "the gradient of the weight", torch.cat([torch.as_tensor(a[1]["weight"]) for a in (first, second)]), weight
    )


def ties(rank, world, split, hidden, weight, target):
    vocab = seqpar.VocabShard.of(split[rank], dist.group.WORLD)
    mine = own_rows(weight, vocab.start, split[rank])
    return int(seqpar.linear_cross_entropy(hidden, mine, target, chunk_tokens=50, vocab=vocab).correct)


@given(st.integers(0, 2**16), st.data())
def test_of_classes_that_tie_across_ranks_the_lowest_is_the_prediction(seed, data):
    world = data.draw(WORLDS)
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-1, 2, (60, 2), generator=random).double()
    weight = torch.randint(-1, 2, (9, 2), generator=random).double()  # small whole numbers: most rows have ties
    target = torch.randint(9, (60,), generator=random)
    expected = int(((hidden @ weight.t()).argmax(-1) == target).sum())
    assert ranks(world, ties, data.draw(vocabulary_splits(9, world)), hidden, weight, target) == [expected] * world


def bf16_step(rank, world, seed):
    hidden, weight, target = bf16_inputs(seed)
    vocab = seqpar.VocabShard.of(len(weight) // world, dist.group.WORLD)
    mine = own_rows(weight, vocab.start, len(weight) // world)
    loss = seqpar.linear_cross_entropy(hidden, mine, target, label_smoothing=0.1, chunk_tokens=50, vocab=vocab)
    (loss.total / len(target)).backward()
    return float(loss.total.detach()) / len(target), numbers(hidden.grad.double()), numbers(mine.grad.double())


def bf16_inputs(seed) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(128, 16, generator=random).bfloat16().requires_grad_()
    weight = (torch.randn(120, 16, generator=random) / 4).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(120, (128,), generator=random)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_bfloat16_at_most_twice_plain_torchs_own_error(world, seed):
    inputs, target = list(bf16_inputs(seed)[:2]), bf16_inputs(seed)[2]
    exact = [t.detach().double().requires_grad_() for t in inputs]

    def loss(hidden, weight):
        return F.cross_entropy(hidden @ weight.t(), target, label_smoothing=0.1)

    truth = [loss(*exact).detach(), *torch.autograd.grad(loss(*exact), exact)]
    plain = [loss(*inputs).detach(), *torch.autograd.grad(loss(*inputs), inputs)]
    answers = ranks(world, bf16_step, seed)
    whole = torch.cat([torch.as_tensor(a[2]) for a in answers])
    ours = [torch.tensor(answers[0][0]), torch.as_tensor(answers[0][1]), whole]
    for name, mine, theirs, true in zip(["loss", "hidden", "weight"], ours, plain, truth, strict=True):
        assert (mine - true).norm() <= 2 * (theirs.double() - true).norm(), name


def freeze_projection(tensors):
    """Leave hidden alone with a gradient, which then has a way of its own."""
    tensors["hidden"].requires_grad_()
    for name in ("weight", "bias"):
        if name in tensors:
            tensors[name].requires_grad_(False)


def scores(rank, world, drawn):
    """Per-token scores and their gradients, of each (case, split, frozen) in turn."""
    answers = []
    for case, split, used, chunk_tokens, frozen, *invariant in drawn:
        vocab = seqpar.VocabShard.of(split[rank], dist.group.WORLD)
        tensors = parts(case, vocab, split[rank])
        if frozen:
            freeze_projection(tensors)
        options = {"chunk_tokens": chunk_tokens, "batch_invariant": bool(invariant and invariant[0])}
        with patch("seqpar.linear.invariant_scores.INVARIANT_CLASSES", *invariant or [1024]):
            found = seqpar.token_scores(**tensors, **case.options, **options, vocab=vocab)
        total = weighted(found, case.linear.seed, used)
        if total.requires_grad:
            total.backward()
        leaves = {name: numbers(t.grad) for name, t in tensors.items() if name != "target"}
        answers.append(([numbers(t) for t in found], leaves))
    return answers


@given(st.data())
def test_token_scores_over_a_split_vocabulary_are_those_of_one_device(data):
    world = data.draw(WORLDS)
    case = data.draw(score_cases())
    split = data.draw(vocabulary_splits(case.linear.vocab_size, world))
    used = data.draw(st.sampled_from(["all", "log_prob", "entropy"]))
    whole = case.tensors()
    frozen = data.draw(st.booleans())
    if frozen:
        freeze_projection(whole)
    expected = seqpar.token_scores(**whole, **case.options)
    leaves = [name for name, t in whole.items() if t.requires_grad]
    total = weighted(expected, case.linear.seed, used)
    gradients = torch.autograd.grad(total, [whole[n] for n in leaves], allow_unused=True) if leaves else ()
    gradients = [torch.zeros_like(whole[n]) if g is None else g for n, g in zip(leaves, gradients, strict=True)]
    chunk_tokens = data.draw(st.sampled_from([None, 1, 3]))
    invariant = data.draw(st.sampled_from([0, 0, 2, 5, 1024]))  # that many classes in a tile, or no tiles
    answers = [theirs[0] for theirs in ranks(world, scores, [(case, split, used, chunk_tokens, frozen, invariant)])]
    for found, grads in answers:
        for name, got, plain in zip(expected._fields, found, expected, strict=True):
            assert (got is None) == (plain is None), name
            if name not in ("top_ids", "rank") and got is not None:
                torch.testing.assert_close(torch.as_tensor(got), plain.detach(), rtol=1e-12, atol=1e-12)
        assert_ranks(torch.as_tensor(found[-1]), plain_scores(**whole, **case.options).rank)
        if case.top_k and not case.linear.coarse:
            assert torch.as_tensor(found[3]).equal(expected.top_ids)
        if "hidden" in leaves:
            assert_close("the gradient of hidden", grads["hidden"], gradients[leaves.index("hidden")])
    for name in {"weight", "bias"} & set(leaves):
        together = torch.cat([torch.as_tensor(grads[name]) for _, grads in answers])
        assert_close(f"the gradient of {name}", together, gradients[leaves.index(name)])


def invariant_bits(rank, world, problem, split, order, tile):
    """Every score of each token, from this rank's classes."""
    rows, width, vocab_size, dtype, seed = problem
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=random).to(dtype)
    weight = (3 * torch.randn(vocab_size, width, generator=random)).to(dtype)
    bias = torch.randn(vocab_size, generator=random).to(dtype)
    target = torch.randint(vocab_size, (rows,), generator=random)
    start = sum(split[: order[rank]])
    vocab = seqpar.VocabShard(dist.group.WORLD if world > 1 else None, start, vocab_size)
    own = slice(start, start + split[order[rank]])
    with patch("seqpar.linear.invariant_scores.INVARIANT_CLASSES", tile):
        found = seqpar.token_scores(
            hidden, weight[own], target, bias=bias[own], ids=target.roll(1).unsqueeze(1), entropy=True, top_k=2,
            rank=True, batch_invariant=True, vocab=vocab,
        )  # fmt: skip
    return [numbers(t) for t in found]


@given(st.data())
def test_batch_invariant_scores_have_the_same_bits_for_any_number_of_ranks(data):
    world = data.draw(st.sampled_from([2, 3, 4]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    vocab_size = data.draw(st.integers(2, 300))
    rows, width, seed = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40)), data.draw(st.integers(0, 2**16))
    problem = (rows, width, vocab_size, dtype, seed)
    tile = data.draw(st.sampled_from([16, 64, 1024]))
    split = data.draw(vocabulary_splits(vocab_size, world))
    order = data.draw(st.permutations(range(world)))
    alone = invariant_bits(0, 1, problem, [vocab_size], [0], tile)
    for found in ranks(world, invariant_bits, problem, split, order, tile):
        for name, got, expected in zip(seqpar.TokenScores._fields, found, alone, strict=True):
            assert (got == expected).all(), name


def test_a_tile_of_several_ranks_is_put_together_in_the_order_of_the_classes():
    problem = (5, 8, 40, torch.float32, 0)
    alone = invariant_bits(0, 1, problem, [40], [0], 1024)
    for found in ranks(4, invariant_bits, problem, [10] * 4, [0, 3, 2, 1], 1024):
        for got, expected in zip(found, alone, strict=True):
            assert (got == expected).all()


def tied_scores(rank, world):
    """The top classes of equal logits, rank 0 having the higher classes."""
    rows = [3, 2, 0][rank]
    vocab = seqpar.VocabShard(dist.group.WORLD, [2, 0, 5][rank], 5)
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0], [2.0]])[vocab.start : vocab.start + rows]
    found = seqpar.token_scores(torch.ones(2, 1), weight, torch.tensor([1, 4]), top_k=4, vocab=vocab)
    return found.top_ids.tolist()


def test_equal_logits_of_several_ranks_go_to_the_lower_class():
    assert ranks(3, tied_scores) == [[[1, 2, 4, 0]] * 2] * 3


def engine_losses(rank, world, drawn):
    """The loss of each case by the engine, whose generator is an `nn.Linear` with this rank's rows."""
    answers = []
    for case, split, order in drawn:
        vocab, rows = shard_of(case, split, order, rank)
        tensors = parts(case, vocab, rows)
        generator = nn.Linear(1, 1)
        for name in ("weight", "bias"):
            leaf = tensors.get(name)
            setattr(generator, name, None if leaf is None else nn.Parameter(leaf.detach(), leaf.requires_grad))
            if leaf is not None:
                tensors[name] = getattr(generator, name)
        criterion = seqpar.LabelSmoothing(case.eps, case.convention, ignore_index=case.padding)
        engine = seqpar.LossCompute(generator, criterion, chunk_tokens=case.chunk_tokens, vocab=vocab)
        loss = engine(tensors["hidden"], tensors["target"], loss_scale=case.loss_scale)
        answers.append(answer(loss, tensors, case.upstream))
    return answers


PLAIN_ENGINE = {"weighted": False, "token_weighted": False, "z_loss": 0.0, "softcap": None, "temperature": 1.0}


@given(st.data())
def test_the_engine_takes_a_split_vocabulary_with_the_gradient_of_one_device(data):
    world = data.draw(WORLDS)
    case = replace(data.draw(linear_cases()), **PLAIN_ENGINE)
    order = data.draw(st.permutations(range(world)).map(list))
    split = data.draw(vocabulary_splits(case.vocab_size, world))
    answers = ranks(world, engine_losses, [(case, split, order)])
    assert_answers(case, order, [theirs[0] for theirs in answers])


def test_an_engine_that_cannot_split_its_vocabulary_says_why():
    shard, linear = seqpar.VocabShard(None, 0, 8), nn.Linear(4, 8)
    own = nn.Sequential(nn.Linear(4, 4), linear)
    for generator, options, error, said in (
        (own, {}, TypeError, "vocab is given, and a vocabulary can be split only by formula: the generator"),
        (linear, {"devices": ["cpu"]}, ValueError, r"vocab is given with devices=\['cpu'\] and chunk_size=None"),
        (linear, {"chunk_size": 5}, ValueError, "vocab is given with devices=None and chunk_size=5"),
    ):
        with pytest.raises(error, match=said):
            seqpar.LossCompute(generator, seqpar.CrossEntropy(), **options, vocab=shard)
    engine = seqpar.LossCompute(linear, seqpar.CrossEntropy(), vocab=shard)
    with pytest.raises(TypeError, match="vocab is given, and copy for each token, which no closed form takes"):
        engine(torch.randn(3, 4), torch.tensor([0, 1, 7]), copy=torch.randn(3, 2))


def masked_shard(rank, world, frozen):
    """Scores and hidden's gradient where rank 0 has masked classes alone."""
    whole = torch.tensor([[1.0], [2.0], [0.5], [-1.0]]).double()
    bias = torch.tensor([-torch.inf, -torch.inf, 0.25, 0.5]).double()
    vocab = seqpar.VocabShard(dist.group.WORLD, 2 * rank, 4) if world > 1 else None
    own = slice(2 * rank, 2 * rank + 2) if world > 1 else slice(None)
    weight = whole[own].clone().requires_grad_(not frozen)
    hidden = torch.tensor([[1.0], [-2.0]]).double().requires_grad_()
    found = seqpar.token_scores(hidden, weight, torch.tensor([3, 2]), bias=bias[own], entropy=True, vocab=vocab)
    (found.log_prob.sum() + found.entropy.square().sum()).backward()
    return [numbers(found.log_prob), numbers(found.entropy), numbers(hidden.grad)]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_whose_classes_are_all_masked_adds_nothing(frozen):
    expected = masked_shard(0, 1, frozen)
    for answers in ranks(2, masked_shard, frozen):
        for what, got, plain in zip(("log_prob", "entropy", "hidden"), answers, expected, strict=True):
            assert_close(what, got, torch.as_tensor(plain))
