"""The kit that proves losses: right ones pass, and every usual mistake is caught and named."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.rows.criteria import ignored_target
from seqpar.testing import assert_same_loss, plain_loss, same_loss
from seqpar.testing.evidence import gradients_by_use
from seqpar.testing.strategies import chunkings, criteria, device_lists, shapes, targets


@given(st.data())
def test_any_generator_criterion_device_list_and_cut_of_the_engine_is_accepted(data):
    shape, classes = data.draw(shapes()), data.draw(st.integers(3, 13))
    padding = data.draw(st.sampled_from([-100, 0, classes - 1]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    generator = nn.Linear(4, classes).to(data.draw(st.sampled_from([torch.float64, torch.float32])))
    target, criterion = data.draw(targets(shape, classes, padding)), data.draw(criteria(classes, padding))
    layout = {"devices": data.draw(device_lists()), **data.draw(chunkings(*shape))}
    assert ignored_target(criterion) == padding
    assert_same_loss(generator, criterion, torch.randn(*shape, 4), target, **layout)
    assert all(p.grad is None for p in generator.parameters())


class Rotated(nn.Module):
    """Complex numbers in single precision beside real ones, as those of a rotary embedding."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 9)
        self.turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x, turn=None):
        pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
        return self.out(torch.view_as_real(pairs * (self.turn if turn is None else turn)).flatten(-2))


def test_complex_weights_keep_their_imaginary_parts():
    generator, criterion = Rotated(), nn.CrossEntropyLoss(reduction="sum")
    batch = torch.randn(3, 4), torch.randint(9, (3,))
    assert_same_loss(generator, criterion, *batch, chunk_tokens=2)

    def conjugate(generator, criterion, hidden, target):
        assert generator.turn.dtype == torch.complex128
        return criterion(generator(hidden, torch.complex(generator.turn.real, generator.turn.imag.detach())), target)

    with pytest.raises(AssertionError, match=r"the gradient of generator\.turn is no multiple"):
        assert_same_loss(generator, criterion, *batch, loss=conjugate)
    assert generator.turn.dtype == torch.complex64


def mean(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(ignore_index=criterion.ignore_index), hidden, target)


def halved(*given):
    return plain_loss(*given) / 2


def test_both_numbers_and_the_smallest_failing_part_are_said():
    generator, target = nn.Linear(2, 3).double(), torch.tensor([[0, 1], [2, -100]])
    nn.init.zeros_(generator.weight)
    nn.init.zeros_(generator.bias)
    said = r"the loss is off by 2\.2 where the reference is 3\.3 large(.|\n)*: hidden \(1, 2, 2\), target \[\[0, 1\]\]"
    with pytest.raises(AssertionError, match=said):
        assert_same_loss(generator, nn.CrossEntropyLoss(reduction="sum"), torch.ones(2, 2, 2), target, loss=mean)


def test_a_division_by_no_tokens_is_named():
    generator, target = nn.Linear(2, 3), torch.full((4,), -100)
    with pytest.raises(AssertionError, match="Likely cause: a division by 0 tokens"):
        assert_same_loss(generator, nn.CrossEntropyLoss(reduction="sum"), torch.ones(4, 2), target, loss=mean)


def test_a_sum_where_the_steps_mean_is_due_is_named():
    generator, target = nn.Linear(2, 3), torch.tensor([0, 1, 2])
    criterion = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(AssertionError, match=r"a sum instead of a mean: all gradients are 3 times .* has 3 tokens"):
        assert_same_loss(generator, criterion, torch.randn(3, 2), target, loss=plain_loss, tokens=3)
    assert_same_loss(generator, criterion, torch.randn(3, 2), target, loss=mean, tokens=3)
    assert_same_loss(generator, criterion, torch.randn(3, 2), target, tokens=3)


