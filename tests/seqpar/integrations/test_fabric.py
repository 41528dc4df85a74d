"""The real Lightning Fabric: a step over micro-batches and ranks has the gradient of one batch on one device."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from seqpar.integrations.accumulate import accumulate_step
from seqpar.testing.ranks import Pool
from tests.seqpar.integrations.small_seq2seq import (
    as_one_batch,
    loss_of,
    micro_batches,
    tokens_of,
    whole_gradients,
    with_loss,
)
from tests.seqpar.integrations.tiny_models import relative_error

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric_with(world, how):
    strategy = "auto"
    if how == "ddp":
        strategy = "ddp"
    elif how == "fsdp2":
        strategy = ModelParallelStrategy(sharded, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def stepped(rank, world, counts, how):
    """One step of this rank's micro-batches: gradients and mean loss."""
    fabric = fabric_with(world, how)
    plain = with_loss()
    model = fabric.setup_module(plain)
    loss = accumulate_step(fabric, model, micro_batches(counts[rank], rank), lambda m: loss_of(model, m), tokens_of)
    return whole_gradients(plain), loss.mean


@pytest.mark.parametrize("count", [1, 4])
def test_the_gradient_is_that_of_the_whole_batch(count):
    got, mean = stepped(0, 1, [count], "alone")
    expected, loss = as_one_batch(micro_batches(count, 0))
    assert relative_error(got, expected) < 1e-12
    torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("counts", [[2, 4], [3, 0]])
def test_the_gradient_of_two_ranks_is_that_of_the_whole_batch(counts, how):
    pool = Pool(2)  # of its own, because a Fabric leaves state behind in its process
    try:
        results = pool.call(stepped, counts, how)
    finally:
        pool.close()
    expected, loss = as_one_batch([m for rank, count in enumerate(counts) for m in micro_batches(count, rank)])
    for got, mean in results:
        assert relative_error(got, expected) < 1e-12
        torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)


def refused(rank, world):
    fabric, model = fabric_with(world, "ddp"), with_loss()
    with pytest.raises(TypeError, match="2 ranks and no DDP or FSDP2 reduces the gradients of this ModelWithLoss"):
        accumulate_step(fabric, model, micro_batches(1, 0), lambda m: loss_of(model, m), tokens_of)
    return True


def test_a_model_that_was_not_set_up_for_its_ranks_is_refused():
    pool = Pool(2)
    try:
        assert pool.call(refused) == [True, True]
    finally:
        pool.close()
