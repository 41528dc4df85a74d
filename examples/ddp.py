"""DDP: every rank has its own sentences, and the gradient is that of all sentences together.

Run it with `torchrun --standalone --nproc-per-node 2 examples/ddp.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import seqpar

PAD = 0
VOCAB = 200

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
world = dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh())
engine = seqpar.LossCompute(nn.Linear(64, VOCAB), seqpar.CrossEntropy(ignore_index=PAD))
both = DistributedDataParallel(seqpar.ModelWithLoss(model, engine))  # the loss is inside the module that DDP wraps
optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)

torch.manual_seed(rank)
for step in range(30):
    micro_batches = []
    for _ in range(2):
        tokens = torch.randint(1, VOCAB, (8, 12))
        tokens[rank:, 6 + rank :] = PAD  # ranks differ in their token counts, so a mean of means would be wrong
        micro_batches.append(tokens)
    loss = seqpar.accumulate_gradients(
        micro_batches,
        lambda tokens: both(tokens, target=tokens),
        tokens_of=lambda tokens: (tokens != PAD).sum(),
        model=both,
    )
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step in (0, 29):
        print(f"step {step}: loss {loss.mean:.3f} over {loss.tokens} tokens of {world} ranks")
dist.destroy_process_group()
