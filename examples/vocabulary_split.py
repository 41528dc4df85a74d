"""A vocabulary split over ranks: each rank holds some rows of the projection, and the loss is over all of them.

Run it with `torchrun --standalone --nproc-per-node 2 examples/vocabulary_split.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
import torch.distributed as dist
from torch import nn

import seqpar

VOCAB = 1_001

dist.init_process_group("gloo")  # "nccl" on GPUs
group = dist.group.WORLD
rank = dist.get_rank()
world = dist.get_world_size()
torch.manual_seed(0)
trunk = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh())  # the same on every rank
rows = VOCAB // world + (rank < VOCAB % world)  # shards may be uneven
vocab = seqpar.VocabShard.of(rows, group)
weight = nn.Parameter((torch.randn(VOCAB, 64) / 8)[vocab.start : vocab.start + rows].clone())
optimizer = torch.optim.Adam([*trunk.parameters(), weight], lr=1e-2)

for step in range(30):
    tokens = torch.randint(VOCAB, (8, 12))  # the same on every rank of the group
    loss = seqpar.linear_cross_entropy(trunk(tokens), weight, tokens, label_smoothing=0.1, vocab=vocab)
    optimizer.zero_grad()
    (loss.total / loss.tokens).backward()  # every rank has the trunk's whole gradient, and its own rows of the weight's
    optimizer.step()
    if rank == 0 and step in (0, 29):
        print(f"step {step}: loss {loss.mean:.3f}; rank 0 holds {rows} of {VOCAB} classes")
dist.destroy_process_group()
