"""A criterion must give each row in company what it gives it alone, in value and in gradient: found in every dtype."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar.engine import criterion_rows
from tests.on_device import seeds
from tests.seqpar.engine.pairs import Made, V, cross_entropy, each_row

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def of(function):
    """A criterion that is a function of scores and targets, and may drop some."""
    return Made(function, dropout=nn.Dropout(0.3))


class Holding(Made):
    """One with numbers of its own in the dtype of the scores, with which it takes no others."""

    def __init__(self, function, dtype, plain=False):
        super().__init__(function)
        self.rotation = nn.Parameter(torch.eye(V, dtype=dtype))
        self.register_buffer("same", torch.eye(V, dtype=dtype))
        self.register_buffer("mask", torch.zeros(V, dtype=torch.bool))
        if plain:
            del self.same
            self.same = torch.eye(V, dtype=dtype)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().forward((logits @ self.rotation @ self.same).masked_fill(self.mask, 0), target)


def of_losses(change):
    return lambda self, z, y: change(each_row(z, y))


def pulled_together(self, z, y):
    """Supervised contrastive: rows of one target attract each other."""
    same = (y[:, None] == y[None, :]).to(z.dtype)
    near = F.normalize(z, dim=-1) @ F.normalize(z, dim=-1).mT
    return each_row(z, y).sum() - 0.1 * (same * near).sum() / 2 + 0.1 * near.diagonal().sum() / 2


def pulled_to_their_equals(self, z, y):
    """Rows of one target, which alone, or beside a copy of itself, has no distance."""
    same = (y[:, None] == y[None, :]).to(z.dtype)
    return each_row(z, y).sum() + 0.01 * (same * (z[:, None] - z[None, :]).square().sum(-1)).sum()


def by_frequency(self, z, y):
    return (each_row(z, y) / torch.bincount(y, minlength=V)[y]).sum()


def dropped_mean(self, z, y):
    return each_row(self.dropout(z), y).mean()


JOINING = {
    "the harder half": of_losses(lambda x: x.topk(max(1, len(x) // 2)).values.sum()),
    "all but the hardest hundredth": of_losses(lambda x: x.sort().values[: max(1, int(0.99 * len(x)))].sum()),
    "all but one of a hundred": of_losses(lambda x: x.sort().values[: len(x) - len(x) // 100].sum()),
    "above the mean": of_losses(lambda x: x[x >= x.mean()].sum()),
    "above a detached mean": of_losses(lambda x: (x * (x >= x.detach().mean())).sum()),
    "clamped at a quantile": of_losses(lambda x: x.clamp(max=x.detach().double().quantile(0.9).to(x)).sum()),
    "weights by a softmax over rows": of_losses(lambda x: (x * x.detach().softmax(0) * len(x)).sum()),
    "weights by the batch's mean": of_losses(lambda x: (x * (1 + 0.01 * x.detach().mean())).sum()),
    "weights that add up to the number of rows": of_losses(lambda x: (x * (x / x.mean()).detach()).sum()),
    "the hardest twice": of_losses(lambda x: x.sum() + x.max()),
    "a constant for each call": of_losses(lambda x: x.sum() + 0.01),
    "a mean in the gradient alone": of_losses(lambda x: x.sum() + ((x - x.detach()) * x.detach().mean()).sum()),
    "a mean whose value is 0": of_losses(lambda x: (x - x.detach()).mean()),
    "a spread": of_losses(lambda x: x.sum() + 0.01 * x.std(correction=0) * len(x)),
    "the neighbour": of_losses(lambda x: (x * x.roll(1).detach()).sum()),
    "a mean with dropout": dropped_mean,
    "a pull between rows": pulled_together,
    "the distance of rows of one target": pulled_to_their_equals,
    "the frequency of a target in the batch": by_frequency,
    "the share of the batch that is no padding": lambda self, z, y: each_row(z, y).sum() * (y != 0).to(z.dtype).mean(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weights by the batch's mean", r".* alone, so it does not add up"),
        (
            "a mean in the gradient alone",
            r".* alone, but a row's gradient changes with the other rows, by .* not add up",
        ),
        ("all but one of a hundred", r"381\.\d+ for 128 rows and 385\.\d+ .* alone, so it does not add up"),
    ],
)
def test_it_is_found_in_a_criterion_with_numbers_of_its_own_and_said_how(name, said, dtype):
    torch.manual_seed(0)
    generator, hidden, target = nn.Linear(4, V), torch.randn(40, 4), torch.randint(V, (40,))
    criterion = Holding(JOINING[name], dtype)
    with pytest.raises(ValueError, match=f"^the criterion gives {said}"):
        seqpar.LossCompute(generator.to(dtype), criterion)(hidden.to(dtype).requires_grad_(), target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", JOINING)
def test_a_criterion_that_looks_at_other_rows_is_refused_whatever_the_rows(name, dtype):
    for seed in seeds(5):
        torch.manual_seed(seed)
        engine = seqpar.LossCompute(nn.Linear(4, V).to(dtype), of(JOINING[name]), chunk_tokens=16)
        hidden = torch.randn(40, 4).to(dtype).requires_grad_()
        with pytest.raises(ValueError, match=r"does not add up|takes a mean"):
            engine(hidden, torch.randint(V, (40,)))


@pytest.mark.parametrize(("classes", "budget", "most"), [(V, None, 128), (100_000, None, 41), (V, 1, 22)])
def test_a_large_vocabulary_has_a_smaller_company(classes, budget, most, monkeypatch):
    """At most 16 MiB of scores in float32: 41 rows of 100,000 classes; of any, each row twice.

    With one target there are 7 rows with it, and one each with it and the first classes, which are often padding.
    """
    if budget is not None:
        monkeypatch.setattr(criterion_rows, "COMPANY_BYTES", budget)
    criterion = of(lambda self, z, y: cross_entropy(z, y))
    target = torch.full((40,), 3)
    engine = seqpar.LossCompute(nn.Linear(1, classes), criterion, chunk_tokens=10)
    with mock.patch.object(criterion_rows, "criterion_loss", wraps=criterion_rows.criterion_loss) as asked:
        engine(torch.randn(40, 1), target)
    assert max(len(call.args[2]) for call in asked.call_args_list) == most


@pytest.mark.parametrize("name", ["focal", "noise", "dropout", "a constant for one target"])
def test_a_criterion_is_asked_once_also_if_it_is_random(name):
    sizes = []
    criterion = of(lambda self, z, y: sizes.append(len(y)) or ALONE[name](self, z, y))
    engine = seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=10)
    hidden, target = torch.randn(40, 4), torch.randint(V, (40,))
    engine(hidden, target)
    sizes.clear()
    engine(hidden, target)
    assert sizes == [10] * 4


def test_a_criterion_with_a_tensor_that_keeps_its_dtype_is_asked_in_that():
    criterion = Holding(ALONE["focal"], torch.bfloat16, plain=True)
    hidden, target = torch.randn(40, 4).bfloat16(), torch.randint(V, (40,))
    assert seqpar.LossCompute(nn.Linear(4, V).bfloat16(), criterion)(hidden, target).total.isfinite()


@pytest.mark.parametrize("name", [n for n in JOINING if "quantile" not in n])
def test_it_is_found_in_a_batch_of_one_token(name):
    """The rows that are asked about are made from that one, and differ: of equal rows none is the hardest."""
    torch.manual_seed(0)
    hidden, target = torch.randn(1, 4).double().requires_grad_(), torch.randint(V, (1,))
    with pytest.raises(ValueError, match=r"does not add up|takes a mean"):
        seqpar.LossCompute(nn.Linear(4, V).double(), of(JOINING[name]))(hidden, target)


@pytest.mark.parametrize("name", [n for n in JOINING if "mean" not in n or "detached" in n])
def test_it_is_found_in_evaluation_by_the_value_or_has_none(name):
    torch.manual_seed(0)
    criterion, generator = of(JOINING[name]).eval(), nn.Linear(4, V).double()
    hidden, target = torch.randn(40, 4).double(), torch.randint(V, (40,))
    with torch.no_grad(), pytest.raises(ValueError, match="does not add up"):
        seqpar.LossCompute(generator, criterion, chunk_tokens=16)(hidden, target)


def allowed(self, z, y):
    """Smoothing over the classes of a row's own half."""
    mask = (torch.arange(V, device=z.device) % 2)[None, :] == (y % 2)[:, None]
    q = 0.1 * mask / mask.sum(-1, keepdim=True) + 0.9 * F.one_hot(y, V)
    return -(q.to(z.dtype) * z.log_softmax(-1)).sum()


