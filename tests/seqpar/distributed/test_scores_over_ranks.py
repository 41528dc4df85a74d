"""Scores under DDP, FSDP2, a split sequence and a split vocabulary: a loss of them is that of one device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing import assert_same_results
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.distributed.layouts import gradients_of, mesh, torch_may_warn
from tests.seqpar.engine.test_engine_scores import generator_of
from tests.seqpar.linear.scored_cases import LOSSES, PER_TOKEN, ScoredCase, plain_scored, scored_cases


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
    for total, gradients in ranks(2, in_a_rank, layout, by_engine):
        own = {name.removeprefix("module."): g for name, g in gradients.items() if not name.startswith("engine.")}
        assert_same_results((torch.tensor(total, dtype=torch.float64), own), (loss.detach(), expected))


LAYOUTS = ("whole hidden states", "pieces", "ddp", "fsdp2")
"""Hidden states that every rank has, of which it takes its steps; or pieces, and who adds up the parameters."""

HEAD = "engine.head.generator."
"""What the names of the projection's parameters begin with."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A step over (sequence, vocabulary) ranks."""

    case: ScoredCase
    mesh: tuple[int, int]
    order: str
    """Of time steps; in "any" order the pieces are contiguous, with any numbers of steps."""
    ends: tuple[int, ...]
    """In "any" order, where each rank's steps end."""
    padded: tuple[int | None, float]
    """The one sequence rank that has padding, and how much of its part; None leaves the case's own."""
    rows: list[int]
    """The classes of each vocabulary rank."""
    by_engine: bool
    micro_batches: int
    upstream: float

    def steps(self, rank):
        """The time steps of a sequence rank."""
        if self.order == "any":
            return torch.arange((0, *self.ends)[rank], self.ends[rank])
        return seqpar.time_steps(self.case.scores.linear.lead[1], rank, self.mesh[0], self.order)

    def tensors(self):
        """Those of one device, with what has one row for each token under its name."""
        tensors = self.case.tensors()
        rank, share = self.padded
        if rank is not None:
            random = torch.Generator().manual_seed(self.case.scores.linear.seed)
            mine = self.steps(rank)
            kept = torch.rand((len(tensors["target"]), len(mine)), generator=random) >= share
            tensors["target"][:, mine] = tensors["target"][:, mine].where(kept, self.case.scores.linear.padding)
        options = {n: self.case.options[n] for n in ("ids", "temperature")}
        return tensors | {n: t for n, t in options.items() if isinstance(t, torch.Tensor)}


@st.composite
def cuts(draw, layout):
    shape = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (2, 2)]))
    case = draw(scored_cases())
    lead = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    padded = draw(st.sampled_from([None, *range(shape[0])]))
    linear = dataclasses.replace(
        case.scores.linear, lead=lead, frozen=case.scores.linear.frozen - {"hidden"},
        padding_share=case.scores.linear.padding_share if padded is None else 0.0,
    )  # fmt: skip
    inner_ends = sorted(draw(st.lists(st.integers(0, lead[1]), min_size=shape[0] - 1, max_size=shape[0] - 1)))
    return Cut(
        case=dataclasses.replace(case, scores=dataclasses.replace(case.scores, linear=linear)),
        mesh=shape,
        order=draw(st.sampled_from(["contiguous", "zigzag", "any"])),
        ends=(*inner_ends, lead[1]),
        padded=(padded, draw(st.sampled_from([0.5, 1.0]))),
        rows=draw(vocabulary_splits(linear.vocab_size, shape[1], int(layout == "fsdp2"))),
        by_engine=draw(st.booleans()),
        micro_batches=draw(st.integers(1, lead[0])),
        upstream=draw(st.sampled_from([1.0, -3.0, 1 / 7])),
    )


class Scored(nn.Module):
    """A projection, and the loss under it."""

    def __init__(self, cut, tensors, vocab):
        super().__init__()
        self.cut, self.vocab = cut, vocab
        criterion = seqpar.CrossEntropy(ignore_index=cut.case.scores.linear.padding)
        generator = generator_of(tensors)
        self.engine = seqpar.LossCompute(generator, criterion, chunk_tokens=cut.case.chunk_tokens, vocab=vocab)

    def forward(self, rows):
        case = self.cut.case
        options = case.own_options | {n: rows[n] for n in ("ids", "temperature") if n in rows}
        per_token = {n: rows[n] for n in PER_TOKEN}
        if self.cut.by_engine:
            for name in ("ignore_index", "chunk_tokens"):
                del options[name]
            return self.engine.scored_loss(rows["hidden"], rows["target"], LOSSES[case.loss], **options, **per_token)
        generator = self.engine.head["generator"]
        options |= {"bias": generator.bias, "vocab": self.vocab} | per_token
        return seqpar.scored_loss(rows["hidden"], generator.weight, rows["target"], LOSSES[case.loss], **options)


def wrapped(module, layout, where):
    if layout == "ddp":
        return DistributedDataParallel(module, process_group=where.get_group())
    return fully_shard(module, mesh=where) if layout == "fsdp2" else module


