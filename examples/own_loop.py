"""Your own training loop: an encoder-decoder on two devices of one process, with one backward pass per step.

Run it with `python examples/own_loop.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
from torch import nn

import seqpar

PAD = 0
VOCAB = 200
DEVICES = ["cpu", "cpu"]  # or ["cuda:0", "cuda:1"]


class Counter(nn.Module):
    """Read a number and count up from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.encoder = nn.GRU(64, 64, batch_first=True)
        self.decoder = nn.GRU(64, 64, batch_first=True)

    def forward(self, source: torch.Tensor, target_in: torch.Tensor) -> torch.Tensor:
        """Map token ids (B, S) and (B, T) to hidden states (B, T, 64), which the generator projects."""
        _, state = self.encoder(self.embed(source))
        return self.decoder(self.embed(target_in), state)[0]


torch.manual_seed(0)
model = Counter()
generator = nn.Linear(64, VOCAB)
parallel = seqpar.DataParallel(model, DEVICES, gather_outputs=False)  # hidden states stay where they were computed
criterion = seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD)
engine = seqpar.LossCompute(generator, criterion, DEVICES)
optimizer = torch.optim.Adam([*model.parameters(), *generator.parameters()], lr=1e-2)
print(engine.explain())

for step in range(60):
    source = torch.randint(1, VOCAB - 12, (32, 1))
    target_in = source + torch.arange(12)
    target = target_in + 1
    target[::3, 8:] = PAD
    loss = engine(parallel(source, target_in), target)  # sums over all tokens that are not padding
    optimizer.zero_grad()
    (loss.total / loss.tokens).backward()
    optimizer.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss.mean:.3f}, {loss.correct} of {loss.tokens} right")
