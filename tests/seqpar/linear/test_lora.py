"""Scores under W + s B A: value and gradients of the merged weight, which is never formed."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.linear.lora import lora_scores
from seqpar.testing import assert_same_gradients
from seqpar.testing.ranks import ranks

IGNORED = -100


@st.composite
def cases(draw):
    """Tensors, the adapter's factor, and options of the scores."""
    lead = draw(st.one_of(st.tuples(st.integers(1, 20)), st.tuples(st.integers(1, 4), st.integers(1, 5))))
    width, vocab_size, rank = draw(st.integers(1, 6)), draw(st.integers(2, 11)), draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=g).requires_grad_()

    tensors = {
        "hidden": normal(*lead, width),
        "base_weight": normal(vocab_size, width).requires_grad_(draw(st.booleans())),
        "lora_A": normal(rank, width),
        "lora_B": normal(vocab_size, rank),
    }
    if draw(st.booleans()):
        tensors["bias"] = normal(vocab_size)
    if draw(st.booleans()):
        tensors["adapter_hidden"] = normal(*lead, width)
    target = torch.randint(vocab_size, lead, generator=g)
    share = draw(st.sampled_from([0.0, 0.4, 1.0]))
    target = target.masked_fill(torch.rand(lead, generator=g) < share, IGNORED)
    options = {
        "softcap": draw(st.sampled_from([None, 0.7])),
        "temperature": draw(st.sampled_from([1.0, 0.5])),
        "chunk_tokens": draw(st.sampled_from([None, 1, 3])),
    }
    up = torch.randn(2, *lead, dtype=torch.float64, generator=g)
    return tensors, target, draw(st.sampled_from([1.0, 0.25, -2.0, 0.0])), options, up


def plain(hidden, base_weight, lora_A, lora_B, scaling, target, adapter_hidden=None, bias=None, **options):
    """log p and entropy of the target under all logits, as PEFT computes them; 0 where ignored."""
    dropped = hidden if adapter_hidden is None else adapter_hidden
    logits = F.linear(hidden, base_weight, bias) + F.linear(F.linear(dropped, lora_A), lora_B) * scaling
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    log_p = (logits / options["temperature"]).log_softmax(-1)
    kept = target != IGNORED
    gold = log_p.gather(-1, target.where(kept, 0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p * log_p.exp()).sum(-1)
    return gold.where(kept, 0.0), entropy.where(kept, 0.0)


@given(cases())
def test_scores_and_gradients_are_those_of_the_base_and_the_adapter_added_up(case):
    tensors, target, scaling, options, up = case
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]

    def ours():
        scores = lora_scores(**tensors, scaling=scaling, target=target, entropy=True, **options)
        assert scores.log_prob.shape == target.shape
        return (up[0] * scores.log_prob).sum() + (up[1] * scores.entropy.where(target != IGNORED, 0.0)).sum()

    def expected():
        gold, entropy = plain(**tensors, scaling=scaling, target=target, **options)
        return (up[0] * gold).sum() + (up[1] * entropy).sum()

    assert_same_gradients(ours, expected, {name: tensors[name] for name in names})


@given(cases())
def test_every_score_and_the_most_likely_token_are_those_of_the_merged_weight(case):
    tensors, target, scaling, options, _ = case
    scores = lora_scores(**tensors, scaling=scaling, target=target, entropy=True, top_k=1, **options)
    gold, entropy = plain(**tensors, scaling=scaling, target=target, **options)
    torch.testing.assert_close(scores.log_prob, gold, rtol=1e-12, atol=1e-12)
    kept = target != IGNORED
    torch.testing.assert_close(scores.entropy[kept], entropy[kept], rtol=1e-12, atol=1e-12)
    assert scores.top_ids.shape == (*target.shape, 1)


@given(cases(), st.booleans())
def test_given_classes_and_ranks_are_those_of_the_merged_weight(case, invariant):
    tensors, target, scaling, options, up = case
    ids = torch.stack([target.where(target != IGNORED, 0), torch.zeros_like(target)], -1)
    asked = {"ids": ids, "rank": True, "top_k": 1, "batch_invariant": invariant}
    named = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}

    def of(scores):
        return (up[0].unsqueeze(-1) * scores.log_probs_at).sum()

    def merged():
        dropped = tensors.get("adapter_hidden", tensors["hidden"])
        wide = torch.cat([tensors["hidden"], F.linear(dropped, tensors["lora_A"]) * scaling], -1)
        weight = torch.cat([tensors["base_weight"], tensors["lora_B"]], -1)
        return seqpar.token_scores(wide, weight, target, bias=tensors.get("bias"), **options, **asked)

    assert_same_gradients(
        lambda: of(lora_scores(**tensors, scaling=scaling, target=target, **options, **asked)),
        lambda: of(merged()),
        named,
    )
    found = lora_scores(**tensors, scaling=scaling, target=target, **options, **asked)
    assert torch.equal(found.rank, merged().rank)


