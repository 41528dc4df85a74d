"""Per-token keywords reach the module whose forward names them, and errors say what a module was called with."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import seqpar
from seqpar.core.token_loss import TokenLoss
from seqpar.testing import assert_same_gradients
from tests.backward import with_gradient

V, D = 7, 4


class Weighted(nn.Module):
    """Sum w (1 - p)^2 log(1 / p): a focal loss with weights."""

    ignore_index = 0

    def forward(self, scores: Tensor, target: Tensor, w: Tensor) -> Tensor:
        log_p = scores.log_softmax(-1).gather(-1, target[:, None])[:, 0]
        return -((1 - log_p.exp()) ** 2 * log_p * w)[target != 0].sum()


class Counting(seqpar.CrossEntropy):
    """A cross-entropy whose `token_loss` takes weights, as a keyword alone."""

    def forward(self, logits: Tensor, target: Tensor, *, w: Tensor) -> Tensor:
        return self.token_loss(logits, target, w=w).total

    def token_loss(self, logits: Tensor, target: Tensor, *, w: Tensor) -> TokenLoss:
        counted = target != self.ignore_index
        losses = nn.functional.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="none")
        return TokenLoss((losses * w).sum(), counted.sum())


class CountingAlone(Counting):
    """The same, whose `forward` takes no weights, and is never called."""

    token_loss = Counting.token_loss

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        raise AssertionError


class AnyKeyword(Weighted):
    """Takes what is left, by whatever name."""

    def forward(self, scores: Tensor, target: Tensor, **others: Tensor) -> Tensor:
        return super().forward(scores, target, **others)


class Shifted(nn.Linear):
    """A generator with a keyword of its own."""

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        return super().forward(hidden) + shift.unsqueeze(-1) * torch.arange(V, device=shift.device)


CRITERIA = {"named": Weighted, "token_loss": lambda: Counting(ignore_index=0), "any": AnyKeyword}


@given(st.data())
def test_weights_of_tokens_and_of_sentences_have_the_plain_gradient(data):
    batch, time = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    shape, seed = data.draw(st.sampled_from([(batch, time), (batch * time,)])), data.draw(st.integers(0, 99))
    torch.manual_seed(seed)
    generator = data.draw(st.sampled_from([nn.Linear, Shifted]))(D, V).double()
    criterion = CRITERIA[data.draw(st.sampled_from(sorted(CRITERIA)))]()
    hidden = torch.randn(*shape, D, dtype=torch.float64, requires_grad=True)
    target = torch.randint(V, shape)
    of_sentences = data.draw(st.booleans())
    w = torch.rand(shape[:1] if of_sentences else shape, dtype=torch.float64).requires_grad_()
    extra = {"shift": torch.randn(shape, dtype=torch.float64, requires_grad=True)} if type(generator) is Shifted else {}
    cut = data.draw(
        st.sampled_from([{"chunk_tokens": 3}, {"devices": ["cpu"] * 3}, {"devices": ["cpu"], "chunk_tokens": 1}])
    )
    engine = seqpar.LossCompute(generator, criterion, **cut)

    def plain():
        weights = w[:, None].expand(shape) if len(shape) > w.dim() else w
        return criterion(generator(hidden, **extra).flatten(0, -2), target.flatten(), w=weights.flatten())

    leaves = {"hidden": hidden, "w": w, **extra, **dict(generator.named_parameters())}
    assert_same_gradients(lambda: engine(hidden, target, w=w, **extra).total, plain, leaves)


def test_weights_are_scattered_with_hidden_states_that_are_scattered_already():
    torch.manual_seed(0)
    hidden, target, w = torch.randn(5, 3, D), torch.randint(1, V, (5, 3)), torch.rand(5)
    engine = seqpar.LossCompute(nn.Linear(D, V), Weighted(), ["cpu", "cpu"])
    whole = engine(hidden, target, w=w).total
    torch.testing.assert_close(engine([hidden[:2], hidden[2:]], target, w=w).total, whole)
    torch.testing.assert_close(
        engine([hidden[:2], hidden[2:]], [target[:2], target[2:]], w=[w[:2], w[2:]]).total, whole
    )


def given_to(generator_forward, criterion_forward, **keywords):
    """Who got which keywords in a call of the engine."""
    seen = {"generator": set(), "criterion": set()}
    generator, criterion = nn.Linear(D, V), nn.CrossEntropyLoss(reduction="sum")

    class Generator(nn.Module):
        forward = generator_forward(lambda h, kw: (seen["generator"].update(kw), generator(h))[1])

    class Criterion(nn.Module):
        forward = criterion_forward(lambda s, t, kw: (seen["criterion"].update(kw), criterion(s, t))[1])

    engine = seqpar.LossCompute(Generator(), Criterion())
    engine(torch.randn(3, D), torch.randint(V, (3,)), **{name: torch.rand(3) for name in keywords})
    return seen


def bare(run):
    return lambda self, *given: run(*given, {})


def naming_w(run):
    def forward(self, a, b=None, w=None):
        given = (a,) if b is None else (a, b)
        return run(*given, {} if w is None else {"w": w})

    return forward


def taking_any(run):
    return lambda self, *given, **any_other: run(*given, any_other)


def wrapped(run):
    """A decorator that names nothing itself."""

    @functools.wraps(naming_w(run))
    def forward(*given, **keywords):
        return naming_w(run)(*given, **keywords)

    return forward


@pytest.mark.parametrize(
    ("generator", "criterion", "takers"),
    [
        (naming_w, bare, ["generator"]),
        (bare, naming_w, ["criterion"]),
        (bare, wrapped, ["criterion"]),
        (naming_w, naming_w, ["generator", "criterion"]),
        (taking_any, bare, ["generator"]),
        (bare, taking_any, ["criterion"]),
        (taking_any, taking_any, ["generator"]),
        (taking_any, naming_w, ["criterion"]),
        (naming_w, taking_any, ["generator"]),
    ],
)
def test_a_keyword_goes_where_it_is_named_else_where_any_is_taken(generator, criterion, takers):
    seen = given_to(generator, criterion, w=1)
    assert [who for who in seen if seen[who] == {"w"}] == takers


def test_a_keyword_that_token_loss_alone_names_goes_there():
    generator, hidden, target, w = nn.Linear(D, V), torch.randn(3, D), torch.tensor([1, 0, 3]), torch.rand(3)
    alone, both = (seqpar.LossCompute(generator, kind(ignore_index=0)) for kind in (CountingAlone, Counting))
    assert alone(hidden, target, w=w).total == both(hidden, target, w=w).total


@pytest.mark.parametrize("criterion", [seqpar.CrossEntropy(), nn.CrossEntropyLoss(reduction="sum"), Weighted()])
def test_a_keyword_that_nobody_takes_is_named_with_what_weighs_tokens(criterion):
    engine = seqpar.LossCompute(nn.Linear(D, V), criterion)
    hidden, target, weights = torch.randn(3, D), torch.tensor([1, 2, 3]), torch.rand(3)
    with pytest.raises(
        TypeError, match=r"^neither the generator \(Linear\) nor the criterion \(\w+\) takes v: [^\n]*"
    ) as error:
        engine(hidden, target, v=weights)
    shown = str(error.value).split("also ")[1]
    if type(criterion) is not Weighted:
        loss = eval(shown, {"engine": engine, "hidden": hidden, "target": target, "v": weights})
        plain = nn.functional.cross_entropy(engine.head["generator"](hidden), target, reduction="none")
        torch.testing.assert_close(loss.total, (plain * weights).sum())


class Failing(nn.Module):
    """Passes the first call's rows, and fails in another one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.ignore_index = way, 0

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.way == "at once":
            return scores.gather(1, target)  # one index too few
        if target.tolist() == [5, 4, 3, 2, 1]:
            if self.way == "forward":
                raise KeyError("planted")
            scores = with_gradient(scores, refused)
        return (scores.logsumexp(-1) * (target != self.ignore_index)).sum()