ALONE = {
    "focal": lambda self, z, y: ((1 - (-each_row(z, y)).exp()).square() * each_row(z, y)).sum(),
    "poly": lambda self, z, y: (each_row(z, y) + 1 - (-each_row(z, y)).exp()).sum(),
    "smoothing over allowed classes": allowed,
    "in float32 inside": lambda self, z, y: each_row(z.float(), y).sum(),
    "in bfloat16 inside": lambda self, z, y: each_row((z.bfloat16() * 2).to(z.dtype), y).sum(),
    "dropout": lambda self, z, y: each_row(self.dropout(z), y).sum(),
    "rare dropout": lambda self, z, y: each_row(F.dropout(z, 0.02, self.training), y).sum(),
    "noise": lambda self, z, y: (each_row(z, y) * torch.rand_like(z[:, 0])).sum(),
    "a margin": lambda self, z, y: F.multi_margin_loss(z.float(), y, reduction="sum"),
    "a squeeze": lambda self, z, y: cross_entropy(z.squeeze(), y),
    "a penalty on scores": lambda self, z, y: (each_row(z, y) + 1e-4 * z.logsumexp(-1).square()).sum(),
    "a clamp": of_losses(lambda x: x.clamp(max=2.5).sum()),
    "at a low temperature": lambda self, z, y: cross_entropy(z / 0.01, y),
    "cosines": lambda self, z, y: cross_entropy(64 * F.normalize(z, dim=-1), y),
    "a wide margin": lambda self, z, y: F.multi_margin_loss(100 * z.float(), y, reduction="sum"),
    "a constant for one target": lambda self, z, y: torch.where(y == 0, 3.0, each_row(z, y)).sum(),
    "no graph for one target": lambda self, z, y: (
        3.0 * (y == 0).sum() + (each_row(z, y)[y > 0].sum() if y.any() else 0)
    ),
    "infinite": of_losses(lambda x: (x + torch.inf).sum()),
    "a value of 0": of_losses(lambda x: (x - x.detach()).sum()),
    "one shape more": lambda self, z, y: each_row(z, y).sum().reshape(1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_a_sum_of_one_term_a_row_is_never_refused(name, dtype):
    for seed in seeds(3):
        torch.manual_seed(seed)
        engine = seqpar.LossCompute(nn.Linear(4, V).to(dtype), of(ALONE[name]), chunk_tokens=16)
        engine((3 * torch.randn(40, 4)).to(dtype).requires_grad_(), torch.randint(V, (40,)))


def test_a_random_mean_is_found_where_evaluation_makes_it_repeat_itself():
    engine = seqpar.LossCompute(nn.Linear(4, V), of(dropped_mean))
    with pytest.raises(ValueError, match="takes a mean"):
        engine(torch.randn(9, 4), torch.randint(V, (9,)))


def median_mask(scores):
    return scores.log_prob * (scores.log_prob.detach() < scores.log_prob.detach().median())


def test_a_loss_of_scores_that_masks_by_a_statistic_is_refused_whatever_the_rows():
    for seed in range(30):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(50, 4, requires_grad=True), torch.randn(V, 4)
        with pytest.raises(ValueError, match="loss mixes rows: a row's "):
            seqpar.scored_loss(hidden, weight, torch.randint(V, (50,)), median_mask)


def by_chunk(change, target):
    def per_chunk(params, rows, chunk):
        losses = each_row(rows[0] @ params[0].mT, target[chunk])
        return seqpar.TokenLoss(change(losses), torch.tensor(len(losses)))

    return per_chunk


@pytest.mark.parametrize("chunks", [[slice(0, 7), slice(7, 20)], [torch.arange(7), torch.arange(7, 20)]])
@pytest.mark.parametrize("name", ["the harder half", "above a detached mean", "the neighbour"])
def test_a_function_of_chunks_that_joins_rows_is_refused_after_one_that_does_not(name, chunks):
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    target, empty = torch.randint(V, (20,)), seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))
    for change in (torch.sum, lambda x: x.square().sum()):
        loss = seqpar.chunked_gradient(by_chunk(change, target), chunks, [hidden], [weight], empty)
        (mine,) = torch.autograd.grad(loss.total, hidden)
        (plain,) = torch.autograd.grad(change(each_row(hidden @ weight.mT, target)), hidden)
        torch.testing.assert_close(mine, plain)
    joining = JOINING[name].__closure__[0].cell_contents
    with pytest.raises(ValueError, match="per_chunk joins rows"):
        seqpar.chunked_gradient(by_chunk(joining, target), chunks, [hidden], [weight], empty)


