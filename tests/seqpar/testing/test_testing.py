"""The kit that proves losses fails where it should."""

import inspect

import pytest
import torch
from torch import nn

from seqpar.core.checks import PROVED
from seqpar.testing import assert_same_gradients, assert_same_loss, assert_same_results, assert_same_step, plain_loss
from seqpar.testing.gradients import size_of, value_and_gradients
from tests.backward import with_gradient

WRONG = {
    "value": lambda loss: loss + 1e-9,
    "gradient": lambda loss: loss + 1e-9 * (loss - loss.detach()),
    "nan": lambda loss: loss * float("nan"),
    "no gradient": lambda loss: loss.detach(),
    "shape": lambda loss: loss.expand(1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_loss_is_caught(wrong):
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match=r"the (loss|gradient of w)"):
        assert_same_gradients(lambda: WRONG[wrong](w.square().sum()), lambda: w.square().sum(), {"w": w})


@pytest.mark.parametrize("gradient", [torch.ones(2), torch.zeros(2)])
def test_a_gradient_for_a_frozen_tensor_is_caught(gradient):
    frozen, w = torch.ones(2), torch.ones(2, requires_grad=True)

    def candidate():
        frozen.grad = gradient
        return w.sum()

    with pytest.raises(AssertionError, match="frozen is frozen and got a gradient"):
        assert_same_gradients(candidate, lambda: w.sum(), {"w": w, "frozen": frozen})


def test_it_leaves_no_gradients_behind_and_accepts_the_same_loss():
    generator = nn.Linear(2, 3)
    generator.weight.grad = torch.ones(3, 2)
    hidden, target = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    criterion = nn.CrossEntropyLoss(reduction="sum")
    assert_same_gradients(
        lambda: plain_loss(generator, criterion, hidden, target),
        lambda: nn.functional.cross_entropy(generator(hidden), target, reduction="sum"),
        dict(generator.named_parameters()),
    )
    assert generator.weight.grad is None


def held(value, gradient):
    """A loss and its gradient, as `assert_same_results` takes them."""
    return torch.tensor(value, dtype=torch.float64), {"w": torch.tensor(gradient, dtype=torch.float64)}


INF, NAN = float("inf"), float("nan")
DIFFERENT = {
    "an infinite reference, a finite loss": ((3.0, [1.0]), (INF, [1.0])),
    "the other infinity": ((-INF, [1.0]), (INF, [1.0])),
    "nan for inf": ((NAN, [1.0]), (INF, [1.0])),
    "inf for a number": ((INF, [1.0]), (3.0, [1.0])),
    "inf for nan": ((INF, [1.0]), (NAN, [1.0])),
    "nan on both sides": ((NAN, [1.0]), (NAN, [1.0])),
    "a wrong gradient beside an infinite loss": ((INF, [2.0]), (INF, [1.0])),
    "a wrong entry beside an infinite one": ((1.0, [INF, 2.0]), (1.0, [INF, 1.0])),
    "inf in another place": ((1.0, [INF, 1.0]), (1.0, [1.0, INF])),
    "a gradient where there is none": ((0.0, [1e-9]), (0.0, [0.0])),
    "a loss where there is none": ((1e-9, [0.0]), (0.0, [0.0])),
    "nothing for something": ((1.0, []), (1.0, [1.0])),
    "less than the reference": ((1.0, [0.5]), (1.0, [1.0])),
    "another shape of as many numbers": ((1.0, [[1.0, 2.0]]), (1.0, [[1.0], [2.0]])),
    "nan among numbers": ((1.0, [1.0, NAN]), (1.0, [1.0, 2.0])),
    "off by 1.1e-12 of the largest, which is negative": ((1.0, [-3.0 - 3.3e-12, 1.0]), (1.0, [-3.0, 1.0])),
    "off by 1.1e-12 of the largest of many": ((1.0, [0.0, 3.0, 3.3e-12]), (1.0, [0.0, 3.0, 0.0])),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_no_reference_lets_everything_pass(case):
    got, expected = DIFFERENT[case]
    with pytest.raises(AssertionError, match=r"the loss|the gradient of w"):
        assert_same_results(held(*got), held(*expected))


def test_a_gradient_of_a_tensor_that_the_reference_does_not_use_must_be_0():
    used, unused = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    tensors = {"used": used, "unused": unused}
    assert_same_gradients(lambda: used.sum() + (0 * unused).sum(), used.sum, tensors)
    with pytest.raises(AssertionError, match=r"the gradient of unused is off by 1e-06 where the reference is 0 large"):
        assert_same_gradients(lambda: used.sum() + 1e-6 * (unused - unused.detach()).sum(), used.sum, tensors)


@pytest.mark.parametrize("same", [(INF, [1.0]), (1.0, [-INF, 2.0]), (0.0, [0.0]), (1.0, []), (-INF, [INF])])
def test_the_same_infinities_zeros_and_empty_gradients_agree(same):
    assert_same_results(held(*same), held(*same))


@pytest.mark.parametrize("size", [0.0, 1.0, 1e6])
def test_where_the_reference_is_zero_a_difference_of_1e_14_of_the_largest_number_is_rounding(size):
    """Or of 1, if no number is larger."""
    unit = 1e-14 * max(1.0, size)
    assert_same_results(held(size, [0.9 * unit]), held(size, [0.0]))
    assert_same_results(held(0.0, [size, 0.9 * unit]), held(0.0, [size, 0.0]), rtol=0)
    with pytest.raises(AssertionError, match="the gradient of w is off by"):
        assert_same_results(held(size, [1.1 * unit]), held(size, [0.0]))
    with pytest.raises(AssertionError, match="the gradient of w is off by"):
        assert_same_results(held(0.0, [size, 1.1 * unit]), held(0.0, [size, 0.0]), rtol=0)


def test_a_wide_number_is_not_rounded_to_the_reference_s_infinity():
    expected = torch.tensor(INF), {}
    with pytest.raises(AssertionError, match="the loss"):
        assert_same_results((torch.tensor(1e300, dtype=torch.float64), {}), expected)


@pytest.mark.parametrize("reference", [INF, NAN])
def test_a_reference_that_is_no_number_is_not_called_float32(reference):
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match=r"the (loss|reference)") as error:
        assert_same_gradients(lambda: w.sum() * 2, lambda: w.sum() * reference, {"w": w})
    assert "float32 on the way" not in str(error.value)


@pytest.mark.parametrize("rtol", [INF, NAN, -1.0, None, "1e-12"])
def test_a_tolerance_that_lets_everything_or_nothing_pass_is_refused(rtol):
    with pytest.raises((TypeError, ValueError), match="rtol is "):
        assert_same_results(held(1.0, [1.0]), held(2.0, [1.0]), rtol)


def test_nothing_to_compare_is_refused():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="tensors is empty"):
        assert_same_gradients(lambda: w.sum(), lambda: w.sum(), {})
    middle = w * 2
    with pytest.raises(ValueError, match=r"tensors\['middle'\] is not a leaf"):
        assert_same_gradients(lambda: (middle * 3).sum(), lambda: middle.sum() * 3, {"middle": middle})
    with torch.no_grad(), pytest.raises(ValueError, match="neither loss has a gradient"):
        assert_same_gradients(lambda: w.sum(), lambda: w.sum(), {"w": w})
    with torch.no_grad(), pytest.raises(ValueError, match="neither loss has a gradient"):
        assert_same_loss(nn.Linear(2, 3), nn.CrossEntropyLoss(reduction="sum"), torch.ones(1, 2), torch.tensor([1]))


