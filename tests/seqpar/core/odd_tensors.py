"""What people hand over in place of a plain tensor, for tests of the one-line errors."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def _quietly(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Make it without torch's warnings that such tensors are a prototype, a beta or deprecated."""

    def made() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def _rows() -> list[Tensor]:
    return [torch.ones(2, 4), torch.ones(1, 4)]


SPECIAL: dict[str, tuple[Callable[[], object], str]] = {
    "nested": (_quietly(lambda: torch.nested.nested_tensor(_rows())), "a nested tensor; pad it"),
    "jagged": (_quietly(lambda: torch.nested.nested_tensor(_rows(), layout=torch.jagged)), "a nested tensor; pad it"),
    "sparse": (lambda: torch.ones(6, 4).to_sparse(), "sparse (torch.sparse_coo); use"),
    "csr": (_quietly(lambda: torch.ones(6, 4).to_sparse_csr()), "sparse (torch.sparse_csr); use"),
    "quantised": (
        _quietly(lambda: torch.quantize_per_tensor(torch.ones(6, 4), 1.0, 0, torch.qint8)),
        "quantised (torch.qint8); use",
    ),
    "meta": (lambda: torch.ones(6, 4, device="meta"), "on the meta device"),
}
"""Tensors without plain numbers in memory, of shape (6, 4) where they have one: how to make each, and what it is."""

NO_TENSOR: dict[str, tuple[Callable[[], object], str]] = {
    "none": (lambda: None, "None; it must be a tensor"),
    "a list": (lambda: [1.0, 2.0], "a list of 2; it must be a tensor"),
    "an LSTM's tuple": (lambda: torch.nn.LSTM(4, 4)(torch.ones(6, 4)), "a tuple of 2; it must be a tensor"),
    "a number": (lambda: 1.5, "a float; it must be a tensor"),
    "text": (lambda: "hidden", "the text 'hidden'; it must be a tensor"),
    "an array": (lambda: torch.ones(6, 4).cpu().numpy(), "an ndarray; it must be a tensor"),
}
"""The same for what is no tensor at all."""
