"""GRPO: groups of sampled responses, a reward that can be verified, and the clipped surrogate.

Run it with `python examples/grpo.py`.

The task is to repeat three digits backwards; a response's reward is the share of its digits that are right. The policy
starts with random weights and sees nothing but its rewards.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
from torch import Tensor, nn

import seqpar
from seqpar import objectives as o
from seqpar.rows.scores import Scores

DIGITS = 10
LENGTH = 3
PROMPTS = 24
GROUP = 8


class Policy(nn.Module):
    """Two causal layers; `head` projects their hidden states to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, 64)
        self.position = nn.Embedding(2 * LENGTH, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map digits (B, T) to hidden states (B, T, 64)."""
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(tokens.size(1)), is_causal=True)

    @torch.no_grad()
    def sampled(self, prompts: Tensor) -> Tensor:
        """Return the prompts with a sampled response (B, 2 * LENGTH)."""
        tokens = prompts
        for _ in range(LENGTH):
            p = self.head(self(tokens)[:, -1]).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1)], 1)
        return tokens


def surrogate(scores: Scores, old: Tensor, advantage: Tensor) -> Tensor:
    """Return the clipped surrogate of each token, with an entropy bonus: a function of the token's own scores."""
    ratio = scores.log_prob - old
    return o.clipped_surrogate(ratio, advantage, eps_low=0.2, eps_high=0.28) - 0.01 * scores.entropy


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
mask = (torch.arange(1, 2 * LENGTH) >= LENGTH).expand(PROMPTS * GROUP, -1)
ids = o.padded_segments(mask)

for step in range(30):
    prompts = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
    tokens = policy.sampled(prompts)
    rewards = (tokens[:, LENGTH:] == prompts.flip(1)).float().mean(1)
    advantages = o.spread_to_tokens(o.group_advantages(rewards, GROUP), ids)
    target = tokens[:, 1:].masked_fill(~mask, -100)
    head = {"weight": policy.head.weight, "bias": policy.head.bias, "target": target, "entropy": True}
    with torch.no_grad():
        scores = seqpar.token_scores(policy(tokens[:, :-1]), **head)
    for _ in range(2):  # two updates for each sample: in the second the policy is no longer the one that sampled
        of_token = {"old": scores.log_prob, "advantage": advantages}
        loss = seqpar.scored_loss(policy(tokens[:, :-1]), **head, loss=surrogate, **of_token)
        optimizer.zero_grad()
        # All responses have three tokens, so that a mean over tokens is one over responses
        (loss.total / loss.tokens).backward()  # several ranks: seqpar.accumulate_gradients
        optimizer.step()
    if step in (0, 10, 29):
        nats = scores.entropy[mask].mean()
        print(f"step {step}: reward {rewards.mean():.3f}, entropy {nats:.2f} nats per token")
