"""Time the first call of each chunked loss, in which it checks the user's code, and later ones, beside plain PyTorch.

    python -m benchmarks.calls

All compute the same problem forward and backward, 512 rows in four chunks, so small that what is done besides the
products shows. The figures are milliseconds of this process's only thread: of one first call, and of the lowest tenth
of many later ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from benchmarks.loss.results import hardware

ROWS, WIDTH, VOCAB, CHUNK = 512, 64, 500, 128


class Head(nn.Module):
    """A generator that has no closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.outer = nn.Linear(WIDTH, VOCAB)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.outer(torch.tanh(self.norm(self.inner(hidden))))
        return logits


def ways() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Return each way's total and plain PyTorch's, by name."""
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    target = torch.randint(VOCAB, (ROWS,))
    linear, head = nn.Linear(WIDTH, VOCAB), Head()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    by_formula = seqpar.LossCompute(linear, criterion, chunk_tokens=CHUNK)
    by_autograd = seqpar.LossCompute(head, criterion, chunk_tokens=CHUNK)
    chunks = [slice(start, start + CHUNK) for start in range(0, ROWS, CHUNK)]
    empty = seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))

    def per_chunk(params: Sequence[Tensor], rows: Sequence[Tensor], chunk: slice) -> seqpar.TokenLoss:
        total = F.cross_entropy(rows[0] @ params[0].T, target[chunk], reduction="sum")
        return seqpar.TokenLoss(total, torch.tensor(len(rows[0])))

    def plain() -> Tensor:
        return F.cross_entropy(hidden @ weight.T, target, reduction="sum")

    return {
        "LossCompute, nn.Linear": (
            lambda: by_formula(hidden, target).total,
            lambda: criterion(linear(hidden), target),
        ),
        "LossCompute, custom generator": (
            lambda: by_autograd(hidden, target).total,
            lambda: criterion(head(hidden), target),
        ),
        "scored_loss": (
            lambda: seqpar.scored_loss(hidden, weight, target, lambda s: -s.log_prob, chunk_tokens=CHUNK).total,
            plain,
        ),
        "chunked_gradient": (
            lambda: seqpar.chunked_gradient(per_chunk, chunks, [hidden], [weight], empty).total,
            plain,
        ),
    }


def milliseconds(total: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Return what the first call takes with its backward, and a later one."""
    times = []
    for _ in range(1 + repeats):
        start = time.thread_time()
        total().backward()
        times.append(1e3 * (time.thread_time() - start))
    return times[0], statistics.quantiles(times[1:], n=10)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400, help="later calls")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, (total, plain) in ways().items():
        # First, so that what torch itself prepares counts for neither
        _, beside = milliseconds(plain, options.repeats)
        first, later = milliseconds(total, options.repeats)
        print(f"{name:30} first {first:6.1f} ms, later {later:.2f} ms, plain {beside:.2f} ms: {later / beside:.2f}")
    print(f"torch {torch.__version__}, {hardware('cpu')}")


if __name__ == "__main__":
    main()
