"""A custom generator with extra inputs: it can also copy a token from the source (See et al. 2017, section 2.2).

Run it with `python examples/copy_generator.py`.

The extra inputs are keyword arguments whose first dimensions are those of the target. They are scattered over the
devices, cut into chunks and differentiated together with the hidden states.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
from torch import Tensor, nn

import seqpar

PAD = 0
VOCAB = 100
WIDTH = 48


class CopyGenerator(nn.Module):
    """Compute log(gate x (attention summed by source token) + (1 - gate) x softmax)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, VOCAB)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
        """Map hidden (..., WIDTH), attention (..., S) and source (..., S) to log-probabilities (..., VOCAB)."""
        gate = self.gate(hidden).sigmoid()
        generated = (1 - gate) * self.project(hidden).softmax(-1)
        return generated.scatter_add(-1, source, gate * attention).clamp(min=1e-9).log()


torch.manual_seed(0)
embed = nn.Embedding(VOCAB, WIDTH)
attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
generator = CopyGenerator()
engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD), chunk_tokens=64)
optimizer = torch.optim.Adam([*embed.parameters(), *attend.parameters(), *generator.parameters()], lr=5e-3)

for step in range(60):
    source = torch.randint(1, VOCAB, (16, 8))
    target = source[:, :6]  # the task: copy the first six tokens
    hidden, attention = attend(embed(source[:, :6]), embed(source), embed(source))
    loss = engine(hidden, target, attention=attention, source=source[:, None].expand(-1, 6, -1))
    optimizer.zero_grad()
    (loss.total / loss.tokens).backward()  # several ranks: seqpar.accumulate_gradients
    optimizer.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss.mean:.3f}, {loss.correct} of {loss.tokens} right")
print(engine.explain())