def test_imaginary_parts_are_compared():
    w = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
    assert_same_gradients(lambda: w.abs().sum(), lambda: w.abs().sum(), {"w": w})
    with pytest.raises(AssertionError, match="the gradient of w is no multiple of the plain one"):
        assert_same_gradients(
            lambda: torch.complex(w.real, w.imag.detach()).abs().sum(), lambda: w.abs().sum(), {"w": w}
        )
    with pytest.raises(AssertionError, match="all gradients are 2 times the plain ones"):
        assert_same_gradients(lambda: (2 * w).abs().sum() - w.detach().abs().sum(), lambda: w.abs().sum(), {"w": w})


def test_sparse_gradients_are_compared():
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    rows = torch.tensor([1, 1, 3])
    assert_same_gradients(lambda: table(rows).sum(), lambda: table.weight[rows].sum(), {"table": table.weight})
    with pytest.raises(AssertionError, match="the gradient of table"):
        assert_same_gradients(
            lambda: table(rows).sum() * 1.0,
            lambda: table.weight[rows[:2]].sum() + table.weight[3].sum().detach(),
            {"table": table.weight},
        )


def test_a_wrong_loss_that_cannot_be_called_again_is_said_to_be_wrong():
    w, called = torch.ones(2, dtype=torch.float64, requires_grad=True), []

    def once():
        if called:
            raise RuntimeError("its data are used up")
        called.append(True)
        return 3 * w.sum()

    with pytest.raises(AssertionError, match="all gradients are 3 times the plain ones"):
        assert_same_gradients(once, lambda: w.sum(), {"w": w})


@pytest.mark.parametrize(("power", "cause"), [(0, "the upstream factor is ignored"), (2, "the upstream factor is squ")])
def test_what_a_loss_does_with_its_upstream_factor_is_named(power, cause):
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss():
        return with_gradient(2 * w, lambda upstream: upstream**power).sum()

    with pytest.raises(AssertionError, match=f"Likely cause: {cause}"):
        assert_same_gradients(loss, lambda: (w + w.detach()).sum(), {"w": w})


