"""The peak memory of one step above its inputs, in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.implementations import Implementation, known
from benchmarks.loss.plain_ways import CHUNK_ROWS
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.timing import CHUNKED, floor, forward_and_backward
from seqpar.core.chunks import rows_per_chunk

LIMIT = 600
"""Seconds a process may take."""
CHUNKS_ALLOWED = 1.3


def peak_bytes(name: str, problem: Problem, device: str, options: dict[str, Any]) -> int | str:
    """Of that implementation, or of the bare products (`CHUNKED`), or what became of its process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.loss.memory"])
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, name, problem, device, options, torch.get_num_threads())
    process = context.Process(target=_answer, args=arguments)
    process.start()
    theirs.close()
    try:
        found: int | str = ours.recv() if ours.poll(LIMIT) else f"no answer in {LIMIT} s"
    except EOFError:
        process.join()
        found = f"its process ended with {process.exitcode}"
    process.kill() if isinstance(found, str) else process.join()
    return found


def _answer(pipe: Connection, name: str, problem: Problem, device: str, options: dict[str, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    pipe.send(workspace(problem, device) if name == CHUNKED else own_peak(known(options)[name], problem, device))


def own_peak(implementation: Implementation, problem: Problem, device: str) -> int:
    """This process's peak during one step, above what the inputs take.

    Lazily loaded code is not the step's memory: a tiny step goes before. What compiles is compiled at the real shape.
    """
    x = Inputs(problem, device, bias=implementation.bias)
    tiny = Inputs(problem._replace(rows=64, width=8, vocab_size=16), device, bias=implementation.bias)
    forward_and_backward(tiny, implementation.prepare(tiny))()
    run = forward_and_backward(x, implementation.prepare(x))
    if implementation.compiles:
        run()
        x.clear()
    return peak_of(run, device)


def workspace(problem: Problem, device: str) -> int:
    """What the libraries take for the three products alone, in chunks, of memory that is there and has been used."""
    tiny = problem._replace(rows=64, width=8, vocab_size=16)
    small, real = (floor(Inputs(each, device), CHUNK_ROWS) for each in (tiny, problem))
    small()
    return peak_of(real, device)


def peak_of(run: Callable[[], object], device: str) -> int:
    """Of one run, above what is there."""
    gc.collect()
    if device != "cpu":
        return device_peak(run)
    with suppress(OSError, AttributeError):  # only glibc has it: freed memory goes back, so that it is counted again
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, as Linux has it
    before = _resident("VmHWM")
    run()
    return _resident("VmHWM") - before


def device_peak(run: Callable[[], object]) -> int:
    """Of one run, as the device's allocator counts it, above what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _resident(field: str) -> int:
    """Bytes of this process's memory now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def allowance(problem: Problem, device: str) -> int:
    """Bytes of the hidden gradient, the weight's, and 1.3 of the engine's chunks of logits in float32 or wider."""
    kept = math.ceil(problem.rows * (1 - problem.padding))
    rows = min(kept, rows_per_chunk(problem.vocab_size, problem.dtype, torch.device(device).type))
    chunk = rows * problem.vocab_size * max(4, problem.dtype.itemsize)
    gradients = (problem.rows * problem.width + problem.vocab_size * problem.width) * problem.dtype.itemsize
    return gradients + math.ceil(CHUNKS_ALLOWED * chunk)