@pytest.mark.parametrize("own", [None, plain_loss, halved])
def test_dropout_in_training_mode_is_named_with_its_remedy(own):
    torch.manual_seed(0)
    generator, criterion = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3)), nn.CrossEntropyLoss(reduction="sum")
    hidden, target = torch.randn(6, 4), torch.tensor([0, 1, 2] * 2)
    with pytest.raises(
        AssertionError, match="Likely cause: random numbers, such as those of dropout in train"
    ) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=own)
    assert "assert_same_loss(head.eval(), criterion, ...)" in str(caught.value)
    if own is not halved:
        assert_same_loss(generator.eval(), criterion, hidden, target, loss=own)
        return
    with pytest.raises(AssertionError, match="accumulation: all gradients are 1/2 of the plain ones"):
        assert_same_loss(generator.eval(), criterion, hidden, target, loss=own)


def test_the_gradients_through_each_use_add_up_to_the_gradient():
    """However the tensor is handed over: in place, by its name, in a list, transposed, and looked at besides."""
    weight, frozen = (torch.randn(3, 3, dtype=torch.float64, requires_grad=g) for g in (True, False))
    x, words = torch.randn(2, 3, dtype=torch.float64), torch.tensor([1, 1])

    def loss():
        with torch.no_grad():
            size = weight.norm() * weight.shape[0]
        rows = F.embedding(words, weight, sparse=weight.device.type == "cpu")
        states = F.linear(F.linear(x, weight).tanh(), weight=weight) @ weight.T * size.detach()
        states = states @ weight.mT @ weight.H @ weight.mH
        return (states * rows * frozen.sum() * torch.stack([x[0], weight[0]]).sum()).sum()

    uses = gradients_by_use(loss, {"weight": weight, "frozen": frozen})
    assert [name for name, _ in uses["weight"]] == [
        *("embedding", "linear", "linear", "T", "mT", "H", "mH", "__getitem__")
    ]
    torch.testing.assert_close(sum(g for _, g in uses["weight"]), torch.autograd.grad(loss(), weight)[0].to_dense())
    assert {g.layout for _, g in uses["weight"]} == {torch.strided}
    assert [*uses] == ["weight"]
    assert not gradients_by_use(lambda: weight.sum().detach(), {"weight": weight})


class Gated(nn.Linear):
    def forward(self, hidden, gate):
        return super().forward(hidden) * gate.unsqueeze(-1)


@pytest.mark.unswitched
def test_a_per_token_tensor_belongs_to_one_rank_as_hidden_does():
    gate, hidden, target = torch.rand(3, 3), torch.randn(3, 3, 4), torch.randint(5, (3, 3))
    assert_same_loss(Gated(4, 5), nn.CrossEntropyLoss(reduction="sum"), hidden, target, ranks=2, gate=gate)


def test_per_token_tensors_and_devices_take_part():
    gate, target = torch.rand(2, 3), torch.randint(5, (2, 3))
    criterion, hidden = seqpar.LabelSmoothing(0.1, "torch"), torch.randn(2, 3, 4)
    assert_same_loss(Gated(4, 5), criterion, hidden, target, devices=["cpu"] * 2, chunk_tokens=2, gate=gate)
    with pytest.raises(AssertionError, match="gate: no gradient at all"):
        assert_same_loss(Gated(4, 5), criterion, hidden, target, loss=forgets_the_gate, gate=gate)


def against_the_next(generator, criterion, hidden, target, gate):
    return plain_loss(generator, criterion, hidden[:, :-1], target[:, 1:], gate=gate[:, :-1])


def against_the_next_in_a_circle(generator, criterion, hidden, target, gate):
    return plain_loss(generator, criterion, hidden, target.roll(-1, -1), gate=gate)