@pytest.mark.parametrize("of", [assert_same_gradients, assert_same_loss, assert_same_results, assert_same_step])
def test_float64_is_held_to_1e_12(of):
    assert inspect.signature(of).parameters["rtol"].default == 1e-12


def test_what_is_off_by_less_than_1e_12_of_the_largest_number_is_right():
    assert_same_results(held(1.0, [-3.0 - 2.7e-12, 1.0, 2.7e-12]), held(1.0, [-3.0, 1.0, 0.0]))
    assert (size_of(torch.tensor([-3.0, 2.0, INF, NAN])), size_of(torch.tensor([]))) == (3, 0)


def test_a_tolerance_of_ones_own_is_the_one_that_counts():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert_same_gradients(lambda: w.sum() * (1 + 1e-9), lambda: w.sum(), {"w": w}, rtol=1e-8)
    head = nn.Linear(2, 3), nn.CrossEntropyLoss(reduction="sum"), torch.ones(1, 2), torch.tensor([1])
    assert_same_loss(*head, loss=lambda *given: plain_loss(*given) * (1 + 1e-9), rtol=1e-8)


def test_the_largest_difference_is_said_beside_the_largest_reference():
    with pytest.raises(AssertionError, match=r"^the gradient of w is off by 2 where the reference is 7 large$"):
        assert_same_results(held(1.0, [1.0, 2.0, -7.0]), held(1.0, [3.0, 2.5, -7.0]))


def test_the_names_on_both_sides_are_the_same():
    value, gradients = held(1.0, [1.0])
    for got, expected in ((gradients, {}), ({}, gradients)):
        with pytest.raises(AssertionError, match=r"\[.*\] is not \[.*\]"):
            assert_same_results((value, got), (value, expected))


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (lambda: torch.ones(2), ValueError, r"loss returned shape \(2,\); it must return one number"),
        (lambda: 3.0, TypeError, "loss returned a float; it must return one tensor"),
        (3.0, TypeError, "loss is a float; it must be a function"),
    ],
)
def test_a_loss_is_a_function_that_returns_one_number(loss, error, said):
    with pytest.raises(error, match=said):
        value_and_gradients(loss, {})


def test_a_tensor_that_neither_loss_uses_is_right():
    w, unused = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert_same_gradients(lambda: w.sum(), lambda: w.sum(), {"w": w, "unused": unused})


@pytest.mark.parametrize(
    ("made", "cause"), [(torch.clone, "the last chunk is dropped"), (nn.Parameter, "none of the us")]
)
def test_rows_are_those_of_inputs_and_not_of_parameters(made, cause):
    x = made(torch.arange(1.0, 9.0).view(4, 2)).requires_grad_()

    def without_the_last():
        return x[:3].square().sum() + x[3:].detach().square().sum()

    with pytest.raises(AssertionError, match=f"Likely cause: {cause}"):
        assert_same_gradients(without_the_last, lambda: x.square().sum(), {"x": x})


def test_what_helps_to_name_the_cause_is_used():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match=r"a mean instead of a sum: .* and 3 targets are not ignored"):
        assert_same_gradients(lambda: w.sum() / 3, lambda: w.sum(), {"w": w}, tokens=3)

    def clamped():
        x = w * 1
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(max=0.5))
        return x.sum()

    with pytest.raises(AssertionError, match=r"is not linear, .* have an eighth of the gradient of w"):
        assert_same_gradients(lambda: w.sum(), clamped, {"w": w})


def test_only_the_loss_under_test_is_computed_where_an_adapter_in_place_is_refused():
    w, seen = torch.ones(2, dtype=torch.float64, requires_grad=True), []

    def loss(name, *given):
        seen.append((name, PROVED.get()))
        return plain_loss(*given) if given else w.sum()

    assert_same_gradients(lambda: loss("tested"), lambda: loss("plain"), {"w": w})
    assert seen == [("plain", False), ("tested", True)]
    seen.clear()
    head = nn.Linear(2, 3), nn.CrossEntropyLoss(reduction="sum"), torch.ones(1, 2), torch.tensor([1])
    assert_same_loss(*head, loss=lambda *given: loss("tested", *given))
    assert seen == [("tested", True), ("tested", False)]
    assert not PROVED.get()


def test_after_a_loss_that_raises_nothing_is_said_to_be_proved():
    def fails():
        assert PROVED.get()
        raise KeyError("mine")

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        assert_same_gradients(fails, lambda: x.sum(), {"x": x})
    assert not PROVED.get()
