"""Time steps split over ranks: each rank has some steps of every sequence, and the gradient is that of one process.

The model is a decoder-only one. Its layers gather the keys and values of all ranks; everything else is computed for a
rank's own time steps, which `split_time` chooses so that causal attention is the same work for every rank.

Run it with `torchrun --standalone --nproc-per-node 2 examples/sequence_split.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar

VOCAB, TIME, WIDTH, HEADS = 100, 32, 64, 4
TEXT = torch.arange(4_000) * 7 % VOCAB  # each token is the previous one plus 7, modulo the vocabulary


class Gathered(torch.autograd.Function):
    """All ranks' tensors, in rank order; the gradient of a rank's own is the sum of what all ranks send back."""

    @staticmethod
    def forward(ctx, own: Tensor) -> Tensor:
        """Gather a tensor of the same shape from every rank: (ranks, ...)."""
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        return seqpar.group_sum(upstream.contiguous(), dist.group.WORLD)[dist.get_rank()]


class Layer(nn.Module):
    """A pre-norm layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.keys_values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """Map the states (B, t, D) of the time steps `steps`; those are all of them, or this rank's."""
        attended = self.norms[0](x)
        keys_values = self.keys_values(attended)
        if x.size(1) < TIME:
            keys_values = seqpar.join_time(list(Gathered.apply(keys_values)), order="zigzag")
        query, keys, values = (
            each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.query(attended), *keys_values.chunk(2, 2))
        )
        earlier = steps[:, None] >= torch.arange(TIME)  # a query sees the keys up to its own time step
        x = x + F.scaled_dot_product_attention(query, keys, values, attn_mask=earlier).transpose(1, 2).flatten(2)
        return x + self.outer(F.gelu(self.inner(self.norms[1](x))))


class Model(nn.Module):
    """Two layers; the embedding is also the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor, steps: Tensor) -> Tensor:
        """Map the tokens (B, t) of the time steps `steps` to hidden states (B, t, D)."""
        x = self.embed(tokens) + self.position(steps)
        for layer in self.layers:
            x = layer(x, steps)
        return x


dist.init_process_group("gloo")  # "nccl" on GPUs
group = dist.group.WORLD
torch.manual_seed(0)  # the same model and the same sequences on every rank
model = Model().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
mine = seqpar.time_steps(TIME, dist.get_rank(), dist.get_world_size(), order="zigzag")


def loss_of(sequences: Tensor) -> seqpar.TokenLoss:
    """Return the summed loss of this rank's time steps of whole sequences (B, T + 1)."""
    tokens, targets = (seqpar.split_time(each, group, order="zigzag") for each in (sequences[:, :-1], sequences[:, 1:]))
    return seqpar.linear_cross_entropy(model(tokens, mine), model.embed.weight, targets)


def difference_from_one_process(sequences: Tensor) -> float:
    """Return the largest difference of a gradient from that of the plain loss of all time steps, relative to it."""
    hidden = model(sequences[:, :-1], torch.arange(TIME))
    plain = F.cross_entropy((hidden @ model.embed.weight.T).flatten(0, 1), sequences[:, 1:].flatten())
    expected = torch.autograd.grad(plain, list(model.parameters()))
    pairs = zip(model.parameters(), expected, strict=True)
    return max(float((parameter.grad - grad).norm() / grad.norm()) for parameter, grad in pairs)


for step in range(40):
    starts = torch.randint(len(TEXT) - TIME - 1, (8,))
    batch = torch.stack([TEXT[start : start + TIME + 1] for start in starts])
    optimizer.zero_grad()
    loss = seqpar.accumulate_gradients([batch], loss_of, lambda each: len(each) * len(mine), group=group)
    for parameter in model.parameters():
        parameter.grad = seqpar.group_sum(parameter.grad, group)  # each rank has the part of its own time steps
    if dist.get_rank() == 0 and step in (0, 39):
        error = difference_from_one_process(batch)
        print(f"step {step}: loss {loss.mean:.3f}; gradient differs from one process's by {error:.0e}")
    optimizer.step()
dist.destroy_process_group()