@pytest.mark.parametrize("kind", ["slices", "indices", "both"])
@pytest.mark.parametrize("padding", [slice(6, 8), slice(17, 18)])
def test_a_function_of_chunks_that_weighs_by_its_share_of_padding_is_refused(padding, kind):
    """Neither the first rows of a chunk nor the last have any."""
    hidden, target = torch.randn(20, 4, requires_grad=True), torch.ones(20).long()
    target[padding] = 0
    as_slices = [slice(0, 10), slice(10, 11), slice(11, 20)]
    as_indices = [torch.arange(20)[chunk] for chunk in as_slices]
    chunks = {"slices": as_slices, "indices": as_indices, "both": [*as_slices[:2], *as_indices[2:]]}[kind]

    def per_chunk(params, rows, chunk):
        counted = (target[chunk] != 0).float()
        return seqpar.TokenLoss((rows[0].square().sum(1) * counted).sum() * counted.mean(), counted.sum().long())

    empty = seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))
    with pytest.raises(ValueError, match="per_chunk joins rows"):
        seqpar.chunked_gradient(per_chunk, chunks, [hidden], [], empty)


@pytest.mark.parametrize("joined", [0, 1])
def test_rows_that_are_joined_in_the_gradient_of_one_of_several_tensors_are_found(joined):
    """The value of what joins them is 0."""
    several = [torch.randn(20, 4, requires_grad=True) for _ in range(2)]

    def per_chunk(params, rows, chunk):
        x = rows[joined]
        own = sum(t.square().sum() for t in rows)
        return seqpar.TokenLoss(own + ((x - x.detach()) * x.detach().mean(0)).sum(), torch.tensor(len(x)))

    empty = seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))
    with pytest.raises(ValueError, match="per_chunk joins rows: a row's gradient changes"):
        seqpar.chunked_gradient(per_chunk, [slice(0, 10), slice(10, 20)], several, [], empty)


