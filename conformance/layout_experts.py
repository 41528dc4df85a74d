"""A layer of experts, in one process or with some of them on each rank, and its router's auxiliary loss.

Shape suffixes: N tokens of this rank, M tokens of all ranks that share the experts, D hidden, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar.distributed.collectives import (
    copy_to_group,
    gather_numbers,
    group_sum,
    join_from_group,
    rank_in,
    sum_from_group,
    world_size,
)

EXPERTS = 4
AUXILIARY = 0.5
"""The factor of the router's loss."""


class Experts(nn.Module):
    """A router that sends each token to its most probable expert, and a shared expert for all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.shared = nn.Linear(width, width)
        self.experts = nn.ModuleDict({str(number): nn.Linear(width, width) for number in range(EXPERTS)})
        self.group: ProcessGroup | None = None
        self.routed_E = self.probs_E = torch.empty(0)

    def keep_own(self, group: ProcessGroup | None) -> None:
        """Keep only this rank's own experts."""
        ranks = world_size(group)
        own = range(rank_in(group) * EXPERTS // ranks, (rank_in(group) + 1) * EXPERTS // ranks)
        self.experts = nn.ModuleDict({number: e for number, e in self.experts.items() if int(number) in own})
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        hidden_ND = hidden.flatten(0, -2)
        probs_NE = self.router(hidden_ND).softmax(-1)
        weight_N, chosen_N = probs_NE.max(-1)
        # How many tokens each expert has, and the sum of its probabilities
        self.routed_E, self.probs_E = F.one_hot(chosen_N, EXPERTS).sum(0), probs_NE.sum(0)
        counts = [count for (count,) in gather_numbers([len(hidden_ND)], self.group)]
        start = sum(counts[: rank_in(self.group)])
        sent_MD = join_from_group(hidden_ND, counts, 0, self.group)
        chosen_M = join_from_group(chosen_N, counts, 0, self.group)
        done_MD = torch.zeros_like(sent_MD)
        for number, expert in self.experts.items():
            done_MD = done_MD + expert(sent_MD) * (chosen_M == int(number)).unsqueeze(1)
        # Each rank uses only its own tokens from the sum, so the sum's gradient must be added up over all ranks
        done_MD = copy_to_group(sum_from_group(done_MD, self.group), self.group)
        done_ND = done_MD[start : start + len(hidden_ND)] * weight_N.unsqueeze(1)
        return torch.tanh(done_ND + self.shared(hidden_ND)).view_as(hidden)

    def auxiliary(self, rows: int, group: ProcessGroup | None) -> Tensor:
        """Return what this rank's tokens add to the router's loss, for a step with `rows` rows (Fedus et al. 2021).

        a E sum_e f_e P_e, with f_e the share of the step's tokens that expert e gets, and P_e its mean probability.
        """
        share_E = group_sum(self.routed_E, group) / rows
        return (share_E * self.probs_E).sum() * (AUXILIARY * EXPERTS / rows)
