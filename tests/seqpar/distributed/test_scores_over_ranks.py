"""Scores under DDP, FSDP2 and a split sequence: the gradient of any loss of them is that of one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import gradients_of, mesh, torch_may_warn

WORLD = 2


class Scorer(nn.Module):
    """A policy: an encoder of each token, and scores by the engine or by the function."""

    def __init__(self, by_engine: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4).double()
        self.mix = nn.Linear(4, 4).double()
        self.generator = nn.Linear(4, 9).double()
        self.engine = seqpar.LossCompute(self.generator, seqpar.CrossEntropy()) if by_engine else None

    def forward(self, tokens, target):
        hidden = self.mix(self.embed(tokens)).tanh()
        if self.engine is not None:
            return self.engine.token_scores(hidden, target, entropy=True)
        weight, bias = self.generator.weight, self.generator.bias
        return seqpar.token_scores(hidden, weight, target, bias=bias, entropy=True, chunk_tokens=3)


def batch():
    """Four sequences of six tokens, the end of two ignored, and an advantage for each token."""
    random = torch.Generator().manual_seed(1)
    tokens, target = torch.randint(9, (2, 4, 6), generator=random)
    target[1, 4:] = -100
    target[3, 1:] = -100
    return tokens, target, torch.randn(4, 6, dtype=torch.float64, generator=random)


def objective(scores, advantage):
    """A clipped surrogate with an entropy bonus, summed over tokens."""
    ratio = (scores.log_prob - scores.log_prob.detach() + 0.1 * advantage).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(surrogate + 0.3 * scores.entropy * (scores.log_prob != 0)).sum()


def in_a_rank(rank, world, layout, by_engine):
    """The summed objective and all gradients; each rank has half of the sequences, or of the time steps."""
    model = Scorer(by_engine)
    tokens, target, advantage = batch()
    half = (slice(2 * rank, 2 * rank + 2), slice(None))
    if layout == "sequence":
        half = (slice(None), slice(3 * rank, 3 * rank + 3))
    with torch_may_warn():
        if layout == "fsdp2":
            if by_engine:
                fully_shard(model.generator, mesh=mesh(world))
            fully_shard(model, mesh=mesh(world))
        else:
            model = DistributedDataParallel(model)
        loss = objective(model(tokens[half], target[half]), advantage[half])
        (loss * world).backward()  # which both wrappers divide by
    return float(seqpar.group_sum(loss, dist.group.WORLD)), gradients_of(model)


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "sequence"])
def test_a_loss_of_scores_over_ranks_has_the_gradient_of_one_device(layout, by_engine):
    model = Scorer(by_engine=False)
    tokens, target, advantage = batch()
    hidden = model.mix(model.embed(tokens)).tanh()
    log_p = model.generator(hidden).log_softmax(-1)
    counted = target != -100
    log_prob = log_p.gather(-1, target.where(counted, 0).unsqueeze(-1)).squeeze(-1).where(counted, 0.0)
    entropy = (-(log_p.exp() * log_p).sum(-1)).where(counted, 0.0)
    loss = objective(seqpar.TokenScores(log_prob, entropy), advantage)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for total, gradients in ranks(WORLD, in_a_rank, layout, by_engine):
        own = {name.removeprefix("module."): g for name, g in gradients.items() if not name.startswith("engine.")}
        assert_same_results((torch.tensor(total, dtype=torch.float64), own), (loss.detach(), expected))
