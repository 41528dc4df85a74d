"""The published equations, written out plainly: what seqpar must equal. Nothing here imports seqpar."""

import torch
from torch import Tensor, nn


def smoothed_targets(target: Tensor, vocab_size: int, eps: float, convention: str, padding: int) -> Tensor:
    """q (N, V): torch eps/V to all; fairseq eps/(V-1) to all but gold; harvard eps/(V-2), padding 0 as well."""
    others = {"torch": vocab_size, "fairseq": vocab_size - 1, "harvard": vocab_size - 2}[convention]
    q = torch.full((len(target), vocab_size), eps / others if eps else 0.0, dtype=torch.float64)
    for row, gold in enumerate(target.tolist()):
        gold = gold if 0 <= gold < vocab_size else 0
        q[row, gold] = 1 - eps + (q[row, gold] if convention == "torch" else 0)
    if convention == "harvard":
        q[:, padding] = 0
    return q


class Smoothing(nn.Module):
    """-sum q log p over the rows that are not padding; with harvard, KL(q || p)."""

    def __init__(self, eps: float, convention: str, padding: int) -> None:
        super().__init__()
        self.eps, self.convention, self.padding = eps, convention, padding

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        log_p = logits - logits.exp().sum(-1, keepdim=True).log()
        q = smoothed_targets(target, logits.size(-1), self.eps, self.convention, self.padding)
        loss = -(q * log_p).sum(-1)
        if self.convention == "harvard":
            loss = loss + torch.special.xlogy(q, q).sum(-1)
        return (loss * (target != self.padding)).sum()


class Generator2018(nn.Module):
    """log_softmax(W x + b)."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.proj(x), dim=-1)


class LabelSmoothing2018(nn.Module):
    """The 2018 criterion: KL divergence from a smoothed distribution without padding; takes log-probabilities."""

    def __init__(self, size: int, padding_idx: int, smoothing: float = 0.0) -> None:
        super().__init__()
        self.size, self.padding_idx, self.smoothing = size, padding_idx, smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert x.size(1) == self.size
        q = smoothed_targets(target, self.size, self.smoothing, "harvard", self.padding_idx).to(x)
        q = q * (target != self.padding_idx).unsqueeze(1)
        return nn.functional.kl_div(x, q, reduction="sum")


class NoamOpt:
    """The 2018 optimizer wrapper: rate = factor * d^-0.5 * min(step^-0.5, step * warmup^-1.5)."""

    def __init__(self, model_size: int, factor: float, warmup: int, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.model_size, self.factor, self.warmup = model_size, factor, warmup

    def step(self) -> None:
        self.count += 1
        rate = self.factor * self.model_size**-0.5 * min(self.count**-0.5, self.count * self.warmup**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