def smoothed(generator, criterion, hidden, target, gate):
    return plain_loss(generator, seqpar.LabelSmoothing(0.2, "torch"), hidden, target, gate=gate)


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (against_the_next, "targets shifted by one: each token is held against the n"),
        (against_the_next_in_a_circle, "targets shifted by one, and those of the end are at the b"),
        (smoothed, "label smoothing of 0.2 in the convention 'torch', where the criterion has no label sm"),
    ],
)
def test_a_mistake_of_targets_is_named_beside_per_token_tensors(loss, cause):
    gate, target = torch.rand(2, 4) + 0.5, torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
    with pytest.raises(AssertionError, match=f"^Likely cause: {cause}"):
        assert_same_loss(Gated(4, 5), seqpar.CrossEntropy(), torch.randn(2, 4, 4), target, loss=loss, gate=gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_token_tensors_are_made_float64(dtype):
    gate, target = torch.rand(2, 3).to(dtype), torch.randint(5, (2, 3))
    seen = set()

    def looks(generator, criterion, hidden, target, gate):
        seen.add(gate.dtype)
        return plain_loss(generator, criterion, hidden, target, gate=gate)

    assert_same_loss(Gated(4, 5), seqpar.CrossEntropy(), torch.randn(2, 3, 4), target, loss=looks, gate=gate)
    assert seen == {torch.float64}


def forgets_the_gate(generator, criterion, hidden, target, gate):
    return plain_loss(generator, criterion, hidden, target, gate=gate.detach())


@pytest.mark.parametrize(
    ("least", "said"),
    [(12, r"hidden \(12, 2\), target \[0, 1, .*, 1\]"), (13, r"hidden \(13, 2\), target \(13,\)"),
        (40, r"hidden \(40, 2\)"), (41, r"hidden \(60, 2\)")],
)  # fmt: skip
def test_forty_smaller_inputs_are_tried_and_up_to_twelve_targets_shown(least, said):
    def wrong_from(generator, criterion, hidden, target):
        return plain_loss(generator, criterion, hidden, target) * (1 + (len(target) >= least))

    criterion = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(AssertionError, match=f"Smallest part of these inputs that fails: {said}"):
        assert_same_loss(nn.Linear(2, 5), criterion, torch.ones(60, 2), torch.arange(60) % 5, loss=wrong_from)


@pytest.mark.parametrize("tokens", [0.5, 4])
def test_a_part_without_tokens_is_divided_by_one(tokens):
    def added(*given):
        return plain_loss(*given) + 1

    target = torch.tensor([[-100, -100], [1, 2]])
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(nn.Linear(2, 5), seqpar.CrossEntropy(), torch.ones(2, 2, 2), target, loss=added, tokens=tokens)
    assert str(caught.value).endswith("(generator, criterion, hidden[:1, :1], target[:1, :1], loss=loss)")


def test_a_part_is_divided_by_its_tokens_that_are_not_ignored():
    def wrong_from_two(generator, criterion, hidden, target):
        return plain_loss(generator, criterion, hidden, target) * (1 + int((target >= 0).sum() > 1))

    given = torch.ones(1, 4, 2), torch.tensor([[-100, 1, 2, 3]])
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(nn.Linear(2, 5), seqpar.CrossEntropy(), *given, loss=wrong_from_two, tokens=3)
    assert str(caught.value).endswith("hidden[:1, :3], target[:1, :3], loss=loss, tokens=2)")


def test_the_call_that_fails_has_the_layout_and_the_tensors_of_the_whole_one():
    class Dropping(Gated):
        def forward(self, hidden, gate):
            return super().forward(F.dropout(hidden, 0.5), gate)

    gate, target = torch.rand(2, 3) + 1, torch.tensor([[1, 2, 3], [3, 4, 0]])
    part = r"\[:\d, :\d\]"
    call = rf"hidden{part}, target{part}, gate=gate{part}, devices=\['cpu', 'cpu'\], chunk_size=2\)$"
    layout = {"devices": ["cpu"] * 2, "chunk_size": 2}
    with pytest.raises(AssertionError, match=call):
        assert_same_loss(Dropping(4, 5), seqpar.CrossEntropy(), torch.randn(2, 3, 4), target, gate=gate, **layout)


@pytest.mark.parametrize("layout", [(["cpu"] * 2, None, None), (None, 2, None), (None, None, 1)])
def test_the_engine_has_the_layout_that_is_given(layout, monkeypatch):
    seen = []

    class Recorded(seqpar.LossCompute):
        def __init__(self, generator, criterion, *given):
            seen.append(given)
            super().__init__(generator, criterion, *given)

    monkeypatch.setattr(same_loss, "LossCompute", Recorded)
    given = dict(zip(("devices", "chunk_tokens", "chunk_size"), layout, strict=True))
    assert_same_loss(nn.Linear(4, 5), seqpar.CrossEntropy(), torch.randn(4, 3, 4), torch.ones(4, 3).long(), **given)
    assert seen == [layout]


def test_modules_of_another_dtype_are_copied_and_left_as_they_are():
    generator, criterion = nn.Linear(4, 5).double(), nn.CrossEntropyLoss(torch.rand(5), reduction="sum")
    assert_same_loss(generator, criterion, torch.randn(6, 4), torch.arange(6) % 5)
    narrow = nn.Linear(4, 5)
    assert_same_loss(narrow, criterion, torch.randn(6, 4), torch.arange(6) % 5)
    assert criterion.weight.dtype == narrow.weight.dtype == torch.float32


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"devices": [], "chunk_size": 1}, "loss= computes the loss by itself, and devices, chunk_size are for seqpar"),
        *(({"tokens": wrong}, "tokens is ") for wrong in (0, -1, INF, NAN, None, "3")),
        ({"generator": len}, "generator is a builtin_function_or_method; it must be a torch.nn.Module"),
        ({"criterion": len}, "criterion is a builtin_function_or_method; it must be a torch.nn.Module"),
        ({"hidden": torch.ones(2, 4).long()}, "hidden"), ({"target": torch.ones(2)}, "target"),
        ({"gate": [1.0, 2.0]}, "gate"), ({"rtol": -1.0}, "rtol is -1.0"),
    ],
)  # fmt: skip
def test_an_argument_of_a_wrong_kind_is_refused_by_name(changed, said):
    given = {"generator": nn.Linear(4, 5), "criterion": seqpar.CrossEntropy(), "hidden": torch.ones(2, 4)}
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        assert_same_loss(**(given | {"target": torch.ones(2).long()} | changed), loss=mean)