@given(st.integers(1, 150), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**16))
def test_a_batch_invariant_score_of_an_adapter_has_the_same_bits_in_any_batch(tokens, width, rank, seed):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=random)
    given_ = [torch.randn(shape, generator=random) for shape in ((50, width), (rank, width), (50, rank))]
    target = torch.randint(50, (tokens,), generator=random)
    whole = lora_scores(hidden, *given_, 2.0, target, batch_invariant=True).log_prob
    rows = torch.randperm(tokens, generator=random)[: int(torch.randint(1, tokens + 1, (), generator=random))]
    part = lora_scores(hidden[rows], *given_, 2.0, target[rows], batch_invariant=True).log_prob
    assert torch.equal(part, whole[rows])


def of_a_rank(rank, world, tensors, target):
    """The scores and gradients of one rank's rows of the weight and of B."""
    cut = len(tensors["base_weight"]) // 3
    rows = slice(0, cut) if rank == 0 else slice(cut, None)
    own = {n: (t[rows] if n in ("base_weight", "lora_B") else t).clone().requires_grad_() for n, t in tensors.items()}
    vocab = seqpar.VocabShard.of(len(own["base_weight"]), dist.group.WORLD)
    scores = lora_scores(**own, scaling=2.0, target=target, vocab=vocab)
    scores.log_prob.sum().backward()
    return scores.log_prob.detach(), {name: tensor.grad for name, tensor in own.items()}


@pytest.mark.unswitched
def test_with_a_split_vocabulary_scores_and_gradients_are_those_of_one_process():
    g = torch.Generator().manual_seed(0)
    shapes = {"hidden": (6, 4), "base_weight": (9, 4), "lora_A": (2, 4), "lora_B": (9, 2)}
    tensors = {name: torch.randn(shape, dtype=torch.float64, generator=g) for name, shape in shapes.items()}
    target = torch.tensor([0, 8, 3, IGNORED, 2, 7])
    (first, own), (second, others) = ranks(2, of_a_rank, tensors, target)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    whole = lora_scores(**leaves, scaling=2.0, target=target)
    whole.log_prob.sum().backward()
    for found in (first, second):
        torch.testing.assert_close(found, whole.log_prob.detach(), rtol=1e-12, atol=1e-12)
    for name, leaf in leaves.items():
        both = (
            [torch.cat([own[name], others[name]])] if name in ("base_weight", "lora_B") else [own[name], others[name]]
        )
        for found in both:
            torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-12)


def small(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (9, 4), (2, 4), (9, 2))
    return *(torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes), torch.arange(6)


def test_without_options_there_is_the_log_probability_of_plain_logits_and_nothing_else():
    *tensors, target = small(torch.float64)
    scores = lora_scores(*tensors, 2.0, target)
    gold, _ = plain(*tensors, 2.0, target, softcap=None, temperature=1.0)
    torch.testing.assert_close(scores.log_prob, gold, rtol=1e-12, atol=1e-12)
    assert [score is None for score in scores] == [False, *[True] * 5]


def test_a_frozen_base_weight_gets_no_gradient():
    hidden, weight, lora_a, lora_b, target = small()
    weight.requires_grad_(False)
    lora_scores(hidden, weight, lora_a, lora_b, 2.0, target).log_prob.sum().backward()
    assert weight.grad is None
    assert all(tensor.grad.abs().max() > 0 for tensor in (hidden, lora_a, lora_b))


def test_an_adapter_in_float32_beside_a_model_in_bfloat16_makes_no_copy_of_the_weight_in_float32():
    hidden, weight, *_ = small(torch.bfloat16)
    *_, lora_a, lora_b, target = small()

    class Kinds(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.cat.default and output.dim() == 2:
                assert output.dtype == torch.bfloat16
            return output

    with Kinds():
        scores = lora_scores(hidden, weight, lora_a, lora_b, 1.0, target)
    scores.log_prob.sum().backward()
    assert lora_a.grad.dtype == torch.float32
    assert weight.grad.dtype == torch.bfloat16
