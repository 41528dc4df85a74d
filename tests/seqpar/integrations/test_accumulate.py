"""The real Accelerator, Lightning Fabric and lightning.Trainer: a step over micro-batches and ranks has the gradient of
one batch on one device.
"""

import os
import tempfile
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from seqpar.integrations.accumulate import accumulate_step
from tests.seqpar.integrations.small_seq2seq import (
    as_one_batch,
    loss_of,
    micro_batches,
    tokens_of,
    whole,
    whole_gradients,
    with_loss,
)
from tests.seqpar.integrations.tiny_models import assert_alike, gradients, relative_error
from tests.seqpar.integrations.trainer_runs import forget_accelerate, take_cpus_for_accelerators

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
OF_LIGHTNING = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def fresh_accelerator(steps=1, layout=""):
    forget_accelerate()
    if layout != "fsdp2":
        return Accelerator(cpu=True, gradient_accumulation_steps=steps)
    take_cpus_for_accelerators()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False)
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def by_accelerate(rank, world, counts, layout):
    """One step of this rank's micro-batches: gradients, mean loss, and how far the weights moved."""
    accelerator, plain = fresh_accelerator(layout=layout), with_loss()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    before = [whole(p.detach()).clone() for p in plain.parameters()]
    batches = micro_batches(counts[rank], rank)
    loss = accumulate_step(accelerator, model, batches, lambda m: loss_of(model, m), tokens_of)
    got = whole_gradients(plain)
    optimizer.step()
    moved = max((a - whole(b.detach())).abs().max().item() for a, b in zip(before, plain.parameters(), strict=True))
    return [(loss.mean, got, moved)]


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric_with(world, layout):
    strategy = layout
    if layout == "fsdp2":
        strategy = FabricStrategy(sharded, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def by_fabric(rank, world, counts, layout):
    """One step of this rank's micro-batches: gradients and mean loss."""
    fabric, plain = fabric_with(world, layout), with_loss()
    model = fabric.setup_module(plain)
    loss = accumulate_step(fabric, model, micro_batches(counts[rank], rank), lambda m: loss_of(model, m), tokens_of)
    return [(loss.mean, whole_gradients(plain))]


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
        self.seen.append((loss.mean, whole_gradients(self.both)))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Sharded(Translation):
    def configure_model(self):
        sharded(self.both, self.device_mesh)


class InTwo(Translation):
    def configure_model(self):
        for part in (self.both.model, self.both.loss):
            sharded(part, self.device_mesh)


class InNone(Translation):
    def configure_model(self):
        pass


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def by_lightning(rank, world, counts, layout, kind=None):
    """Two steps of `counts[rank]` micro-batches each: the gradients and mean loss of both."""
    steps = [micro_batches(counts[rank], 10 * step + rank) for step in range(2)]
    strategy, module = layout, (kind or {"fsdp2": Sharded}.get(layout, Translation))()
    if layout == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    with tempfile.TemporaryDirectory() as folder:
        given = {"use_distributed_sampler": False, "default_root_dir": folder, "max_epochs": 1}
        trainer = Trainer(accelerator="cpu", devices=world, strategy=strategy, **given, **QUIET)
        trainer.fit(module, DataLoader(steps, batch_size=None))
    return module.seen


CASES = {
    by_accelerate: {"auto": [[1], [4]], "ddp": [[1, 1], [3, 2], [4, 0]], "fsdp2": [[3, 2], [4, 0]]},
    by_fabric: {"auto": [[1], [4]], "ddp": [[2, 4], [3, 0]], "fsdp2": [[2, 4], [3, 0]]},
    by_lightning: {"auto": [[1], [4]], "ddp": [[1, 1], [2, 4]], "fsdp2": [[2, 4]]},
}
"""By trainer and layout, the number of micro-batches of each rank."""
PARAMETERS = [
    pytest.param(stepped, layout, counts, marks=() if stepped is by_accelerate else OF_LIGHTNING)
    for stepped, layouts in CASES.items()
    for layout, cases in layouts.items()
    for counts in cases
]
FOUR = pytest.param(by_accelerate, "fsdp2", [3, 1, 2, 0], marks=pytest.mark.hf_models)


@pytest.mark.parametrize(("stepped", "layout", "counts"), [*PARAMETERS, FOUR])
def test_the_gradient_is_that_of_the_whole_batch(stepped, layout, counts, own_ranks):
    alone = len(counts) == 1
    results = [stepped(0, 1, counts, layout)] if alone else own_ranks(len(counts), stepped, counts, layout)
    for seen in results:
        for step, (*got, moved) in enumerate((*each, 1)[:3] for each in seen):
            batches = [m for rank, count in enumerate(counts) for m in micro_batches(count, 10 * step + rank)]
            assert_alike(got, as_one_batch(batches))
            assert moved > 0


def test_stock_accumulation_by_accelerate_is_a_mean_of_means():
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
    assert relative_error(gradients(plain), as_one_batch(batches)[1]) > 0.05


class Returned(Translation):
    def training_step(self, batch, index):
        return loss_of(self.both, batch).mean

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self.both))


