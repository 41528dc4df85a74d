"""How far a reader has to go: from a public function to its first matrix product, its softmax's gradient, and back."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import seqpar

HIDDEN = torch.randn(8, 16, requires_grad=True)
TARGET = torch.randint(32, (8,))
LINEAR = nn.Linear(16, 32)
# Without a closed form: by autograd the chunk's function and the generator's own call come in between
OWN = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 32))
CRITERION = nn.CrossEntropyLoss(reduction="sum")
ENGINE = seqpar.LossCompute(LINEAR, CRITERION)
ENGINE_OF_OWN = seqpar.LossCompute(OWN, CRITERION)
CALLS = {
    "linear_cross_entropy": (lambda: seqpar.linear_cross_entropy(HIDDEN, LINEAR.weight, TARGET), 6),
    "token_scores": (lambda: seqpar.token_scores(HIDDEN, LINEAR.weight, TARGET), 6),
    "LossCompute": (lambda: ENGINE(HIDDEN, TARGET), 6),
    "LossCompute, own generator": (lambda: ENGINE_OF_OWN(HIDDEN, TARGET), 7),
}


PRODUCTS = ("mm", "addmm", "matmul", "linear")


def frames_at_the_first(called: tuple[str, ...], function: Callable[[], object]) -> int:
    """Return how many frames of seqpar are on the stack when torch is first asked for one of these; 0 if never."""
    package = str(Path(seqpar.__file__).parent)
    found: list[int] = []

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and not found and argument.__name__ in called:
            inside = 0
            stack: FrameType | None = frame
            while stack is not None:
                inside += stack.f_code.co_filename.startswith(package)
                stack = stack.f_back
            if inside:
                found.append(inside)

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(found)


@pytest.mark.parametrize(("call", "most"), CALLS.values(), ids=CALLS)
def test_from_a_public_function_to_the_matrix_product_are_at_most_six_frames(call, most):
    call()  # what only a first call does, as the probe, is not counted
    assert 0 < frames_at_the_first(PRODUCTS, call) <= most


@pytest.mark.parametrize(("name", "most"), [("linear_cross_entropy", 8), ("LossCompute", 8)])
def test_from_a_public_function_to_the_gradient_of_the_softmax_are_at_most_eight_frames(name, most):
    call, _ = CALLS[name]
    call()
    assert 0 < frames_at_the_first(("scatter_add_",), call) <= most


def test_a_product_outside_the_library_is_not_counted():
    assert frames_at_the_first(PRODUCTS, lambda: LINEAR(torch.ones(16))) == 0


def test_a_loss_with_its_backward_makes_at_most_120_calls_in_13_files():
    package = str(Path(seqpar.__file__).parent)
    called: list[str] = []

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.append(frame.f_code.co_filename)

    call, _ = CALLS["linear_cross_entropy"]
    call().total.backward()
    sys.setprofile(seen)
    try:
        call().total.backward()
    finally:
        sys.setprofile(None)
    assert 0 < len(called) <= 120
    assert len(set(called)) <= 13
