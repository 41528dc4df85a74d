"""The private names of FSDP2 and DDP are where `torch_private.py` looks for them, or an error says which is not."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqpar.distributed import torch_private
from seqpar.distributed.reducers import without_remains
from seqpar.testing.ranks import ranks

NAMES = set(re.findall(r'_private\([^"]*"(\w+)"', inspect.getsource(torch_private)))
"""Every private name that is looked up."""
READS = set(re.findall(r'getattr\([^"]*"(_\w+|shard_process_group)"', inspect.getsource(torch_private)))
"""Those that not every version, or not every object, has."""


def missing(rank, world):
    """The names that no object has, of DDP and of FSDP2's state, groups and parameters in the middle of a step."""
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    static = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    static(torch.ones(1, 2)).sum().backward()
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(torch.ones(1, 2)).sum().backward()
    state = model._get_fsdp_state()
    (group,) = (group.group for _, group in torch_private.parameter_groups(model))
    objects = [ddp, static, model, state, group, group.mesh_info, group.comm_ctx, *group.fsdp_params]
    absent = {name for name in NAMES | READS if not any(hasattr(each, name) for each in objects)}
    # Before torch 2.13 a unit has one group of parameters
    one_group = {"_fsdp_param_groups"} if torch.__version__ < (2, 13) else set()
    return sorted(absent - one_group)


def test_this_torch_has_every_private_name_that_is_looked_up():
    assert {"_get_fsdp_state", "fsdp_params", "_module_parameters", "unsharded_accumulated_grad"} <= NAMES
    assert "_unsharded_param" in READS
    for absent in ranks(2, missing):
        assert not absent, f"torch {torch.__version__} has renamed them"


def test_a_name_that_this_torch_lacks_is_named():
    said = f"torch {re.escape(torch.__version__)} has no SimpleNamespace._module_parameters, which seqpar needs for DDP"
    with pytest.raises(RuntimeError, match=said):
        torch_private.ddp_parameters(SimpleNamespace())


def remembered(rank, world):
    """How many forwards FSDP2 remembers after some without gradients, and after they are forgotten."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module in (*layers, layers):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    with torch.no_grad():
        for _ in range(3):
            layers(torch.ones(1, 2))
    groups = [group.group for _, group in torch_private.parameter_groups(layers)]

    def forwards():
        return [len(each) for g in groups for each in (g.comm_ctx.post_forward_order, g._post_forward_indices)]

    before = forwards()
    torch_private.forget_forwards(layers)
    return before, forwards()


def test_forwards_that_no_backward_follows_are_forgotten():
    for before, after in ranks(2, remembered):
        assert all(before)
        assert not any(after)


class Settable:
    """What FSDP2 keeps of a parameter, up to torch 2.14."""

    def __init__(self):
        self.unsharded_accumulated_grad = torch.ones(3)
        self.sharded_param = nn.Parameter(torch.ones(3))
        self._unsharded_param = nn.Parameter(torch.ones(3))
        self._unsharded_param.grad = torch.ones(3)


class ReadOnly(Settable):
    """The same, from torch 2.15 on."""

    unsharded_accumulated_grad = property(lambda self: self.kept)

    def __init__(self):
        self.kept = torch.ones(3)
        self.sharded_param = nn.Parameter(torch.ones(3))
        self._unsharded_param = nn.Parameter(torch.ones(3))
        self._unsharded_param.grad = torch.ones(3)


@pytest.mark.parametrize("kind", [Settable, ReadOnly])
def test_gradients_that_were_not_reduced_are_forgotten_where_they_cannot_be_set_too(kind):
    kept = kind()
    torch_private.ParameterGroup(SimpleNamespace(fsdp_params=[kept])).forget_gradients()
    assert kept._unsharded_param.grad is None
    assert kept.unsharded_accumulated_grad is None or not kept.unsharded_accumulated_grad.any()


def failing(rank, world):
    """The error of a step whose remains this torch does not let go, as under FSDP2 of a version that is not known."""
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(torch.ones(1, 2)).sum().backward()
    group = next(group for _, group in torch_private.parameter_groups(model))
    group.group.fsdp_params = [object()]
    try:
        with without_remains(model):
            raise OverflowError("the step's own")
    except OverflowError as error:
        return [str(error), *error.__notes__]


def test_the_steps_own_error_is_never_hidden():
    for said, note in ranks(2, failing):
        assert said == "the step's own"
        # Which name of the planted object is missed first depends on torch's version
        assert note.startswith("gradients of this step may remain: ")
