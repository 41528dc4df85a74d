"""A right training step, and a sum over the ranks, in a file that rank 1 loads slowly."""

import os
import time

import torch
import torch.distributed as dist

from conformance import LayoutAdapter
from conformance.layout_adapters import torch_step

if os.environ.get("RANK") == "1":
    time.sleep(5)

STEP = LayoutAdapter("loaded slowly", torch_step, frozenset({"data parallel"}))


def sum_of_ranks(rank, world):
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()
