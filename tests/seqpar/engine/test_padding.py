"""Which targets a criterion ignores, and which tokens it counts: named where it does not say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from tests.seqpar.engine.pairs import V, batch, cross_entropy, each_row, linear


class Ignoring(nn.Module):
    def __init__(self, ignored: int, named: int | None = None) -> None:
        super().__init__()
        self.ignored = ignored
        if named is not None:
            self.ignore_index = named

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target, ignore_index=self.ignored)


@pytest.mark.parametrize("padding", [0, 1, 3, V - 1])
def test_padding_without_a_name_is_refused_with_its_target(padding: int) -> None:
    hidden, target = batch()
    target[15:] = padding
    with pytest.raises(ValueError, match=f"ignores target {padding} but has no ignore_index"):
        seqpar.LossCompute(linear(), Ignoring(padding))(hidden, target)
    with pytest.raises(ValueError, match=f"ignores target {padding} but its ignore_index is -100"):
        seqpar.LossCompute(linear(), Ignoring(padding, -100))(hidden, target)
    loss = seqpar.LossCompute(linear(), Ignoring(padding, padding))(hidden, target)
    assert loss.tokens == (target != padding).sum()


class CountsItself(Ignoring):
    def token_loss(self, logits: Tensor, target: Tensor) -> seqpar.TokenLoss:
        return seqpar.TokenLoss(super().forward(logits, target), (target != self.ignored).sum())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.token_loss(logits, target).total


class CountsAll(CountsItself):
    """It counts tokens that it ignores."""

    def token_loss(self, logits: Tensor, target: Tensor) -> seqpar.TokenLoss:
        return super().token_loss(logits, target)._replace(tokens=torch.tensor(len(target)))


@pytest.mark.parametrize(
    ("targets", "padding", "found"),
    [(range(4, V), 3, True), (range(5, V), 4, False), (range(2), 3, False), (range(2), 2, False), (range(3), 2, True)],
)
@pytest.mark.parametrize("made", [Ignoring, CountsAll])
def test_padding_is_looked_for_among_the_first_four_targets_up_to_the_largest(
    made: Any, targets: range, padding: int, found: bool
) -> None:
    hidden, _ = batch()
    target = torch.arange(20) % len(targets) + targets.start
    engine = seqpar.LossCompute(linear(), made(padding))
    if found:
        with pytest.raises(ValueError, match=f"ignores target {padding} but has no ignore_index"):
            engine(hidden, target)
    else:
        engine(hidden, target)


@pytest.mark.parametrize("wanted", [True, False])
def test_padding_is_found_beside_a_masked_class_and_where_one_row_that_is_asked_about_has_it(wanted: bool) -> None:
    hidden, target = batch()
    target = target % 4 + 4
    target[5] = V - 2
    generator = linear()
    with torch.no_grad():
        generator.bias[V - 1] = -torch.inf
    found = pytest.raises(ValueError, match=f"ignores target {V - 2} but has no ignore_index")
    with torch.set_grad_enabled(wanted), found:
        seqpar.LossCompute(generator, Ignoring(V - 2))(hidden, target)


def test_padding_without_a_name_passes_where_the_criterion_counts_no_tokens_of_it() -> None:
    hidden, target = batch()
    target[15:] = 3
    loss = seqpar.LossCompute(linear(), CountsItself(3), chunk_tokens=6)(hidden, target)
    assert loss.tokens == (target != 3).sum()


@pytest.mark.parametrize(("counted", "silent"), [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_padding_without_a_name_is_found_beside_one_of_which_the_criterion_counts_no_tokens(
    counted: int, silent: int
) -> None:
    class Both(CountsItself):
        def token_loss(self, scores: Tensor, target: Tensor) -> seqpar.TokenLoss:
            counts = target != counted
            losses = each_row(scores, target) * (counts & (target != silent))
            return seqpar.TokenLoss(losses.sum(), counts.sum())

    hidden, target = batch()
    target[:] = torch.arange(len(target)) % 4
    with pytest.raises(ValueError, match=f"ignores target {silent} but has no ignore_index"):
        seqpar.LossCompute(linear(), Both(counted), chunk_tokens=6)(hidden, target)


@pytest.mark.parametrize("where", [slice(None, -1), slice(-1, None)], ids=["most common", "last"])
def test_padding_that_none_of_the_rows_asked_about_has_is_found(where: slice) -> None:
    hidden, target = batch()
    target[:] = torch.arange(len(target)) % 4
    target[where] = V - 2
    # The rows that are asked about
    target[::5] = torch.arange(4)
    with pytest.raises(ValueError, match=f"ignores target {V - 2} but has no ignore_index"):
        seqpar.LossCompute(linear(), Ignoring(V - 2))(hidden, target)


def test_padding_without_a_name_is_found_beside_more_that_has_one() -> None:
    hidden, target = batch()
    target[:] = torch.arange(len(target)) % 4
    # Neither the first rows nor those that are asked about
    target[1:9:2] = V - 2
    target[9:] = -1
    with pytest.raises(ValueError, match=f"ignores target {V - 2} but its ignore_index is "):
        seqpar.LossCompute(linear(), Ignoring(V - 2, named=-1))(hidden, target)


def test_padding_without_a_name_is_found_on_whichever_device_it_is() -> None:
    hidden, target = torch.randn(4, 8, 4).double(), torch.arange(32).view(4, 8) % 4
    # Of a batch that is sorted by length
    target[2:, 2:] = V - 1
    for devices in (None, ["cpu"] * 2):
        with pytest.raises(ValueError, match=f"ignores target {V - 1} but has no ignore_index"):
            seqpar.LossCompute(linear(), Ignoring(V - 1), devices)(hidden, target)


@pytest.mark.parametrize("named", [0, 2, V - 1])
def test_a_criterion_that_does_not_ignore_the_target_that_it_names_is_refused(named: int) -> None:
    with pytest.raises(ValueError, match=f"ignore_index is {named}, but its loss of target {named} is not 0"):
        seqpar.LossCompute(linear(), Ignoring(-100, named))(*batch())


class MeanTimesTokens(Ignoring):
    """A sum, but of ignored targets alone 0 / 0."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        mean = F.cross_entropy(logits, target, ignore_index=self.ignored)
        return mean * (target != self.ignored).sum()


