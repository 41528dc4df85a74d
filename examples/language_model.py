"""A decoder-only language model with tied embeddings, z-loss and gradient accumulation.

Run it with `python examples/language_model.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
from torch import nn

import seqpar

VOCAB = 100
TEXT = torch.arange(4_000) * 7 % VOCAB  # each token is the previous one plus 7, modulo the vocabulary


class Model(nn.Module):
    """Two causal layers; the embedding is also the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.position = nn.Embedding(32, 64)
        nn.init.normal_(self.embed.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids (B, T) to hidden states (B, T, 64)."""
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(tokens.size(1)), is_causal=True)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(tokens: torch.Tensor) -> seqpar.TokenLoss:
    """Return the summed loss; the tied weight receives its gradient as embedding and as projection."""
    return seqpar.linear_cross_entropy(model(tokens[:, :-1]), model.embed.weight, tokens[:, 1:], z_loss=1e-4)


for step in range(60):
    starts = torch.randint(len(TEXT) - 33, (2, 8))
    micro_batches = [torch.stack([TEXT[start : start + 33] for start in row]) for row in starts]
    optimizer.zero_grad()
    loss = seqpar.accumulate_gradients(micro_batches, loss_of, tokens_of=lambda tokens: tokens[:, 1:].numel())
    optimizer.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss.mean:.3f}, perplexity {(loss.nll / loss.tokens).exp():.1f}")
