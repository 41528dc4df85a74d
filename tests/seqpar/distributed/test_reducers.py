"""Gradients that a wrapper would not reduce, though the loss needs them, are refused by name on every rank."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.distributed.reducers import gathers_for_any
from seqpar.testing.ranks import ranks
from tests.seqpar.distributed.layouts import TwoLayers, assert_two_layers, gradients_of, message, rows_of


def sharded(model, **options):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return model


def unfrozen():
    model = TwoLayers()
    model.below.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model.below.requires_grad_(True)
    return ddp, ddp


def swapped():
    """As many parameters are trained as when it was made, but others."""
    model = TwoLayers()
    model.below.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model.above.requires_grad_(False)
    model.below.requires_grad_(True)
    return ddp, ddp


def added_to_ddp():
    model = TwoLayers()
    ddp = DistributedDataParallel(model)
    model.extra = nn.Parameter(torch.ones(2).double())
    return ddp, ddp


def ignored_by_ddp():
    model = TwoLayers()
    model._ddp_params_and_buffers_to_ignore = ["below.weight"]
    ddp = DistributedDataParallel(model)
    return ddp, ddp


def ignored_by_fsdp():
    model = TwoLayers()
    model = sharded(model, ignored_params={model.below.weight})
    return model, model


def with_a_head_outside(body):
    head = nn.Linear(3, 2).double()
    return body, lambda x: seqpar.TokenLoss(head(body(x)).square().sum(), torch.tensor(len(x)))


def head_outside_ddp():
    return with_a_head_outside(DistributedDataParallel(nn.Linear(3, 3).double()))


def head_outside_fsdp():
    return with_a_head_outside(sharded(nn.Linear(3, 3).double()))


def inner_module():
    ddp = DistributedDataParallel(TwoLayers())
    return ddp, ddp.module


def fsdp1():
    model = FullyShardedDataParallel(TwoLayers(), use_orig_params=True, device_id=torch.device("cpu"))
    return model, model


def rounded():
    model = sharded(TwoLayers(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    return model, model


OUTSIDE = r"ValueError: the loss depends on a parameter of shape \((2, 3|2,)\) that model does not have"

UNFROZEN = "is trainable and was not when DistributedDataParallel was made, .*; wrap the model again"

WRONG = {
    unfrozen: f"ValueError: module.below.weight {UNFROZEN}",
    swapped: f"ValueError: module.below.weight {UNFROZEN}",
    added_to_ddp: "ValueError: the gradient of module.extra is not reduced over the ranks: it was added",
    ignored_by_ddp: "ValueError: the gradient of module.below.weight is not reduced over the ranks: .* or left out",
    ignored_by_fsdp: "ValueError: the gradient of below.weight is not reduced over the ranks: .* or left out",
    head_outside_ddp: OUTSIDE,
    head_outside_fsdp: OUTSIDE,
    inner_module: "RuntimeError: loss_of did not call model, the DistributedDataParallel, but perhaps the module",
    fsdp1: r"TypeError: model is a FullyShardedDataParallel \(FSDP1\), which is not supported; call fully_shard",
    rounded: "TypeError: loss_of returned a total in torch.bfloat16, .* leave output_dtype unset",
}


def refusal(rank, world, setup):
    x = rows_of(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = setup()
        return message(seqpar.accumulate_gradients, [x, x], loss_of, len, model=model, group=dist.group.WORLD)


@pytest.mark.parametrize("setup", WRONG, ids=lambda setup: setup.__name__)
def test_a_gradient_that_would_not_be_reduced_is_refused(setup):
    for said in ranks(2, refusal, setup):
        assert re.match(WRONG[setup], said), said


def without_synchronising(rank, world):
    ddp = DistributedDataParallel(TwoLayers())
    with ddp.no_sync():
        return message(seqpar.accumulate_gradients, [torch.ones(1, 3).double()], ddp, len, model=ddp)


def test_inside_no_sync_it_is_refused():
    for said in ranks(2, without_synchronising):
        assert re.match(r"RuntimeError: .* called inside model.no_sync\(\)", said), said


def after_evaluation(rank, world, wrapper):
    """Two steps, each after an evaluation, which may leave FSDP2's parameters gathered; part of the model is frozen."""
    model = TwoLayers()
    model.below.bias.requires_grad_(False)
    wrapped = sharded(model, reshard_after_forward=False) if wrapper == "fsdp2" else DistributedDataParallel(model)
    # It holds the sharded parameters, where wrapped.zero_grad() would clear the gathered ones
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = rows_of(rank)
    for _ in range(2):
        with torch.no_grad():
            wrapped(x)
        optimizer.zero_grad()
        seqpar.accumulate_gradients([x], wrapped, len, model=wrapped, group=dist.group.WORLD)
    return gradients_of(wrapped)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_after_an_evaluation_nothing_is_missing(wrapper):
    assert_two_layers(range(2), ranks(2, after_evaluation, wrapper), frozen="below.bias")


def asked_of_two_units(rank, world):
    """Each rank asks of the same two units, registered in another order; the second rank alone wants the forward."""
    groups = [dist.new_group() for _ in range(2)]
    units = {
        f"unit{number}": fully_shard(nn.Linear(2, 2), mesh=DeviceMesh.from_group(group, "cpu"))
        for number, group in enumerate(groups)
    }
    names = sorted(units, reverse=rank == 1)
    return gathers_for_any(nn.ModuleDict({name: units[name] for name in names}), wanted=rank == 1)


def test_ranks_ask_their_groups_in_one_order_whatever_the_order_of_the_modules():
    assert ranks(2, asked_of_two_units) == [True, True]