def test_a_function_of_chunks_is_asked_once():
    calls = []
    hidden, target = torch.randn(20, 4), torch.randint(4, (20,))

    def per_chunk(params, rows, chunk):
        calls.append(len(rows[0]))
        return seqpar.TokenLoss(each_row(rows[0], target[chunk]).sum(), torch.tensor(len(rows[0])))

    empty = seqpar.TokenLoss(torch.zeros(()), torch.tensor(0))
    seqpar.chunked_gradient(per_chunk, [slice(0, 20)], [hidden], [], empty)
    calls.clear()
    seqpar.chunked_gradient(per_chunk, [slice(0, 20)], [hidden], [], empty)
    assert calls == [20]


ORDERED = {
    "later rows weigh more": lambda x: x @ torch.linspace(1, 2, len(x), dtype=x.dtype),
    # It adds up over any halves of even size
    "signs take turns": lambda x: x @ torch.tensor([1, -1]).to(x).repeat(len(x))[: len(x)],
}


@pytest.mark.parametrize("name", ORDERED)
def test_a_criterion_that_depends_on_the_order_of_rows_is_refused(name):
    torch.manual_seed(0)
    engine = seqpar.LossCompute(nn.Linear(4, V), of(of_losses(ORDERED[name])))
    with pytest.raises(ValueError, match="does not add up"):
        engine(9 * torch.randn(30, 4), torch.randint(V, (30,)))


