"""Hold the loss and the scores of tokens at real sizes against float64 on a GPU: both kernels, and beyond 2^31 logits.

    python -m benchmarks.gpu.kernel_errors
    python -m benchmarks.gpu.kernel_errors --dry-run     # small, on the CPU, in Triton's interpreter

The truth is the plain loss in float64, some rows at a time, since all logits of the largest problem would take 134 GB.
An error is the Euclidean norm of the difference over that of the truth. At most twice plain PyTorch's own error in the
same dtype is right; plain PyTorch's is measured on the first rows, whose logits it can hold.

Shape suffixes: N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import seqpar
from benchmarks.loss.results import hardware
from seqpar.markdown_table import markdown_table
from seqpar.rows.scores import Scores
from seqpar.testing.precision import TWICE, error

BLOCK = 2048
"""Rows at a time, in float64."""
PLAIN_ROWS = 4096
"""Rows on which plain PyTorch's own error is measured."""
Answer = dict[str, Tensor]
"""The numbers and gradients, by name."""


class Case(NamedTuple):
    """One problem; `chunk_rows` are the rows of a chunk, None for seqpar's own choice."""

    kind: str
    rows: int
    width: int
    vocab_size: int
    dtype: torch.dtype
    options: dict[str, float] = {}  # noqa: RUF012 - never written
    chunk_rows: int | None = None

    def __str__(self) -> str:
        words = [f"{self.kind}, N={self.rows:,} D={self.width:,} V={self.vocab_size:,}"]
        words += [f"{name} {value:g}" for name, value in self.options.items()]
        if self.chunk_rows:
            words.append(f"{self.chunk_rows:,} rows a chunk")
        return ", ".join([*words, str(self.dtype).removeprefix("torch.")])

    def small(self) -> Case:
        """Return a problem for a dry run, with rows that no vector divides."""
        return self._replace(rows=37, width=16, vocab_size=101, chunk_rows=self.chunk_rows and 37)


HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
SMOOTH = {"label_smoothing": 0.1}
CASES = [
    *(Case("loss", 8_192, 1024, 50_257, dtype, SMOOTH) for dtype in DTYPES),
    *(Case("loss", 16_384, 2048, 128_256, dtype) for dtype in HALVES),
    *(Case("loss", 65_536, 512, 256_000, dtype, SMOOTH) for dtype in DTYPES),
    Case("loss", 16_384, 512, 256_000, torch.bfloat16, chunk_rows=16_384),
    Case("loss", 8_192, 1024, 50_257, torch.bfloat16, {"softcap": 30.0, "temperature": 0.7, "z_loss": 1e-4}),
    *(Case("scores", 8_192, 1024, 50_257, dtype) for dtype in DTYPES),
    Case("scores", 65_536, 512, 256_000, torch.bfloat16),
    Case("scores", 16_384, 512, 256_000, torch.bfloat16, chunk_rows=16_384),
    Case("scores", 8_192, 1024, 50_257, torch.bfloat16, {"softcap": 30.0, "temperature": 0.7}),
    *(Case("scored_loss", 8_192, 1024, 50_257, dtype) for dtype in DTYPES),
    Case("scored_loss", 65_536, 512, 256_000, torch.bfloat16),
]


class Tensors(NamedTuple):
    """Hidden states, a projection, targets, and the upstream factor of every score."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    factors_2N: Tensor

    @classmethod
    def drawn(cls, case: Case, device: str) -> Tensors:
        """Draw the tensors of a case; every seventh row is ignored in a loss.

        The terms of a loss of scores are all positive, a log p with a < 0 and b H with b > 0: a sum that nearly
        cancels would show the rounding of its terms.
        """
        torch.manual_seed(0)
        hidden = torch.randn(case.rows, case.width, device=device).to(case.dtype)
        weight = (torch.randn(case.vocab_size, case.width, device=device) / case.width**0.5).to(case.dtype)
        target = torch.randint(case.vocab_size, (case.rows,), device=device)
        if case.kind == "loss":
            target[::7] = -100
        factors_2N = torch.randn(2, case.rows, device=device)
        if case.kind == "scored_loss":
            factors_2N = factors_2N.abs() * torch.tensor([[-1], [1]], device=device)
        return cls(hidden, weight, target, factors_2N)

    def first(self, rows: int) -> Tensors:
        """Return the tensors of the first rows."""
        return Tensors(self.hidden[:rows], self.weight, self.target[:rows], self.factors_2N[:, :rows])


def ours(case: Case, x: Tensors) -> Answer:
    """Return seqpar's numbers and gradients."""
    hidden = x.hidden.detach().requires_grad_()
    weight = x.weight.detach().requires_grad_()
    given = (hidden, weight, x.target)
    options = {"chunk_tokens": case.chunk_rows, **case.options}
    if case.kind == "scores":
        scores = seqpar.token_scores(*given, entropy=True, rank=True, **options)
        (torch.stack([scores.log_prob, scores.entropy]) * x.factors_2N).sum().backward()
        found = {"log_prob": scores.log_prob, "entropy": scores.entropy, "rank": scores.rank}
    else:
        if case.kind == "loss":
            loss = seqpar.linear_cross_entropy(*given, **options)
        else:
            a, b = x.factors_2N
            loss = seqpar.scored_loss(*given, weighted, entropy=True, a=a, b=b, **options)
        loss.total.backward()
        found = {"loss": loss.total}
    return {**found, "hidden": hidden.grad, "weight": weight.grad}