def refused(grad):
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("way", "error", "notes"),
    [
        (
            "at once",
            RuntimeError,
            ["the criterion (Failing), called with scores (4, 7), target (4,): the engine calls"],
        ),
        (
            "forward",
            KeyError,
            ["the criterion (Failing), called with scores (5, 7), target (5,): ", "5 rows from 1 to 5"],
        ),
        ("backward", KeyError, ["5 rows from 1 to 5"]),
    ],
)
def test_an_error_in_a_users_module_is_noted_with_shapes_and_rows(way, error, notes):
    engine = seqpar.LossCompute(nn.Linear(D, V), Failing(way), chunk_tokens=5)
    hidden = torch.randn(6, D, requires_grad=True)
    with pytest.raises(error) as caught:
        engine(hidden, torch.tensor([0, 5, 4, 3, 2, 1]))
    said = "\n".join(caught.value.__notes__)
    if not hidden.is_cpu:
        # An accelerator may have failed, and is not asked which
        notes = [note.removesuffix(" from 1 to 5") for note in notes]
    assert all(note in said for note in notes), said


def test_an_error_in_a_generator_is_noted_with_its_per_token_tensors():
    engine = seqpar.LossCompute(Shifted(D, V), seqpar.CrossEntropy())
    with pytest.raises(RuntimeError) as caught:
        engine(torch.randn(2, 3, D), torch.ones(2, 3).long(), shift=torch.ones(2, 3, 5))
    assert "the generator (Shifted), called with hidden (1, 4, 4), shift (1, 4, 5): " in "".join(caught.value.__notes__)


