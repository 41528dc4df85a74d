"""The real lightning.Trainer: a step over micro-batches and ranks has the gradient of one batch on one device."""

import os
import tempfile

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

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
from tests.seqpar.integrations.tiny_models import gradients, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Translation(LightningModule):
    def __init__(self, automatic=False):
        super().__init__()
        self.automatic_optimization = automatic
        self.both = with_loss()
        self.seen = []

    def training_step(self, batches, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = accumulate_step(self.trainer, self, batches, lambda m: loss_of(self.both, m), tokens_of)
        self.seen.append((whole_gradients(self.both), loss.mean))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Sharded(Translation):
    def configure_model(self):
        fully_shard(self.both, mesh=self.device_mesh["data_parallel"])


class InTwo(Translation):
    def configure_model(self):
        for part in (self.both.model, self.both.loss):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class InNone(Translation):
    def configure_model(self):
        pass


def fitted(rank, world, counts, kind=Translation):
    """Two steps of `counts[rank]` micro-batches each: the gradients and mean loss of both."""
    steps = [micro_batches(counts[rank], 10 * step + rank) for step in range(2)]
    module = kind()
    strategy = "auto"
    if kind in (Sharded, InTwo, InNone):
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    elif world > 1:
        strategy = "ddp"
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(steps, batch_size=None))
    return module.seen


def expected_of(counts):
    for step in range(2):
        yield as_one_batch([m for rank, count in enumerate(counts) for m in micro_batches(count, 10 * step + rank)])


@pytest.mark.parametrize("count", [1, 4])
def test_the_gradient_is_that_of_the_whole_batch(count):
    for (got, mean), (expected, loss) in zip(fitted(0, 1, [count]), expected_of([count]), strict=True):
        assert relative_error(got, expected) < 1e-12
        torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("counts", "kind"), [([1, 1], Translation), ([2, 4], Translation), ([2, 4], Sharded)])
def test_the_gradient_of_two_ranks_is_that_of_the_whole_batch(counts, kind):
    pool = Pool(2)  # of its own, because a Trainer leaves state behind in its process
    try:
        results = pool.call(fitted, counts, kind)
    finally:
        pool.close()
    for seen in results:
        for (got, mean), (expected, loss) in zip(seen, expected_of(counts), strict=True):
            assert relative_error(got, expected) < 1e-12
            torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)


def refused(rank, world):
    with pytest.raises(ValueError, match="2 modules each reduce their own gradients, FSDPLossCompute and FSDPTrunk"):
        fitted(rank, world, [1, 1], InTwo)
    with pytest.raises(
        TypeError, match=r"no DDP or FSDP2 reduces the gradients of this InNone; call fully_shard\(.*\["
    ):
        fitted(rank, world, [1, 1], InNone)
    return True


def test_a_module_that_is_sharded_in_two_or_not_at_all_is_refused():
    pool = Pool(2)
    try:
        assert pool.call(refused) == [True, True]
    finally:
        pool.close()


class Returned(Translation):
    def training_step(self, batch, index):
        return loss_of(self.both, batch).mean

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self.both))


def test_stock_accumulation_is_a_mean_of_means():
    module, batches = Returned(automatic=True), micro_batches(4, 0)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.devnull,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert relative_error(module.seen[0], as_one_batch(batches)[0]) > 0.05


class Wrong(Translation):
    def training_step(self, batches, index):
        accumulate_step(*self.arguments(), batches, lambda m: loss_of(self.both, m), tokens_of)


class Automatic(Wrong):
    def __init__(self):
        super().__init__(automatic=True)

    def arguments(self):
        return self.trainer, self


class Part(Wrong):
    def arguments(self):
        return self.trainer, self.both


class Itself(Wrong):
    def arguments(self):
        return self, self


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Automatic, ValueError, "Automatic is optimised automatically"),
        (Part, TypeError, "model is a ModelWithLoss; with Lightning's Trainer it is the Part, self in training_step"),
        (Itself, TypeError, r"trainer is a Itself; it must be an Accelerator, a Fabric or Lightning's Trainer \(self"),
    ],
)
def test_what_is_not_a_trainer_and_its_own_module_in_manual_optimisation_is_refused(kind, error, message):
    with pytest.raises(error, match=message):
        fitted(0, 1, [1], kind)
