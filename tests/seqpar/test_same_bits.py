"""The same call has the same bits: again in this process, in a second process, and under deterministic algorithms."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.testing.ranks import close_all, ranks
from tests.seqpar.kernels.interpreted import NUMPY_SAYS
from tests.seqpar.same_bits import ENTRY_POINTS, digest, digests, digests_of_kernels

pytestmark = [pytest.mark.unswitched, pytest.mark.filterwarnings(NUMPY_SAYS)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def first():
    return digests()


def test_every_entry_point_has_the_same_bits_again(first):
    assert digests() == first
    # What is hashed are numbers: another dtype has others
    for name in ENTRY_POINTS:
        assert first[f"{name}, float32"] != first[f"{name}, bfloat16"]


def test_every_entry_point_has_the_same_bits_in_a_second_process_and_so_have_the_kernels(first):
    variables = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.seqpar.same_bits"]
    printed = subprocess.run(command, env=os.environ | variables, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    here = digests_of_kernels()
    assert digests_of_kernels() == here
    assert json.loads(printed) == [first, here]


def test_under_deterministic_algorithms_nothing_raises_or_changes_and_no_unwritten_memory_is_read(first):
    """Torch then fills the memory that is allocated with nan."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert digests() == first
    finally:
        torch.use_deterministic_algorithms(False)


def step_of(rank, world, layout):
    """A rank's hash of a step's loss and gradients."""
    torch.manual_seed(0)
    trunk, head = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Dropout(0.5)), nn.Linear(16, 50)
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(rank))
    both = seqpar.ModelWithLoss(trunk, seqpar.LossCompute(head, seqpar.LabelSmoothing(0.1, "torch"), chunk_tokens=5))
    model = both
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if layout == "DDP":
            model = DistributedDataParallel(both)
        elif layout == "FSDP2":
            fully_shard(both, mesh=init_device_mesh("cpu", (world,)))
        if layout == "split vocabulary":
            weight = head.weight.detach().chunk(world)[rank].requires_grad_()
            shard = seqpar.VocabShard.of(len(weight), torch.distributed.group.WORLD)
            hidden = torch.randn(36, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
            loss = seqpar.linear_cross_entropy(hidden, weight, torch.arange(36), vocab=shard, chunk_tokens=5)
            loss.total.backward()
            return digest([loss.total, hidden.grad, weight.grad])
        loss = model(tokens, target=tokens)
        (loss.total / loss.tokens).backward()
    grads = [p.grad for p in both.parameters()]
    return digest([loss.total, *(g.to_local() if hasattr(g, "to_local") else g for g in grads)])


@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "split vocabulary"])
def test_ranks_have_the_same_bits_again_and_in_other_processes(layout):
    found = ranks(2, step_of, layout)
    assert ranks(2, step_of, layout) == found
    close_all()
    assert ranks(2, step_of, layout) == found