class BySharesOfMask(nn.Module):
    """Generator or criterion whose numbers are multiplied by the share of its rows that a mask keeps."""

    def __init__(self, is_generator: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(D, V).double() if is_generator else None

    def forward(self, rows: Tensor, target: Tensor | None = None, *, mask: Tensor) -> Tensor:
        share = mask.double().mean()
        if self.linear is not None:
            return self.linear(rows) * share
        return (nn.functional.cross_entropy(rows, target, reduction="none") * mask).sum() * share


def by_shares(is_generator):
    """A pair one of which multiplies by the share."""
    if is_generator:
        return BySharesOfMask(True), nn.CrossEntropyLoss(reduction="sum")
    return nn.Linear(D, V).double(), BySharesOfMask(False)


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("padding", [slice(47, 48), slice(20, 22), slice(1, 2), slice(8, 48), slice(0, 30)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("is_generator", [True, False])
def test_a_share_of_a_mask_is_found_wherever_its_padding_is(is_generator, dtype, padding, devices):
    """A mask has no gradient that would tell, and most of the few rows that are asked about may not be padding."""
    torch.manual_seed(0)
    generator, criterion = by_shares(is_generator)
    hidden, target, mask = torch.randn(48, D).double(), torch.randint(V, (48,)), torch.ones(48, dtype=dtype)
    mask[padding] = 0
    with pytest.raises(ValueError, match="mixes rows" if is_generator else "does not add up"):
        seqpar.LossCompute(generator, criterion, devices, chunk_tokens=8)(hidden, target, mask=mask)


@pytest.mark.parametrize("is_generator", [True, False])
def test_a_share_of_a_mask_is_found_behind_rows_that_are_ignored(is_generator):
    """Of a count, not of 0 and 1: another number is asked for those alone."""
    torch.manual_seed(0)
    generator, criterion = by_shares(is_generator)
    criterion.ignore_index = -100
    hidden, target, mask = torch.randn(48, D).double(), torch.randint(V, (48,)), torch.full((48,), 3)
    target[:30] = -100
    mask[45] = 0
    with pytest.raises(ValueError, match="mixes rows" if is_generator else "does not add up"):
        seqpar.LossCompute(generator, criterion, chunk_tokens=8)(hidden, target, mask=mask)


def test_a_share_of_a_mask_is_found_behind_numbers_of_each_token():
    """Which have ends in other rows, more than are asked about."""
    torch.manual_seed(0)

    class Weighing(BySharesOfMask):
        def forward(self, rows, target, *, first, second, mask):
            return super().forward(rows * (first * second).unsqueeze(-1), target, mask=mask)

    engine = seqpar.LossCompute(nn.Linear(D, V).double(), Weighing(False), chunk_tokens=8)
    first, second, mask = (
        torch.linspace(1, 2, 48).double(),
        torch.linspace(0, 9, 48).double().sin(),
        torch.full((48,), 3),
    )
    mask[45] = 0
    with pytest.raises(ValueError, match="does not add up"):
        engine(torch.randn(48, D).double(), torch.randint(V, (48,)), first=first, second=second, mask=mask)


class WarmedUp(nn.Module):
    """A mean that is 0 at first, of losses times a mask."""

    scale = 0.0

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return self.scale * (nn.functional.cross_entropy(scores, target, reduction="none") * mask).mean()


def test_a_criterion_whose_loss_is_0_at_first_is_asked_again_also_beside_a_mask_without_padding():
    criterion = WarmedUp()
    engine, hidden, target = seqpar.LossCompute(nn.Linear(D, V), criterion), torch.randn(12, D), torch.ones(12).long()
    engine(hidden, target, mask=torch.ones(12))
    criterion.scale = 1.0
    with pytest.raises(ValueError, match="takes a mean"):
        engine(hidden, target, mask=torch.ones(12))


class Masking(nn.Module):
    """A generator or a criterion that is a function of its inputs and of a mask or weight of each token."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(D, V)

    def forward(self, first, *second, mask):
        if second:
            losses = nn.functional.cross_entropy(first, *second, reduction="none")
            return self.function(losses, mask.to(first.dtype)).sum()
        return self.linear(self.function(first, mask.to(first.dtype).unsqueeze(-1)))


def refusing_zeros(x, mask):
    if not mask.all():
        raise NotImplementedError
    return x * mask


JOINING = {
    "by the mean": lambda x, mask: x * mask / mask.mean(),
    "by the spread": lambda x, mask: x * (1 + (mask - mask.mean()).abs().mean()),
}
EACH = {
    "a product": torch.mul,
    "a loss that refuses zeros": refusing_zeros,
    "the row's own": lambda x, mask: x / (1 + mask),
    "a sum": torch.add,
}
ONES = [torch.ones(12), torch.ones(12).bool(), torch.ones(12).long(), torch.ones(3, 4)]
NO_NUMBERS = [torch.bool, torch.float32]
MASKED = [(name, mask) for name in [*JOINING, *EACH] for mask in ONES]
MASKED += [(name, torch.zeros(12, dtype=kind)) for name in ("by the spread", "the row's own") for kind in NO_NUMBERS]
MASKED += [("a sum", torch.zeros(12))]


@pytest.mark.parametrize("role", ["generator", "criterion"])
@pytest.mark.parametrize(("name", "mask"), MASKED)
def test_rows_joined_by_a_mask_are_found_in_a_batch_without_padding(name, role, mask):
    torch.manual_seed(0)
    masking = Masking((JOINING | EACH)[name])
    pair = (masking, seqpar.CrossEntropy()) if role == "generator" else (nn.Linear(D, V), masking)
    engine = seqpar.LossCompute(*pair)
    hidden, target = torch.randn(*mask.shape, D, requires_grad=True), torch.randint(V, mask.shape)
    if name in EACH:
        assert engine(hidden, target, mask=mask).total.isfinite()
        return
    with pytest.raises(ValueError, match=r"does not add up|takes a mean|mixes rows"):
        engine(hidden, target, mask=mask)