@OF_LIGHTNING
def test_stock_accumulation_by_lightning_is_a_mean_of_means():
    module, batches = Returned(automatic=True), micro_batches(4, 0)
    given = {"max_epochs": 1, "accumulate_grad_batches": 4, "default_root_dir": os.devnull}
    Trainer(accelerator="cpu", **given, **QUIET).fit(module, DataLoader(batches, batch_size=None))
    assert relative_error(module.seen[0], as_one_batch(batches)[1]) > 0.05


def test_an_accelerator_that_divides_itself_is_refused():
    accelerator = fresh_accelerator(4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        accumulate_step(accelerator, with_loss(), micro_batches(1, 0), lambda m: None, tokens_of)


def unprepared(rank, world, make):
    trainer, model = make(), with_loss()
    with pytest.raises(TypeError, match="2 ranks and no DDP or FSDP2 reduces the gradients of this ModelWithLoss"):
        accumulate_step(trainer, model, micro_batches(1, 0), lambda m: loss_of(model, m), tokens_of)
    return True


@pytest.mark.parametrize("make", [fresh_accelerator, pytest.param(partial(fabric_with, 2, "ddp"), marks=OF_LIGHTNING)])
def test_a_model_that_was_not_prepared_for_its_ranks_is_refused(make, own_ranks):
    assert own_ranks(2, unprepared, make) == [True, True]


def badly_sharded(rank, world):
    for kind, error, message in (
        (InTwo, ValueError, "2 modules each reduce their own gradients, FSDPLossCompute and FSDPTrunk"),
        (InNone, TypeError, r"no DDP or FSDP2 reduces the gradients of this InNone; call fully_shard\(.*\["),
    ):
        with pytest.raises(error, match=message):
            by_lightning(rank, world, [1, 1], "fsdp2", kind)
    return True


@OF_LIGHTNING
def test_a_module_that_is_sharded_in_two_or_not_at_all_is_refused(own_ranks):
    assert own_ranks(2, badly_sharded) == [True, True]


class DeepSpeedEngine(nn.Module):
    """A stand-in by name: the real one is made on an accelerator."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [DeepSpeedEngine, lambda m: nn.Sequential(DeepSpeedEngine(m))])
def test_an_engine_of_deepspeed_is_refused_on_one_rank_too(wrap):
    accelerator = fresh_accelerator()
    with pytest.raises(
        TypeError, match="model is a DeepSpeedEngine, whose backward divides and reduces in its own way"
    ):
        accumulate_step(accelerator, wrap(with_loss()), micro_batches(1, 0), lambda m: None, tokens_of)


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


@OF_LIGHTNING
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Automatic, ValueError, "Automatic is optimised automatically"),
        (Part, TypeError, "model is a ModelWithLoss; with Lightning's Trainer it is the Part, self in training_step"),
        (Itself, TypeError, r"trainer is an Itself; it must be an Accelerator, a Fabric or Lightning's Trainer \(self"),
    ],
)
def test_what_is_not_a_trainer_and_its_own_module_in_manual_optimisation_is_refused(kind, error, message):
    with pytest.raises(error, match=message):
        by_lightning(0, 1, [1], "auto", kind)