def test_a_criterion_whose_loss_of_the_target_that_it_names_is_no_number_passes() -> None:
    hidden, target = batch()
    target[15:] = 3
    generator, criterion = linear(), MeanTimesTokens(3, 3)
    loss = seqpar.LossCompute(generator, criterion, chunk_tokens=6)(hidden, target)
    torch.testing.assert_close(loss.total, criterion(generator(hidden), target), rtol=1e-12, atol=0)


class ReturnsAll(nn.Module):
    """A criterion that returns what it is told beside the loss."""

    def __init__(self, factor: float = 1.0, **more: Any) -> None:
        super().__init__()
        self.factor, self.more = factor, more

    def token_loss(self, scores: Tensor, target: Tensor) -> seqpar.TokenLoss:
        losses = each_row(scores, target)
        made = {name: make(losses, target) for name, make in self.more.items()}
        return seqpar.TokenLoss(losses.sum(), **({"tokens": torch.tensor(len(target))} | made))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.factor * self.token_loss(scores, target).total


class WithoutForward(nn.Module):
    def token_loss(self, scores: Tensor, target: Tensor) -> seqpar.TokenLoss:
        return ReturnsAll().token_loss(scores, target)


class Averages(nn.Module):
    """Its forward is the mean."""

    token_loss = WithoutForward.token_loss

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.token_loss(scores, target).mean


@pytest.mark.parametrize("chunk_tokens", [3, 20])
@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        (ReturnsAll(tokens=lambda _, y: torch.tensor(len(y.unique()))), r"returns tokens \d for 8 rows, and 8 as the"),
        (ReturnsAll(nll=lambda z, _: z.mean().detach()), r"returns nll [\d.]+ for 8 rows, and [\d.]+ as the sum"),
        (ReturnsAll(correct=lambda z, _: torch.tensor(1)), "returns correct 1 for 8 rows, and 8 as the sum o"),
        (ReturnsAll(1.1), r"gives [\d.]+ for 8 rows and its forward [\d.]+; both must be the same loss"),
    ],
    ids=["tokens", "nll", "correct", "another forward"],
)
def test_what_a_criterion_returns_beside_its_loss_must_add_up(criterion: Any, said: str, chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"token_loss {said}"):
        seqpar.LossCompute(linear(), criterion, chunk_tokens=chunk_tokens)(*batch())


@pytest.mark.parametrize("chunk_tokens", [3, 20])
@pytest.mark.parametrize(
    "criterion",
    [
        ReturnsAll(nll=lambda z, _: z.sum().detach(), correct=lambda z, _: (z < 1).sum()),
        Averages(),
        WithoutForward(),
    ],
    ids=["sums", "a forward that is the mean", "no forward"],
)
def test_what_adds_up_beside_a_loss_passes(criterion: Any, chunk_tokens: int) -> None:
    seqpar.LossCompute(linear(), criterion, chunk_tokens=chunk_tokens)(*batch())