def weighted(scores: Scores, a: Tensor, b: Tensor) -> Tensor:
    """Return a log p + b H of each token."""
    return a * scores.log_prob + b * scores.entropy


def plain(case: Case, x: Tensors, dtype: torch.dtype, rows: int) -> Answer:
    """Return the same in plain PyTorch, `rows` at a time, with sums over the blocks in float64."""
    weight = x.weight.to(dtype).detach().requires_grad_()
    weight_grad_VD = torch.zeros_like(weight, dtype=torch.float64)
    hidden_grads = []
    numbers = []
    for start in range(0, len(x.hidden), rows):
        here = slice(start, start + rows)
        hidden = x.hidden[here].to(dtype).detach().requires_grad_()
        found = _numbers(case, hidden, weight, x.target[here])
        total = found.sum()
        if case.kind != "loss":
            total = (found[:2] * x.factors_2N[:, here]).sum()
            if case.kind == "scored_loss":
                found = total.unsqueeze(0)
        hidden_grad, weight_grad = torch.autograd.grad(total, (hidden, weight))
        hidden_grads.append(hidden_grad)
        weight_grad_VD += weight_grad
        numbers.append(found.detach().double())
    gradients = {"hidden": torch.cat(hidden_grads), "weight": weight_grad_VD}
    if case.kind != "scores":
        return {"loss": torch.stack([each.sum() for each in numbers]).sum(), **gradients}
    log_prob, entropy, rank = torch.cat(numbers, 1)
    return {"log_prob": log_prob, "entropy": entropy, "rank": rank, **gradients}


def _numbers(case: Case, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the summed loss of some rows, or their log-probabilities, entropies and ranks."""
    options = {"softcap": None, "temperature": 1.0, "label_smoothing": 0.0, "z_loss": 0.0, **case.options}
    logits = F.linear(hidden, weight)
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    logits = logits / options["temperature"]
    if case.kind == "loss":
        loss = F.cross_entropy(logits, target, reduction="sum", label_smoothing=options["label_smoothing"])
        lse = torch.logsumexp(logits, -1)[target != -100]
        return loss + options["z_loss"] * lse.square().sum()
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    gold = log_p.gather(1, target.unsqueeze(1))
    lower = torch.arange(logits.size(1), device=target.device) < target.unsqueeze(1)
    rank = ((log_p > gold) | ((log_p == gold) & lower)).sum(1)
    return torch.stack([gold.squeeze(1), entropy, rank.to(entropy.dtype)])


class Finding(NamedTuple):
    """The worst part of a case: its error, and that of plain PyTorch."""

    case: Case
    part: str
    error: float
    plain: float
    seconds: float

    @property
    def fails(self) -> bool:
        """Return whether the error is more than twice plain PyTorch's, and more than one rounding."""
        return self.error > max(TWICE * self.plain, torch.finfo(self.case.dtype).eps / 2)


def finding(case: Case, device: str) -> Finding:
    """Return the worst error of a case, relative to plain PyTorch's."""
    began = time.perf_counter()
    x = Tensors.drawn(case, device)
    some = x.first(PLAIN_ROWS)
    of_plain = _errors(plain(case, some, case.dtype, PLAIN_ROWS), plain(case, some, torch.float64, BLOCK))
    found = _errors(ours(case, x), plain(case, x, torch.float64, BLOCK))
    worst = max(found, key=lambda part: found[part] / max(of_plain[part], 1e-300))
    return Finding(case, worst, found[worst], of_plain[worst], time.perf_counter() - began)


def _errors(found: Answer, right: Answer) -> dict[str, float]:
    return {part: error(found[part].detach().double(), right[part]) for part in right}


def table(found: list[Finding]) -> str:
    """Return a row for each case, failures first."""
    rows = []
    for each in sorted(found, key=lambda each: not each.fails):
        verdict = "FAIL" if each.fails else "pass"
        ratio = each.error / max(each.plain, 1e-300)
        rows.append([verdict, str(each.case), each.part, f"{each.error:.1e}", f"{ratio:.2f}", f"{each.seconds:.1f}"])
    return markdown_table(["", "case", "worst", "error", "to plain PyTorch's", "s"], rows)


def main(dry_run: bool, tell: Callable[[str], None]) -> int:
    """Print the table; return 1 if a case fails."""
    device = "cuda"
    cases = CASES
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
        cases = [case.small() for case in CASES]
    found = []
    for case in cases:
        tell(f"[kernels] {case}")
        found.append(finding(case, device))
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"{table(found)}\n\n{hardware(device)}, torch {torch.__version__}")
    return int(any(each.fails for each in found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    sys.exit(main(options.dry_run, lambda line: print(line, file=sys.stderr)))
