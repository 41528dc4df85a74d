"""On a device without float64 the truth is in float64 on the CPU, and twice plain PyTorch's error is allowed.

No such device is here: the CPU stands for one that says it has none, and all losses are computed in float32 on it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqpar
from seqpar.testing import assert_same_loss, plain_loss, precision, same_loss
from tests.backward import with_gradient
from tests.seqpar.testing.test_same_loss import Gated

PADDING = 0


@pytest.fixture
def no_float64(monkeypatch):
    for module in (same_loss, precision):
        monkeypatch.setattr(module, "has_float64", lambda device: False)


def problem(rows=96):
    torch.manual_seed(0)
    target = torch.randint(1, 50, (rows // 12, 12))
    target[0, 3:] = PADDING
    head = nn.Linear(16, 50), seqpar.LabelSmoothing(0.1, "fairseq", ignore_index=PADDING)
    return *head, torch.randn(*target.shape, 16), target


def in_chunks(generator, criterion, hidden, target):
    assert {t.dtype for t in (hidden, generator.weight)} == {torch.float32}
    parts = zip(hidden.split(2), target.split(2), strict=True)
    return sum(plain_loss(generator, criterion, *part) for part in parts)


def half_precision(generator, criterion, hidden, target):
    logits = F.linear(hidden.bfloat16(), generator.weight.bfloat16(), generator.bias.bfloat16())
    return criterion(logits.float().flatten(0, 1), target.flatten())


def slightly_off(*given):
    return plain_loss(*given) * (1 + 2e-6)


def mean(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / (target != PADDING).sum()


@pytest.mark.parametrize("loss", [None, in_chunks, plain_loss], ids=["seqpar's", "chunks", "plain"])
@pytest.mark.parametrize("rows", [12, 96])
def test_a_right_loss_in_float32_is_accepted(no_float64, loss, rows):
    assert_same_loss(*problem(rows), loss=loss)


@pytest.mark.parametrize("loss", [half_precision, slightly_off])
def test_more_than_twice_the_error_of_plain_pytorch_is_refused_with_both_numbers(no_float64, loss):
    said = r"is off by [\d.e-]+ of its size, where plain PyTorch in float32 is off by [\d.e-]+; twice as much is"
    with pytest.raises(AssertionError, match=said) as caught:
        assert_same_loss(*problem(), loss=loss)
    assert "float32 on the way" not in str(caught.value)
    assert "Smallest part of these inputs that fails" in str(caught.value)


def test_the_cause_is_named_there_too(no_float64):
    with pytest.raises(AssertionError, match=r"^Likely cause: a mean instead of a sum: all gradients are 1/87 times"):
        assert_same_loss(*problem(), loss=mean)


def test_gradients_are_held_against_that_rule_and_not_the_value_alone(no_float64):
    def wrong_gradient(generator, criterion, hidden, target):
        bias = generator.bias * 1.00001 - generator.bias.detach() * 0.00001
        return criterion(F.linear(hidden, generator.weight, bias).flatten(0, 1), target.flatten())

    with pytest.raises(AssertionError, match=r"the gradient of generator\.bias is off by 1e-05"):
        assert_same_loss(*problem(), loss=wrong_gradient)


def test_a_device_says_itself_whether_it_has_float64(monkeypatch):
    assert precision.has_float64(torch.device("cpu"))

    def refusing(*size, **keywords):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")

    monkeypatch.setattr(torch, "empty", refusing)
    assert not precision.has_float64(torch.device("cpu"))


@pytest.mark.parametrize("off", ["hidden", "gate", ""])
def test_gradients_of_per_token_tensors_are_held_against_it_too(no_float64, off):
    def wrong_gradient(generator, criterion, hidden, target, gate):
        given = {"hidden": hidden, "gate": gate}
        given |= {name: t * 1.0001 - t.detach() * 0.0001 for name, t in given.items() if name == off}
        return plain_loss(generator, criterion, given["hidden"], target, gate=given["gate"])

    _, criterion, hidden, target = problem()
    given = {"loss": wrong_gradient, "gate": torch.rand(target.shape) + 1}
    if not off:
        assert_same_loss(Gated(16, 50), criterion, hidden, target, **given)
        return
    with pytest.raises(AssertionError, match=rf"the gradient of {off} is off by 0\.0001"):
        assert_same_loss(Gated(16, 50), criterion, hidden, target, **given)


def test_an_eighth_is_held_against_an_eighth(no_float64):
    with pytest.raises(AssertionError, match=r"upstream factor is ignored(.|\n)*both losses are multiplied by 0\.125"):
        assert_same_loss(*problem(), loss=lambda *given: with_gradient(plain_loss(*given), torch.ones_like))
