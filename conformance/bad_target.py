"""Check that a target which is no class raises an error, in a process of its own, which may not survive it."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from conformance.adapter import DEVICE
from conformance.finding import Finding
from conformance.problem import Problem
from seqpar.testing.forks import autograd_works_in_a_fork

SILENCE = 60
"""The longest time in seconds that a call with a bad target may take."""


def out_of_range(x: Problem) -> Finding:
    """Check that a target of V, V + 7 or -1 raises an error."""
    said = []
    # -1 would index the last class from the end, and V the memory behind the logits
    for bad in (x.vocab_size, x.vocab_size + 7, -1):
        x = replace(x, change=f"target[5] = {bad}")
        outcome = _in_a_process(x)
        if outcome.startswith("gave"):
            shown = x.shown("loss.backward(); print(loss)  # a number, though target[5] is no class")
            return Finding("fail", f"target {bad} of {x.vocab_size} classes {outcome}, in silence", shown)
        said.append(outcome)
    return Finding("pass", said[0])


def _in_a_process(x: Problem) -> str:
    """Return the outcome of one forward and backward: "raises ...", "gave ..." or how the process ended."""
    # Forking spares the imports. But a fork cannot use CUDA, nor always autograd, whose error would pass for an answer
    if DEVICE != "cpu" or not autograd_works_in_a_fork():
        return _in_a_new_process(x)
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(theirs, x), daemon=True)
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


def _in_a_new_process(x: Problem) -> str:
    """Return the same of the code that a reproduction would show."""
    # The number is read, which waits for the device
    imports, rest = x.shown("loss.backward(); print(f'gave {float(loss):.6g}')").split("\n", 1)
    command = [sys.executable, "-W", "ignore", "-c", f"{imports}\nprint('found')\n{rest}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SILENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"gave no answer in {SILENCE} s"
    if not done.stdout.startswith("found"):
        return f"gave nothing: a new process does not find {x.adapter.spec!r}; name the adapter as module:object"
    if not done.returncode:
        return done.stdout.removeprefix("found").strip()
    # "package.SomeError: what was wrong", of which CUDA's has more lines
    errors = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception))\b", done.stderr, re.MULTILINE)
    if done.returncode < 0 or not errors:
        return f"ends the process ({done.returncode})"
    return f"raises {errors[-1]}"


def _try(pipe: Connection, x: Problem) -> None:
    """Send the outcome of one forward and backward to the parent."""
    # The parent's thread pool did not survive the fork
    torch.set_num_threads(1)
    try:
        pipe.send(f"gave {float(x.answer()['loss'] or 0):.6g}")
    except Exception as raised:
        pipe.send(f"raises {type(raised.__cause__ or raised).__name__}")
