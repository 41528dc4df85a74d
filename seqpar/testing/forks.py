"""Find out whether autograd works in a fork of this process."""

from __future__ import annotations

from multiprocessing import get_context


def autograd_works_in_a_fork() -> bool:
    """Return whether a backward pass can run in a fork of this process, by trying it in one.

    It cannot if the first backward pass here has started autograd's threads for accelerators. That happens on a machine
    with an accelerator and, in torch's builds for CUDA, on any machine where `torch.compile` or a FakeTensorMode was
    used before.
    """
    process = get_context("fork").Process(target=_backward)
    process.start()
    process.join()
    return process.exitcode == 0


def _backward() -> None:
    """Run a backward pass; exit with 1 if that fails."""
    import torch

    # The parent's thread pool did not survive the fork
    torch.set_num_threads(1)
    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError:
        # Without a traceback
        raise SystemExit(1) from None
