"""Define the problems that are measured, and the tensors of one of them.

Shape suffixes: B batch, T time, N rows (B*T), D hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TIME = 64
"""Time steps of a sentence, for implementations that cut over time."""
IGNORED = -100


class Problem(NamedTuple):
    """One loss to compute: its sizes, label smoothing, dtype, the share of rows that are padding, and the bias."""

    rows: int
    width: int
    vocab_size: int
    smoothing: float = 0.0
    dtype: torch.dtype = torch.float32
    padding: float = 0.0
    bias: bool = True

    def __str__(self) -> str:
        # These names are the keys of the recorded figures
        words = [self.shape]
        if self.padding:
            words.append(f"padding={self.padding:.0%}")
        if not self.bias:
            words.append("no bias")
        return " ".join([*words, f"smoothing={self.smoothing:g}", self.dtype_name])

    def as_json(self) -> dict[str, Any]:
        """Return the problem's numbers by name; `read` is the inverse."""
        return {**self._asdict(), "dtype": self.dtype_name}

    @classmethod
    def read(cls, numbers: dict[str, Any]) -> Problem:
        """Return the problem whose numbers are these."""
        return cls(**{**numbers, "dtype": getattr(torch, numbers["dtype"])})

    @property
    def title(self) -> str:
        """Return the problem in short, as a reader knows it."""
        words = [self.shape_title]
        if self.smoothing:
            words.append(f"smoothing {self.smoothing:g}")
        return ", ".join([*words, self.dtype_name])

    @property
    def shape_title(self) -> str:
        """Return its shape in short, as a reader knows it."""
        shape = f"{self.rows:,} x {self.width:,} x {self.vocab_size:,}"
        return f"{shape}, {self.padding:.0%} padding" if self.padding else shape

    @property
    def shape(self) -> str:
        """Return N, D and V alone."""
        return f"N={self.rows} D={self.width} V={self.vocab_size}"

    @property
    def dtype_name(self) -> str:
        """Return the dtype as torch spells it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def products(self) -> float:
        """Return the floating-point operations of the three matrix products over the rows that are not padding."""
        return 6.0 * self.rows * (1 - self.padding) * self.width * self.vocab_size


SHAPES = [
    Problem(4096, 512, 32_000),
    Problem(4096, 512, 37_000, padding=0.3),
    Problem(2048, 1024, 128_256),
    Problem(8192, 256, 10_000),
    Problem(1024, 2048, 256_000),
]
CHECK = Problem(2048, 16, 1024, padding=0.3)
"""Small enough for float64. With so many classes per hidden unit, implementations that cut finely do cut."""


class Inputs:
    """Hold hidden states, targets and a projection, the same for every implementation."""

    def __init__(self, problem: Problem, hidden: Tensor, generator: nn.Linear, target: Tensor) -> None:
        self.problem = problem
        self.hidden = hidden
        self.generator = generator
        self.target = target
        self.tokens = int((target != IGNORED).sum())

    @classmethod
    def drawn(cls, problem: Problem, device: str, bias: bool = True) -> Inputs:
        """Draw the tensors of a problem; `bias=False` zeroes the bias, for implementations without one."""
        torch.manual_seed(0)
        width = problem.width
        generator = nn.utils.skip_init(
            nn.Linear, width, problem.vocab_size, device=device, dtype=problem.dtype, bias=problem.bias
        )
        for parameter in generator.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
        if problem.bias and not bias:
            nn.init.zeros_(generator.bias)
        hidden = torch.randn(problem.rows, width, device=device, dtype=problem.dtype).requires_grad_()
        return cls(problem, hidden, generator, _drawn_targets(problem).to(device))

    @property
    def device(self) -> str:
        """Return where the tensors are."""
        return str(self.hidden.device)

    @property
    def weight(self) -> Tensor:
        """Return the projection's weight (V, D)."""
        return self.generator.weight

    @property
    def bias(self) -> Tensor:
        """Return the projection's bias (V,), or None where the problem has none."""
        return self.generator.bias

    def sentences(self) -> tuple[Tensor, Tensor]:
        """Return the same hidden states and targets as (B, T, D) and (B, T)."""
        time = sentence_length(self.problem)
        return self.hidden.view(-1, time, self.problem.width), self.target.view(-1, time)

    def clear(self) -> None:
        """Forget the gradients."""
        self.hidden.grad = None
        self.generator.zero_grad()


def sentence_length(problem: Problem) -> int:
    """Return the time steps of a sentence: TIME where the rows divide into such sentences, else 1."""
    if problem.rows % TIME:
        return 1
    return TIME


def _drawn_targets(problem: Problem) -> Tensor:
    """Return random classes (N,), with padding at the end of sentences of many lengths."""
    time = sentence_length(problem)
    batch = problem.rows // time
    target_BT = torch.randint(problem.vocab_size, (batch, time))
    # Lengths are spread evenly from all TIME steps down to (1 - 2 padding) of them, so their mean is 1 - padding
    even_B = (torch.randperm(batch) + 0.5) / batch
    length_B = (time * (1 - 2 * problem.padding * even_B)).round()
    return target_BT.masked_fill(torch.arange(time) >= length_B[:, None], IGNORED).flatten()


def fits_comfortably(problem: Problem, device: str) -> bool:
    """Return whether all logits at once take less than a quarter of the free memory."""
    needed = problem.rows * problem.vocab_size * problem.dtype.itemsize
    if device == "cpu":
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    else:
        free = torch.cuda.mem_get_info()[0]
    return needed < free / 4
