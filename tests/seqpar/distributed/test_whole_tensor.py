"""A DTensor as a whole: gloo gathers an accelerator's on the CPU, where torch's own way ends the process."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from seqpar.distributed import collectives
from seqpar.distributed.collectives import gathers_on_cpu, whole_tensor
from seqpar.testing.ranks import ranks

ROOT = Path(__file__).parents[3]
PLACEMENTS = {
    (2,): [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]],
    (2, 2): [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(1)]],
}


def gathered(rank, world, shape, on_cpu):
    """The whole of a tensor and its gradient, for every placement; neither 5 nor 3 is divided by 2."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[: len(shape)])
    torch.manual_seed(0)
    whole = torch.randn(5, 3, dtype=torch.float64)
    factor = torch.randn(5, 3, dtype=torch.float64)
    found = []
    # The CPU stands in for an accelerator here: gloo knows no other that there is without a GPU
    with patch.object(collectives, "gathers_on_cpu", lambda mesh: on_cpu):
        for placements in PLACEMENTS[shape]:
            if Partial() in placements:
                sharded = DTensor.from_local(whole / 2, mesh, placements, run_check=False).requires_grad_()
            else:
                sharded = distribute_tensor(whole, mesh, placements).requires_grad_()
            out = whole_tensor(sharded)
            (out * factor).sum().backward()
            found.append((out.detach(), sharded.grad.to_local()))
    return whole, found


@pytest.mark.parametrize("shape", PLACEMENTS, ids=str)
def test_a_gather_on_the_cpu_gives_the_whole_tensor_and_the_gradient_of_torchs_own(shape):
    world = 2 * len(shape)
    ours = ranks(world, gathered, shape, True)
    torchs = ranks(world, gathered, shape, False)
    for (whole, on_cpu), (_, as_torch) in zip(ours, torchs, strict=True):
        for (out, grad), (expected, expected_grad) in zip(on_cpu, as_torch, strict=True):
            torch.testing.assert_close(out, whole, rtol=1e-15, atol=0)
            assert torch.equal(out, expected)
            assert torch.equal(grad, expected_grad)


def devices_that_gather_on_the_cpu(rank, world):
    group = dist.group.WORLD
    return [
        kind
        for kind in ("cpu", "cuda")
        if gathers_on_cpu(SimpleNamespace(device_type=kind, get_all_groups=lambda: [group]))
    ]


def test_an_accelerators_tensors_are_gathered_on_the_cpu_over_gloo_and_nowhere_else():
    assert ranks(2, devices_that_gather_on_the_cpu)[0] == ["cuda"]
    mesh = SimpleNamespace(device_type="cuda", get_all_groups=lambda: [None])
    with patch.object(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl"):
        assert not gathers_on_cpu(mesh)


def test_a_plain_tensor_is_itself():
    x = torch.ones(2)
    assert whole_tensor(x) is x


def test_nothing_else_gathers_a_dtensor_by_itself():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    calling = [
        path
        for path in tracked.stdout.split()
        if not path.startswith("tests/") and re.search(r"\w\.full_tensor\(\)(?!\))", (ROOT / path).read_text())
    ]
    assert calling == ["seqpar/distributed/collectives.py"]
