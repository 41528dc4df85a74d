"""The engine's scores: those of the generator's projection on one device, over any device list and layout."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.testing import assert_same_gradients
from seqpar.testing.ranks import ranks
from tests.seqpar.linear.score_cases import assert_scores, plain_scores, score_cases, weighted

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")


def generator_of(tensors):
    """An `nn.Linear` of the case's weight and bias themselves."""
    generator = nn.Linear(1, 1, bias="bias" in tensors).double()
    for name in ("weight", "bias"):
        if name in tensors:
            parameter = nn.Parameter(tensors[name].detach(), requires_grad=tensors[name].requires_grad)
            setattr(generator, name, parameter)
    return generator


@given(score_cases(), st.sampled_from([None, ["cpu"], ["cpu"] * 2, ["cpu"] * 3]), st.sampled_from([None, 2]))
def test_scores_over_any_device_list_are_those_of_one_device(case, devices, chunk_tokens):
    tensors = case.tensors()
    generator = generator_of(tensors)
    options = case.options
    options.pop("ignore_index")
    criterion = seqpar.CrossEntropy(ignore_index=case.linear.padding)
    engine = seqpar.LossCompute(generator, criterion, devices=devices, chunk_tokens=chunk_tokens)
    leaves = {"hidden": tensors["hidden"], **dict(generator.named_parameters())}
    found = engine.token_scores(tensors["hidden"], tensors["target"], **options)
    assert_scores(found, plain_scores(**tensors, **case.options), tensors["target"] == case.linear.padding)
    assert_same_gradients(
        lambda: weighted(engine.token_scores(tensors["hidden"], tensors["target"], **options), case.linear.seed),
        lambda: weighted(plain_scores(**{**tensors, **leaves}, **case.options), case.linear.seed),
        leaves,
    )


def test_scores_need_a_pair_with_a_closed_form():
    engine = seqpar.LossCompute(nn.Sequential(nn.Tanh(), nn.Linear(3, 5)), seqpar.CrossEntropy())
    with pytest.raises(TypeError, match=r"the generator is a Sequential, not nn\.Linear; call seqpar\.token_scores"):
        engine.token_scores(torch.randn(2, 3), torch.tensor([0, 4]))


def scores_of_a_split_generator(rank, world):
    torch.manual_seed(0)
    whole = nn.Linear(4, 7)
    rows = [3, 4][rank]
    vocab = seqpar.VocabShard.of(rows, dist.group.WORLD)
    own = nn.Linear(4, rows)
    with torch.no_grad():
        own.weight.copy_(whole.weight[vocab.start : vocab.start + rows])
        own.bias.copy_(whole.bias[vocab.start : vocab.start + rows])
    hidden = torch.linspace(-2, 2, 20).view(5, 4)
    target = torch.tensor([0, 6, 3, -100, 2])
    engine = seqpar.LossCompute(own, seqpar.CrossEntropy(), vocab=vocab)
    found = engine.token_scores(hidden, target, entropy=True)
    expected = seqpar.LossCompute(whole, seqpar.CrossEntropy()).token_scores(hidden, target, entropy=True)
    return [float((found[i] - expected[i]).detach().abs().max()) for i in range(2)]


def test_an_engine_with_a_split_vocabulary_scores_over_it():
    for differences in ranks(2, scores_of_a_split_generator):
        assert max(differences) <= 1e-6
