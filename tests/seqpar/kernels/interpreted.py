"""Run the Triton kernels in tests: on a GPU, else in Triton's interpreter."""

import os
from contextlib import contextmanager
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from seqpar.kernels import row_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_RANKS = DEVICE == "cpu"
"""Whether ranks, whose tensors are on the CPU, run the kernels: not beside a GPU, where Triton is no interpreter."""
BLOCKS = st.sampled_from([1, 4, row_kernel.LARGEST_BLOCK])
"""Classes at once: every row in many steps, in some, in one."""
KERNELS = {"_row_loss", "_row_sums", "_row_before", "_row_gradient"}
NUMPY_SAYS = "ignore:(invalid value|divide by zero|overflow|underflow|All-NaN slice) :RuntimeWarning"
"""numpy says what a GPU does not: that -inf minus -inf is nan, an exponential 0, or a row without a number."""


@contextmanager
def kernels():
    """On the CPU they run in Triton's interpreter; yields the name of each one that was launched."""
    launched, launch = [], row_kernel.launch

    def counting(kernel, *arguments, **keywords):
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **keywords)

    interpreted = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
    with patch.dict(os.environ, interpreted), patch.object(row_kernel, "launch", counting):
        yield launched


def moved(tensors):
    return {n: t.detach().to(DEVICE).requires_grad_(t.requires_grad) for n, t in tensors.items()}
