"""The real Accelerator: a step over micro-batches and ranks has the gradient of one batch on one device."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

from seqpar.integrations.accumulate import accumulate_step
from seqpar.testing.ranks import Pool
from tests.seqpar.integrations.small_seq2seq import (
    as_one_batch,
    loss_of,
    micro_batches,
    tokens_of,
    whole,
    whole_gradients,
    with_loss,
)
from tests.seqpar.integrations.tiny_models import gradients, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def fresh_accelerator(steps=1, fsdp=None):
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()
    if fsdp is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=steps)
    # accelerate shards on accelerators only, which it takes these processes' CPUs for from here on
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=fsdp, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def stepped(rank, world, counts, fsdp=None):
    """One step of this rank's micro-batches: gradients, mean loss, and how far the weights moved."""
    accelerator = fresh_accelerator(fsdp=fsdp)
    plain = with_loss()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    before = [whole(p.detach()).clone() for p in plain.parameters()]
    loss = accumulate_step(
        accelerator, model, micro_batches(counts[rank], rank), lambda m: loss_of(model, m), tokens_of
    )
    got = whole_gradients(plain)
    optimizer.step()
    moved = max((a - whole(b.detach())).abs().max().item() for a, b in zip(before, plain.parameters(), strict=True))
    return got, loss.mean, moved


@pytest.mark.parametrize("count", [1, 4])
def test_the_gradient_is_that_of_the_whole_batch(count):
    got, mean, moved = stepped(0, 1, [count])
    expected, loss = as_one_batch(micro_batches(count, 0))
    assert relative_error(got, expected) < 1e-12
    torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)
    assert moved > 0


FOUR = pytest.param([3, 1, 2, 0], 2, marks=pytest.mark.hf_models)


@pytest.mark.parametrize(
    ("counts", "fsdp"), [([1, 1], None), ([3, 2], None), ([4, 0], None), ([3, 2], 2), ([4, 0], 2), FOUR]
)
def test_the_gradient_of_several_ranks_is_that_of_the_whole_batch(counts, fsdp):
    pool = Pool(len(counts))  # of its own, because an Accelerator leaves state behind in its process
    try:
        results = pool.call(stepped, counts, fsdp)
    finally:
        pool.close()
    batches = [m for rank, count in enumerate(counts) for m in micro_batches(count, rank)]
    expected, loss = as_one_batch(batches)
    for got, mean, moved in results:
        assert relative_error(got, expected) < 1e-12
        torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)
        assert moved > 0


def test_stock_accumulation_is_a_mean_of_means():
    accelerator = fresh_accelerator(4)
    plain = with_loss()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    batches = micro_batches(4, 0)
    for batch in batches[:3]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch).mean)
            optimizer.step()
            optimizer.zero_grad()
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batches[3]).mean)
    assert relative_error(gradients(plain), as_one_batch(batches)[0]) > 0.05


def test_an_accelerator_that_divides_itself_is_refused():
    accelerator = fresh_accelerator(4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        accumulate_step(accelerator, with_loss(), micro_batches(1, 0), lambda m: None, tokens_of)


def refused(rank, world):
    accelerator, model = fresh_accelerator(), with_loss()
    with pytest.raises(TypeError, match="2 ranks and no DDP or FSDP2 reduces the gradients of this ModelWithLoss"):
        accumulate_step(accelerator, model, micro_batches(1, 0), lambda m: loss_of(model, m), tokens_of)
    return True


def test_a_model_that_was_not_prepared_for_its_ranks_is_refused():
    pool = Pool(2)
    try:
        assert pool.call(refused) == [True, True]
    finally:
        pool.close()


class DeepSpeedEngine(torch.nn.Module):
    """A stand-in by name: the real one is made on an accelerator."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [DeepSpeedEngine, lambda m: torch.nn.Sequential(DeepSpeedEngine(m))])
def test_an_engine_of_deepspeed_is_refused_on_one_rank_too(wrap):
    accelerator = fresh_accelerator()
    with pytest.raises(
        TypeError, match="model is a DeepSpeedEngine, whose backward divides and reduces in its own way"
    ):
        accumulate_step(accelerator, wrap(with_loss()), micro_batches(1, 0), lambda m: None, tokens_of)
