"""DPO: a policy learns from pairs of responses, and the reference's scores cost one matrix product.

Run it with `python examples/dpo.py`.

The pairs follow a rule: the chosen response counts on from the prompt's last token, the rejected one does not. The
reference is the policy before training; it is scored without gradients, so no logits and no second product are needed.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import copy

import torch
from torch import Tensor, nn

import seqpar
from seqpar import objectives as o

VOCAB = 200
PROMPT = 4
RESPONSE = 6
PAIRS = 16


class Model(nn.Module):
    """A recurrent language model; `head` projects its hidden states to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.layer = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB)

    def log_prob(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return log p of each next token (B, T - 1), and 0 where `mask` is false."""
        hidden, _ = self.layer(self.embed(tokens[:, :-1]))
        target = tokens[:, 1:].masked_fill(~mask, -100)
        return seqpar.token_scores(hidden, self.head.weight, target, bias=self.head.bias).log_prob


def drawn_pairs() -> tuple[Tensor, Tensor]:
    """Return chosen sequences followed by rejected ones, and which next tokens belong to a response."""
    prompt = torch.randint(VOCAB, (PAIRS, PROMPT))
    chosen = (prompt[:, -1:] + 1 + torch.arange(RESPONSE)) % VOCAB
    rejected = torch.randint(VOCAB, (PAIRS, RESPONSE))
    tokens = torch.cat([torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)])
    mask = torch.arange(1, PROMPT + RESPONSE) >= PROMPT
    return tokens, mask.expand(2 * PAIRS, -1)


torch.manual_seed(0)
policy = Model()
reference = copy.deepcopy(policy).eval()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

for step in range(60):
    tokens, mask = drawn_pairs()
    with torch.no_grad():
        reference_log_prob = reference.log_prob(tokens, mask)
    ratio = o.token_log_ratio(policy.log_prob(tokens, mask), reference_log_prob, mask)
    chosen, rejected = o.sequence_sums(ratio, o.padded_segments(mask), len(tokens)).chunk(2)
    loss = o.per_item(o.dpo(chosen, rejected, beta=0.1))
    optimizer.zero_grad()
    (loss.total / loss.tokens).backward()  # several ranks: seqpar.accumulate_gradients
    optimizer.step()
    if step in (0, 59):
        right = (chosen > rejected).float().mean()
        print(f"step {step}: loss {loss.mean:.3f}, the chosen response is preferred in {right:.0%} of the pairs")
