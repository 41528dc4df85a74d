"""Measure the peak memory of one step above its inputs, in a process of its own."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.timing import forward_and_backward
from conformance import peak_memory
from seqpar.core.chunks import rows_per_chunk
from seqpar.kernels.row_kernel import width_for_kernel

LIMIT = 600
"""Seconds a process may take."""
CHUNKS_ALLOWED = 1.3


def in_fresh_process(modules: list[str], measure: Callable[..., int], *arguments: object) -> int | str:
    """Return what `measure` returns in a process of its own, or what became of that process.

    `modules` import all that is not to count; every call of one run must name the same.
    """
    # A fresh process, whose peak is the step's own. A fork of this one would inherit its memory; the fork server has
    # imported torch once for all of them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, torch.get_num_threads(), measure, *arguments))
    process.start()
    sender.close()  # here, so that `recv` raises EOFError if the process ends without an answer
    try:
        found: int | str = f"no answer in {LIMIT} s"
        if receiver.poll(LIMIT):
            found = receiver.recv()
    except EOFError:
        process.join()
        found = f"its process ended with {process.exitcode}"
    if isinstance(found, str):
        process.kill()
    else:
        process.join()
    return found


def _send(pipe: Connection, threads: int, measure: Callable[..., int], *arguments: object) -> None:
    torch.set_num_threads(threads)
    pipe.send(measure(*arguments))


def peak_of(subject: Any, part: str, name: str, problem: Problem) -> int:
    """Return this process's peak during one step of an implementation.

    Lazily loaded code is not the step's memory: a tiny step goes first. An implementation that compiles has compiled
    at the real shape.
    """
    small = problem._replace(rows=64, width=8, vocab_size=16)
    way = subject.ways(part, problem)[name]
    warm_up, step = (
        forward_and_backward(way.prepare(Inputs.drawn(each, "cpu", bias=way.bias))) for each in (small, problem)
    )
    warm_up()
    if way.compiles:
        step()
    return peak_memory.peak_bytes(step)


def allowed_bytes(problem: Problem, device: str) -> int:
    """Return the hidden gradient, the weight gradient and 1.3 of the engine's chunks of logits, at least float32."""
    unpadded_rows = math.ceil(problem.rows * (1 - problem.padding))
    kind = torch.device(device).type
    chosen = rows_per_chunk(problem.vocab_size, problem.dtype, kind, width_for_kernel(problem.width, kind))
    rows = min(unpadded_rows, chosen)
    chunk = rows * problem.vocab_size * max(4, problem.dtype.itemsize)
    gradients = (problem.rows * problem.width + problem.vocab_size * problem.width) * problem.dtype.itemsize
    return gradients + math.ceil(CHUNKS_ALLOWED * chunk)
