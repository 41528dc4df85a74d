"""The shapes that are measured, and the tensors of one of them.

Shape suffixes: B batch, T time, N rows (B*T), D hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

TIME = 64
"""Time steps of a sentence, where an implementation cuts over time."""
IGNORED = -100


class Problem(NamedTuple):
    """Rows, hidden size, vocabulary; label smoothing, dtype, the share of rows that are padding; if there is a bias."""

    rows: int
    width: int
    vocab_size: int
    smoothing: float = 0.0
    dtype: torch.dtype = torch.float32
    padding: float = 0.0
    bias: bool = True

    def __str__(self) -> str:
        padding = f" padding={self.padding:.0%}" if self.padding else ""
        bias = "" if self.bias else " no bias"
        return f"{self.shape}{padding}{bias} smoothing={self.smoothing:g} {self.dtype_name}"

    @property
    def shape(self) -> str:
        """N, D and V alone."""
        return f"N={self.rows} D={self.width} V={self.vocab_size}"

    @property
    def dtype_name(self) -> str:
        """As torch spells it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def products(self) -> float:
        """Floating-point operations of the three matrix products, over the rows that are kept."""
        return 6.0 * self.rows * (1 - self.padding) * self.width * self.vocab_size


SHAPES = [
    Problem(4096, 512, 32_000),
    Problem(4096, 512, 37_000, padding=0.3),
    Problem(2048, 1024, 128_256),
    Problem(8192, 256, 10_000),
    Problem(1024, 2048, 256_000),
]
CHECK = Problem(2048, 16, 1024, padding=0.3)
"""Small enough for float64, with so many classes to a hidden unit that ways which cut finely do."""


class Inputs:
    """Hidden states, targets and a projection, the same for every implementation."""

    def __init__(self, problem: Problem, device: str, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.problem, self.device = problem, device
        self.time = TIME if problem.rows % TIME == 0 else 1
        width, vocab_size, dtype = problem.width, problem.vocab_size, problem.dtype
        sizes = {"device": device, "dtype": dtype, "bias": problem.bias}
        linear = nn.utils.skip_init(nn.Linear, width, vocab_size, **sizes)
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
        if not bias and problem.bias:
            nn.init.zeros_(linear.bias)
        self.generator = linear
        self.hidden = torch.randn(problem.rows, width, device=device, dtype=dtype).requires_grad_()
        self.target = self._targets().to(device)
        self.tokens = int((self.target != IGNORED).sum())

    def _targets(self) -> Tensor:
        """(N,): random classes, then padding at the end of sentences that are of many lengths."""
        padding, batch = self.problem.padding, self.problem.rows // self.time
        target_BT = torch.randint(self.problem.vocab_size, (batch, self.time))
        even_B = (torch.randperm(batch) + 0.5) / batch
        length_B = (self.time * (1 - 2 * padding * even_B)).round()
        return target_BT.masked_fill(torch.arange(self.time) >= length_B[:, None], IGNORED).flatten()

    @property
    def weight(self) -> Tensor:
        """(V, D)."""
        return self.generator.weight

    @property
    def bias(self) -> Tensor:
        """(V,); None where the problem has none."""
        return self.generator.bias

    def sentences(self) -> tuple[Tensor, Tensor]:
        """The same hidden states and targets as (B, T, D) and (B, T)."""
        return self.hidden.view(-1, self.time, self.problem.width), self.target.view(-1, self.time)

    def clear(self) -> None:
        """Forget gradients."""
        self.hidden.grad = None
        self.generator.zero_grad()


def comfortable(problem: Problem, device: str) -> bool:
    """Whether all logits at once take less than a quarter of the memory that is free."""
    needed = problem.rows * problem.vocab_size * problem.dtype.itemsize
    if device == "cpu":
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    else:
        free = torch.cuda.mem_get_info()[0]
    return needed < free / 4