def step(rank, world, layout, cut):
    """The whole step's loss, and this rank's gradients of what it has."""
    sequence_rank, vocab_rank = divmod(rank, cut.mesh[1])
    where = mesh(*cut.mesh)
    group = where.get_group("outer")
    rows = cut.tensors()
    vocab = seqpar.VocabShard.of(cut.rows[vocab_rank], where.get_group("inner")) if cut.mesh[1] > 1 else None
    here = slice(None) if vocab is None else slice(vocab.start, vocab.start + cut.rows[vocab_rank])
    head = {n: rows.pop(n) for n in ("weight", "bias") if n in rows}
    head = {n: t.detach()[here].clone().requires_grad_(t.requires_grad) for n, t in head.items()}
    module = Scored(cut, head, vocab)
    with torch_may_warn():
        if layout == "whole hidden states":
            loss = of_whole(module, rows, cut, group, sequence_rank)
            return float(loss.total), {n: t.grad for n, t in rows.items() if t.requires_grad} | gradients_of(module)
        # In an order of their own: of no time steps, indexing leaves strides of 0, of which autograd warns
        own = {n: t.detach()[:, cut.steps(sequence_rank)] for n, t in rows.items()}
        leaves = {
            n: t.clone(memory_format=torch.contiguous_format).requires_grad_(rows[n].requires_grad)
            for n, t in own.items()
        }
        trained = any(p.requires_grad for p in module.parameters())
        wrapper = wrapped(module, layout, where["outer"]) if trained else module
        loss = seqpar.accumulate_gradients(
            [{n: t[i :: cut.micro_batches] for n, t in leaves.items()} for i in range(cut.micro_batches)],
            wrapper,
            lambda m: (m["target"] != cut.case.scores.linear.padding).sum(),
            model=wrapper if trained and layout != "pieces" else None,
            group=group,
            backward=lambda loss: (loss * cut.upstream).backward(),
        )
    grads = {n: t.grad for n, t in leaves.items() if t.requires_grad}
    if trained and layout != "pieces":  # both wrappers take the mean over ranks, of parameters alone
        grads = {n: g / cut.mesh[0] for n, g in grads.items()}
    return float(loss.total), grads | gradients_of(wrapper)


def of_whole(module, rows, cut, group, rank):
    """Every rank ends with the whole gradient of everything, unwrapped."""
    copies = {n: seqpar.copy_to_group(t, group) if t.requires_grad else t for n, t in rows.items()}
    if cut.order == "any":
        mine = {n: t[:, cut.steps(rank)] for n, t in copies.items()}
    else:
        mine = {n: seqpar.split_time(t, group, order=cut.order) for n, t in copies.items()}
    head = {n: seqpar.copy_to_group(p, group) if p.requires_grad else p for n, p in module.named_parameters()}
    loss = functional_call(module, head, (mine,))
    whole = seqpar.sum_over_ranks(loss, group)
    (loss.total * cut.upstream / whole.tokens.clamp(min=1)).backward()
    return whole


def assembled(answers, layout, cut):
    """The answers of all ranks, each with the gradients of everything whole."""
    sequence, vocabulary = cut.mesh
    completed = []
    for rank, (total, found) in enumerate(answers):
        grads = {n.removeprefix(HEAD): g for n, g in found.items()}
        columns = [[answers[s * vocabulary + v][1] for s in range(sequence)] for v in range(vocabulary)]
        for name in ("weight", "bias"):
            if grads.get(name) is not None:
                parts = [[g[HEAD + name] for g in column] for column in columns]
                # In pieces nobody adds up the sequence ranks' gradients of a parameter
                own = [sum(column) if layout == "pieces" else column[rank // vocabulary] for column in parts]
                grads[name] = torch.cat(own)
        if layout != "whole hidden states":
            for name in set(grads) - {"weight", "bias"}:
                pieces = [g[name] for g in columns[rank % vocabulary]]
                whole = torch.cat(pieces, 1)
                whole[:, torch.cat([cut.steps(s) for s in range(sequence)])] = torch.cat(pieces, 1)
                grads[name] = whole
        completed.append((total, grads))
    return completed


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=settings.default.max_examples // 4)  # of each of four layouts
@given(data=st.data())
def test_over_a_split_sequence_every_loss_of_scores_is_that_of_one_device(layout, data):
    cut = data.draw(cuts(layout))
    case, tensors = cut.case, cut.tensors()
    leaves = {n: t for n, t in tensors.items() if t.requires_grad}
    plain = plain_scored(case.loss, tensors, **case.options, entropy=case.entropy)
    tokens = max(1, int((tensors["target"] != case.scores.linear.padding).sum()))
    mean = plain * cut.upstream / tokens
    right = [None] * len(leaves)
    if mean.requires_grad:
        right = torch.autograd.grad(mean, list(leaves.values()), allow_unused=True)
    expected = plain.detach(), dict(zip(leaves, right, strict=True))
    for total, grads in assembled(ranks(cut.mesh[0] * cut.mesh[1], step, layout, cut), layout, cut):
        found = {n: g for n, g in grads.items() if n in leaves or g is not None}
        assert_same_results((torch.tensor(total, dtype=torch.float64), found), expected)
