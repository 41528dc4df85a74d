"""Time what Python and torch's dispatcher take of `linear_cross_entropy` on a GPU with Triton, where there is none.

    python -m benchmarks.overhead

Tiny tensors on the CPU go through CUDA's branches, products and launches replaced by nothing (a launch of Triton's
takes 5 to 10 us more). The figures are microseconds of this thread's CPU time, the lowest tenth of many calls, so that
other programs on the machine change them less: of a chunk, by the difference between 2 and 6 chunks, and of the rest of
a call with its backward.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import seqpar
from benchmarks.loss.results import hardware
from seqpar.core.device_facts import FACTS

ROWS, WIDTH, VOCAB = 96, 16, 48
FEW, MANY = 2, 6
"""Chunks."""


@contextlib.contextmanager
def without_work() -> Iterator[None]:
    """Take CUDA's branches, and do no product and launch nothing."""
    made: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return out
        key = (a.size(0), b.size(1), out_dtype or a.dtype)
        if key not in made:
            made[key] = torch.zeros(key[:2], dtype=key[2])
        return made[key]

    def sum_and_product(total: Tensor, *_: Any, **__: Any) -> Tensor:
        return total

    def launch(kernel: Any, programs: int, numbers: int, device: Any, *arguments: Any, **_: Any) -> None:
        if kernel.__name__ == "_count_targets":
            ctypes.c_int64.from_address(arguments[-1].data_ptr()).value = numbers

    with contextlib.ExitStack() as stack:
        for module in ("inputs", "projection"):
            stack.enter_context(patch(f"seqpar.linear.{module}.why_no_kernel", lambda kind: ""))
        stack.enter_context(patch("seqpar.kernels.row_kernel.run_programs", launch))
        stack.enter_context(patch.dict(FACTS, cpu=FACTS["cpu"]._replace(widens_products=True)))
        stack.enter_context(patch("torch.mm", product))
        stack.enter_context(patch("torch.addmm", sum_and_product))
        yield


def plain_microseconds(repeats: int) -> float:
    """Return what torch's own linear and cross-entropy take with their backward, of two rows in float32."""
    hidden = torch.randn(2, WIDTH, requires_grad=True)
    head = torch.nn.Linear(WIDTH, VOCAB)
    target = torch.randint(VOCAB, (2,))
    times = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        F.cross_entropy(head(hidden), target, label_smoothing=0.1, reduction="sum").backward()
        for leaf in (hidden, *head.parameters()):
            leaf.grad = None
        times.append(time.thread_time_ns() - start)
    return _lowest_tenth(times)


def _lowest_tenth(times: Sequence[int]) -> float:
    """Return the lowest tenth of nanoseconds in microseconds; the first calls warm up."""
    return statistics.quantiles(times[len(times) // 10 :], n=10)[0] / 1e3


def microseconds(bias: bool, repeats: int) -> tuple[float, float]:
    """Return what a chunk takes, and the rest of a call with its backward."""
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=bias, dtype=torch.bfloat16)
    target = torch.randint(VOCAB, (ROWS,))
    leaves = [hidden, *head.parameters()]
    upstream = torch.ones(())
    found: dict[int, list[int]] = {FEW: [], MANY: []}
    for _ in range(repeats):
        # In turn, so that a busy moment of the machine falls on both
        for chunks, times in found.items():
            start = time.thread_time_ns()
            loss = seqpar.linear_cross_entropy(
                hidden, head.weight, target, bias=head.bias, label_smoothing=0.1, chunk_tokens=ROWS // chunks
            )
            loss.total.backward(upstream)
            for leaf in leaves:
                leaf.grad = None
            times.append(time.thread_time_ns() - start)
    few, many = map(_lowest_tenth, found.values())
    chunk = (many - few) / (MANY - FEW)
    return chunk, few - FEW * chunk


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line with and one without a bias."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3000, help="calls of each number of chunks")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for bias in (False, True):
        with without_work():
            chunk, call = microseconds(bias, options.repeats)
        print(f"{'with a bias' if bias else 'no bias':12} chunk {chunk:.0f} us, call {call:.0f} us")
    print(f"plain torch, two rows in float32: call {plain_microseconds(options.repeats):.0f} us")
    print(f"torch {torch.__version__}, {hardware('cpu')}")


if __name__ == "__main__":
    main()
