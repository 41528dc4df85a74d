"""FSDP2: parameters and optimizer state are sharded over the ranks, and the loss is inside the outermost unit.

Run it with `torchrun --standalone --nproc-per-node 2 examples/fsdp2.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import seqpar

PAD = 0
VOCAB = 200

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))  # "cuda" on GPUs
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh())
engine = seqpar.LossCompute(nn.Linear(64, VOCAB), seqpar.CrossEntropy(ignore_index=PAD))
both = seqpar.ModelWithLoss(model, engine)
fully_shard(model[1], mesh=mesh)
fully_shard(both, mesh=mesh)  # the unit with the generator: its weight stays gathered for all chunks of the loss
optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)

torch.manual_seed(rank)
for step in range(30):
    tokens = torch.randint(1, VOCAB, (8, 12))
    tokens[rank:, 6 + rank :] = PAD
    loss = seqpar.accumulate_gradients(
        [tokens],
        lambda tokens: both(tokens, target=tokens),
        tokens_of=lambda tokens: (tokens != PAD).sum(),
        model=both,
        group=dist.group.WORLD,
    )
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step in (0, 29):
        print(f"step {step}: loss {loss.mean:.3f} over {loss.tokens} tokens of {world} ranks")
dist.destroy_process_group()
