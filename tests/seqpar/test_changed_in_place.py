"""A tensor that changes in place between forward and backward changes no gradient: it was copied, or an error says so.

The functions, their arguments and options are those of `test_every_option`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar.core.structures import map_tensors
from seqpar.linear.lora import lora_scores
from tests.seqpar.option_calls import (
    CALLS,
    TARGET,
    Affine,
    Arguments,
    Call,
    D,
    Seen,
    V,
    few,
    leaf,
    linear,
    t,
    with_gradients,
)
from tests.seqpar.option_values import LINEAR, OPTIONS, OVER_RANKS, Option, to
from tests.seqpar.test_every_option import outcome

SCALE = to(torch.tensor(8.0))
TEMPERATURE = to(torch.linspace(1, 2, 6))
"""Of each token."""
CALLS_HERE = {
    **CALLS,
    "lora_scores": Call(
        lora_scores,
        lambda: {
            "hidden": leaf(1, 6, D),
            "base_weight": t(2, V, D),
            "lora_A": leaf(3, 2, D),
            "lora_B": leaf(4, V, 2),
            "scaling": 2.0,
            "target": TARGET,
        },
    ),
    "LossCompute.token_scores": CALLS["LossCompute.token_scores"]._replace(see=with_gradients),
    "few classes": CALLS["linear_distillation"],
    "class weights by autograd": Call(
        lambda weight, **given: seqpar.LossCompute(Affine(), nn.CrossEntropyLoss(weight, reduction="sum"))(**given),
        lambda: {"hidden": leaf(1, 6, D), "target": TARGET, "weight": t(3, V).abs()},
    ),
    "class weights in the least memory": Call(
        lambda weight, **given: seqpar.linear_cross_entropy(
            **given, weight=leaf(2, V, D), class_weight=weight, label_smoothing=0.3, memory="least"
        ),
        lambda: {"hidden": leaf(1, 6, D), "target": TARGET, "weight": t(3, V).abs()},
    ),
    "class weights by formula": Call(
        lambda weight, **given: seqpar.LossCompute(linear(1), nn.CrossEntropyLoss(weight, reduction="sum"))(**given),
        lambda: {"hidden": leaf(1, 6, D), "target": TARGET, "weight": t(3, V).abs()},
    ),
}
OPTIONS_HERE: dict[str, dict[str, Option]] = {
    **OPTIONS,
    "LossCompute.forward": {**OPTIONS["LossCompute.forward"], "loss_scale": SCALE},
    "LossCompute.token_scores": {
        **OPTIONS["LossCompute.token_scores"],
        "temperature": to(torch.linspace(1, 2, 10).view(2, 5)),
    },
    "chunked_gradient": {**OPTIONS["chunked_gradient"], "loss_scale": SCALE},
    "linear_cross_entropy": {**OPTIONS["linear_cross_entropy"], "loss_scale": SCALE},
    "linear_distillation": {**OPTIONS["linear_distillation"], "loss_scale": SCALE},
    "few classes": {"teacher": to(seqpar.TeacherTopK(few(), torch.tensor([-1.0, -2.0]).expand(6, 2), "one_class"))},
    "token_scores": {**OPTIONS["token_scores"], "temperature": TEMPERATURE, "ids": to(few())},
    "lora_scores": {"bias": LINEAR["bias"], "temperature": TEMPERATURE},
    "class weights by autograd": {"target": LINEAR["target"], "loss_scale": SCALE},
    "class weights by formula": {"target": LINEAR["target"], "loss_scale": SCALE},
    "class weights in the least memory": {"target": LINEAR["target"]},
}
INSIDE = {"SparseTarget", "TeacherHidden", "TeacherLogProbs", "TeacherTopK"}
"""Arguments of the losses, among whose options they are; their own calls make all that has a gradient."""
CASES = [
    (function, name)
    for function, options in OPTIONS_HERE.items()
    for name, option in options.items()
    if CALLS_HERE[function].see is with_gradients
    and function not in INSIDE
    and option is not OVER_RANKS
    and not option.refused
]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in an argument, those of modules included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
        yield from (each for each in vars(value).values() if isinstance(each, Tensor))
    elif isinstance(value, (list, tuple)):
        yield from (each for item in value for each in tensors(item))
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def gradients(arguments: Arguments, call: Call, change: int | None) -> list[Tensor | None]:
    """The gradients of all arguments, after the change of one of their tensors between forward and backward."""
    given = list(tensors(arguments))
    outputs: list[Tensor] = []

    def see(seen: Seen) -> None:
        outputs.extend(each for each in tensors(seen.result) if each.requires_grad)

    outcome(call, arguments, see)
    # Each number with another upstream factor
    loss = sum(((each * torch.linspace(1, 2, each.numel()).view_as(each)).sum() for each in outputs), torch.zeros(()))
    if change is not None:
        with torch.no_grad():
            # Another valid value: classes stay classes, and probabilities positive
            tensor = given[change]
            tensor.copy_(tensor.flip(tuple(range(tensor.dim()))) if tensor.dim() else tensor * 3)
    leaves = [each for each in given if each.requires_grad]
    if not loss.requires_grad:
        return []
    assert leaves, "the call has gradients of its own that nothing here sees"
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


@pytest.mark.parametrize(("function", "name"), CASES, ids=[f"{function}.{name}" for function, name in CASES])
def test_a_change_in_place_before_backward_changes_no_gradient(function: str, name: str) -> None:
    call, option = CALLS_HERE[function], OPTIONS_HERE[function][name]

    def fresh() -> Arguments:
        made = call.arguments() | option.beside()
        # A copy, since the tables' own tensors must not change; one that was expanded could not
        return map_tensors(Tensor.contiguous, copy.deepcopy(made | {name: option.value(made)}))  # type: ignore[no-any-return]

    expected = gradients(fresh(), call, None)
    for change, changed in enumerate(tensors(fresh())):
        if changed.is_meta or not changed.numel():
            continue
        try:
            found = gradients(fresh(), call, change)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                continue
            raise
        for ours, wanted in zip(found, expected, strict=True):
            assert (ours is None) == (wanted is None)
            if ours is not None and wanted is not None:
                assert torch.equal(ours, wanted), f"tensor {change} of the arguments, of shape {tuple(changed.shape)}"
