"""Layers over ranks with torch's pipeline schedules: the engine is the last stage's loss."""

import contextlib
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import models
import seqpar
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import assert_answers

PAD, VOCAB, MICRO_BATCHES = 0, 13, 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def translation_model(tie="target"):
    torch.manual_seed(3)
    config = models.TransformerConfig(
        d_model=8, heads=2, d_ff=16, encoder_layers=2, decoder_layers=2, dropout=0.0, tie=tie
    )
    return models.make_transformer(config, VOCAB, VOCAB, PAD).double()


def batch():
    generator = torch.Generator().manual_seed(4)
    src, tgt = (
        torch.randint(1, VOCAB, (8, 5), generator=generator),
        torch.randint(1, VOCAB, (8, 7), generator=generator),
    )
    for row in range(8):  # padding of different lengths, so that micro-batches have different numbers of tokens
        tgt[row, 7 - row % 5 :] = PAD
        src[row, 5 - row % 3 :] = PAD
    # Adjacent in memory: torch 2.11 refuses a micro-batch whose strides are not those of the first stage's example
    return src, tgt[:, :-1].contiguous(), tgt[:, 1:].contiguous()


class EncoderStage(nn.Module):
    """The first stage: encoder and source embedding."""

    def __init__(self, model):
        super().__init__()
        self.encoder, self.src_embed = model.encoder, model.src_embed

    def forward(self, src, tgt=None):
        return self.encoder(self.src_embed(src), models.padding_mask(src, PAD))


class DecoderStage(nn.Module):
    """The last stage: decoder, target embedding and generator; it returns hidden states, not logits."""

    def __init__(self, model):
        super().__init__()
        self.decoder, self.tgt_embed, self.generator = model.decoder, model.tgt_embed, model.generator

    def forward(self, memory, src, tgt):
        return self.decoder(self.tgt_embed(tgt), None, memory, models.padding_mask(src, PAD))


@contextlib.contextmanager
def torch_may_warn():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*pipelining.*")
        yield


def pipelined(rank, world, schedule):
    model = translation_model()
    src, tgt, target = batch()
    engine = seqpar.LossCompute(model.generator, seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD), chunk_tokens=3)
    tokens = int((target != PAD).sum())  # of all micro-batches
    part = (EncoderStage, DecoderStage)[rank](model)
    with torch_may_warn():
        stage = PipelineStage(part, rank, world, torch.device("cpu"), group=dist.group.WORLD)
        run = SCHEDULES[schedule](
            stage,
            MICRO_BATCHES,
            loss_fn=lambda hidden, target: engine(hidden, target).total / tokens,
            scale_grads=False,
        )
        if rank == 0:
            run.step(src)
            total = 0.0
        else:
            losses = []
            run.step(src=src, tgt=tgt, target=target, losses=losses)
            total = float(sum(loss.detach() for loss in losses)) * tokens
    return total, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_encoder_and_a_decoder_on_two_ranks_have_the_gradient_of_one_device(schedule):
    model = translation_model()
    src, tgt, target = batch()
    logits = model.generator(model(src, tgt)).flatten(0, 1)
    total = nn.functional.cross_entropy(
        logits, target.flatten(), ignore_index=PAD, label_smoothing=0.1, reduction="sum"
    )
    (total / (target != PAD).sum()).backward()
    (_, first), (value, last) = ranks(2, pipelined, schedule)
    together = {n: first[n] if first[n] is not None else last[n] for n in first}
    assert not {n for n in first if first[n] is not None and last[n] is not None}
    assert_answers([(value, together)], (float(total.detach()), {n: p.grad for n, p in model.named_parameters()}))


class Block(nn.Module):
    """One of four stages of a decoder-only stack."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Embedding(VOCAB, 6) if index == 0 else nn.Identity()
        self.mix = nn.Linear(6, 6)
        self.double()

    def forward(self, x):
        return torch.tanh(self.mix(self.first(x)))


def head():
    torch.manual_seed(9)
    return nn.Linear(6, VOCAB).double()


# Each schedule, and which of the 2 x world stages it runs on a rank
ROUND = {ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble}
SCHEDULES_OF_TWO = [ScheduleInterleaved1F1B]
# Those of older torch end at any autograd.Function
if torch.__version__ >= (2, 13):
    SCHEDULES_OF_TWO += [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV]


def two_stages(rank, world, schedule, make_loss):
    """Run a step of a decoder-only stack with two stages a rank, after a schedule; the last stage has the head."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    generator, (_, tgt, target) = head(), batch()
    tokens = int((target != PAD).sum())
    last = 2 * world - 1
    # Side by side, or down the ranks and up again, so that rank 0 has the first stage and the last
    blocks = {i: Block(i) for i in (rank, rank + world if schedule in ROUND else last - rank)}
    if last in blocks:
        blocks[last].generator = generator  # the last stage's module has it, so the schedule knows its parameters
    loss = make_loss(generator)
    losses = []
    with torch_may_warn():
        stages = [PipelineStage(b, i, last + 1, torch.device("cpu"), group=group) for i, b in blocks.items()]
        run = schedule(stages, 8, loss_fn=lambda hidden, target: loss(hidden, target) / tokens, scale_grads=False)
        run.step(*[tgt][rank:], **({"target": target, "losses": losses} if last in blocks else {}))
    named = [(f"{i}.{n}", p) for i, b in blocks.items() for n, p in b.named_parameters() if "generator" not in n]
    named += [(f"head.{n}", p) for n, p in generator.named_parameters()]
    return float(sum(loss.detach() for loss in losses)) * tokens, {n: p.grad for n, p in named if p.grad is not None}


def chunked(generator):
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(ignore_index=PAD), chunk_tokens=2)
    return lambda hidden, target: engine(hidden, target).total


def one_process(world):
    """Return the plain loss of the whole batch, and every gradient."""
    blocks, generator, (_, tgt, target) = [Block(i) for i in range(2 * world)], head(), batch()
    logits = generator(nn.Sequential(*blocks)(tgt)).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, target.flatten(), ignore_index=PAD, reduction="sum")
    (total / (target != PAD).sum()).backward()
    expected = {f"{i}.{n}": p.grad for i, b in enumerate(blocks) for n, p in b.named_parameters()}
    expected |= {f"head.{n}": p.grad for n, p in generator.named_parameters()}
    return float(total.detach()), expected


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES_OF_TWO, ids=lambda s: s.__name__)
def test_stages_of_a_decoder_only_stack_have_the_gradient_of_one_device(schedule, world):
    answers = ranks(world, two_stages, schedule, chunked)
    together = {}
    for _, grads in answers:
        assert not together.keys() & grads.keys()
        together |= grads
    assert_answers([(sum(value for value, _ in answers), together)], one_process(world))
