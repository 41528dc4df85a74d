"""A generator of your own, with inputs of its own: it may also point at a source token (See et al. 2017, section 2.2).

Run it with `python examples/copy_generator.py`.

What it needs beside the hidden states goes in by keyword, with the target's shape first: it is scattered over devices,
cut into chunks and differentiated with them.
"""

import torch
from torch import Tensor, nn

import seqpar

PAD, VOCAB, WIDTH = 0, 100, 48


class CopyGenerator(nn.Module):
    """Log of gate x (attention summed by source token) + (1 - gate) x softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.gate = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
        """hidden (..., WIDTH), attention (..., S) and source (..., S) to log-probabilities (..., VOCAB)."""
        gate = self.gate(hidden).sigmoid()
        said = (1 - gate) * self.project(hidden).softmax(-1)
        return said.scatter_add(-1, source, gate * attention).clamp(min=1e-9).log()


torch.manual_seed(0)
embed, mix = nn.Embedding(VOCAB, WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
generator = CopyGenerator()
engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD), chunk_tokens=64)
optimizer = torch.optim.Adam([*embed.parameters(), *mix.parameters(), *generator.parameters()], lr=5e-3)

for step in range(60):
    source = torch.randint(1, VOCAB, (16, 8))
    target = source[:, :6]  # to be copied
    hidden, attention = mix(embed(source[:, :6]), embed(source), embed(source))
    loss = engine(hidden, target, attention=attention, source=source[:, None].expand(-1, 6, -1))
    optimizer.zero_grad()
    loss.mean.backward()
    optimizer.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss.mean:.3f}, {loss.correct} of {loss.tokens} right")
print(engine.explain())