def wrong_on_rank_1(generator, criterion, hidden, target):
    hidden = hidden + dist.get_rank() * (hidden - hidden.detach())
    return plain_loss(generator, criterion, hidden, target) * dist.get_world_size()


@pytest.mark.unswitched
def test_a_gradient_that_is_wrong_on_another_rank_than_the_first_is_found():
    hidden, target = torch.randn(5, 3, 4), torch.arange(15).view(5, 3) % 5
    with pytest.raises(AssertionError, match=r"^rank 1: Likely cause: (.|\n)*the gradient of hidden is off"):
        assert_same_loss(nn.Linear(4, 5), seqpar.CrossEntropy(), hidden, target, loss=wrong_on_rank_1, ranks=2)


class CountsClasses(nn.Module):
    """A criterion with a buffer of the classes it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))

    def forward(self, scores, target):
        self.seen += torch.bincount(target, minlength=5)
        return nn.functional.cross_entropy(scores, target, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1, 2])
def test_gradients_and_buffers_are_afterwards_what_they_were(dtype, factor):
    generator, criterion = nn.Linear(2, 5).to(dtype), CountsClasses()
    generator(torch.ones(1, 2, dtype=dtype)).sum().backward()
    before = generator.weight.grad
    kept = before.clone()

    def loss(*given):
        return factor * plain_loss(*given)

    with nullcontext() if factor == 1 else pytest.raises(AssertionError, match="2 times the plain"):
        assert_same_loss(generator, criterion, torch.randn(6, 2), torch.arange(6) % 5, loss=loss)
    assert generator.weight.grad is before
    assert torch.equal(before, kept)
    assert not criterion.seen.any()


def counting(count):
    """A right loss that counts its tokens in some way."""

    def loss(generator, criterion, hidden, target):
        return seqpar.TokenLoss(plain_loss(generator, criterion, hidden, target), torch.tensor(count(target)))

    return loss


def test_the_tokens_that_a_loss_counts_are_those_that_are_not_ignored():
    generator, criterion = nn.Linear(2, 5), nn.CrossEntropyLoss(reduction="sum")
    hidden, target = torch.randn(6, 2), torch.tensor([1, -100, 2, -100, 3, 4])
    assert_same_loss(generator, criterion, hidden, target, loss=counting(lambda target: int((target >= 0).sum())))
    with pytest.raises(AssertionError, match=r"counted otherwise than by ignore_index") as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=counting(len))
    assert "the loss counts 6 where 4 of 6 targets are not ignored" in str(caught.value)
