"""Ranks work also in a process whose forks autograd refuses."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

from seqpar.testing import ranks


def gradient(rank: int, world: int, x: float) -> tuple[float, int]:
    """Return a gradient that is summed over the ranks, and whose child the rank is."""
    weight = torch.ones((), requires_grad=True)
    (x * (rank + 1) * weight).backward()
    dist.all_reduce(weight.grad)
    return float(weight.grad), os.getppid()


def test_the_refusal_of_a_build_for_cuda_is_found_and_there_is_none_on_the_cpu():
    # In a new process, because the first backward pass of a process decides
    code = """
import torch
from torch._subclasses import FakeTensorMode
from seqpar.testing.forks import autograd_works_in_a_fork
with FakeTensorMode():
    torch.zeros(1)
torch.zeros((), requires_grad=True).backward()
print(autograd_works_in_a_fork())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not torch.backends.cuda.is_built())


def test_ranks_have_another_parent_where_forks_of_this_process_are_refused(monkeypatch):
    monkeypatch.setattr(ranks, "_pools", {})
    monkeypatch.setattr(ranks, "autograd_works_in_a_fork", lambda: False)
    (first, parent), (second, other) = ranks.ranks(2, gradient, 2.0)
    ranks.close_all()
    assert first == second == 6.0
    assert parent == other != os.getpid()