NOT_ADDITIVE = {
    "a constant": (lambda x: x.sum() + 5, "does not add up"),
    "a square": (lambda x: x.sum() ** 2, "does not add up"),
    "a root": (lambda x: x.sum().sqrt(), "does not add up"),
    "a mean": (lambda x: x.mean(), "takes a mean; the criterion must sum"),
    "the largest, as often as there are rows": (lambda x: x.max() * len(x), "does not add up"),
    "a spread": (lambda x: x.sum() + 2 * x.std(correction=0), "does not add up"),
}


@pytest.mark.parametrize("name", NOT_ADDITIVE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_criterion_that_does_not_add_up_is_refused_with_both_numbers(name, dtype):
    change, message = NOT_ADDITIVE[name]
    torch.manual_seed(0)
    engine = seqpar.LossCompute(nn.Linear(4, V).to(dtype), of(of_losses(change)))
    with pytest.raises(ValueError, match=rf"the criterion gives [\d.]+ for 7 rows and [\d.]+ .*{message}") as error:
        engine(9 * torch.randn(30, 4).to(dtype), torch.randint(V, (30,)))
    together, alone = (float(number) for number in re.findall(r"[\d.]+(?= for 7| as the)", str(error.value)))
    assert (together < alone) == (name in ("a constant", "a root", "a mean"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_criterion_that_adds_up_is_never_refused(dtype):
    for seed in seeds(10):
        torch.manual_seed(seed)
        for change in (torch.sum, lambda x: x.square().sum(), lambda x: (x * torch.rand_like(x)).sum()):
            hidden = torch.randn(7, 4).to(dtype)
            seqpar.LossCompute(nn.Linear(4, V).to(dtype), of(of_losses(change)))(hidden, torch.randint(V, (7,)))


def test_random_losses_that_are_equal_by_chance_are_not_refused():
    """Every other loss has the factor 2; in bfloat16 losses of any distribution are equal now and then."""
    for seed in range(20):
        torch.manual_seed(seed)
        criterion = of(of_losses(lambda x: x.sum() * (1 + torch.randint(2, ()))))
        engine = seqpar.LossCompute(nn.Linear(4, V), criterion)
        engine(torch.randn(7, 4), torch.randint(V, (7,)))


def mean_where(self, z, y):
    return cross_entropy(z, y) / (len(y) if self.is_mean else 1)


BECOMING_A_MEAN = {
    "a flag": lambda engine: setattr(engine.head["criterion"], "is_mean", True),
    "another criterion": lambda engine: engine.head.update({"criterion": of(of_losses(torch.mean))}),
}


@pytest.mark.parametrize("name", BECOMING_A_MEAN)
def test_a_criterion_that_is_a_mean_later_is_refused_in_the_next_call(name):
    engine = seqpar.LossCompute(nn.Linear(4, V), Made(mean_where, is_mean=False), chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    engine(hidden, target)
    BECOMING_A_MEAN[name](engine)
    with pytest.raises(ValueError, match="it takes a mean"):
        engine(hidden, target)


@pytest.mark.parametrize("factor", [0.0, float("inf")])
def test_a_criterion_whose_first_loss_is_0_or_infinite_is_checked_in_the_next_call(factor):
    """A mean that is warmed up."""
    criterion = Made(lambda self, z, y: F.cross_entropy(z, y) * self.factor, factor=nn.Buffer(torch.tensor(factor)))
    engine = seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=5)
    hidden, target = torch.randn(12, 4), torch.randint(V, (12,))
    assert engine(hidden, target).total == factor
    criterion.factor.fill_(1)
    with pytest.raises(ValueError, match="it takes a mean"):
        engine(hidden, target)
