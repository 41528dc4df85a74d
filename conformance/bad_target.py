"""Check that a target which is no class raises an error, in a process of its own, which may not survive it."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from conformance.adapter import DEVICE, load
from conformance.finding import Finding
from conformance.peers import KNOWN
from conformance.problem import Problem
from seqpar.testing.forks import autograd_works_in_a_fork

SILENCE = 60
"""The longest time in seconds that a call with a bad target may take."""


def out_of_range(x: Problem) -> Finding:
    """Check that a target of V, V + 7 or -1 raises an error."""
    said = outcome(x)
    if said.startswith("gave"):
        bad, classes = int(x.made()["target"][5]), x.vocab_size
        return Finding("fail", f"target {bad} of {classes} classes {said}, in silence")
    return Finding("pass", said)


def outcome(x: Problem) -> str:
    """Return the outcome of one forward and backward: "raises ...", "gave ..." or how the process ended."""
    # Forking spares the imports. But a fork cannot use CUDA, nor always autograd, whose error would pass for an answer
    is_fork = DEVICE == "cpu" and autograd_works_in_a_fork()
    context: Any = multiprocessing.get_context("fork" if is_fork else "spawn")
    # A new process finds the implementation by its name
    given = x if is_fork else replace(x, adapter=replace(x.adapter, function=print, why_not=str))
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(theirs, given, "" if is_fork else x.adapter.spec), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(SILENCE):
            return str(ours.recv())
        return f"gave no answer in {SILENCE} s"
    except EOFError:
        # The pipe ended without an answer, because the process did
        process.join()
        return f"ends the process ({process.exitcode})"
    finally:
        process.kill()


def _try(pipe: Connection, x: Problem, name: str) -> None:
    """Send the outcome of one forward and backward to the parent; of the loss of that name, if there is one."""
    # The parent's thread pool did not survive the fork
    torch.set_num_threads(1)
    try:
        if name:
            x = replace(x, adapter=KNOWN.get(name) or load(name))  # type: ignore[arg-type]
    except ValueError:
        pipe.send(f"gave nothing: a new process does not find {name!r}; name the adapter as module:object")
        return
    try:
        pipe.send(f"gave {float(x.answer()['loss'] or 0):.6g}")
    except Exception as raised:
        pipe.send(f"raises {type(raised.__cause__ or raised).__name__}")
