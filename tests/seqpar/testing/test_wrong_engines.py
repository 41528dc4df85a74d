"""One table of wrong engines: each is run for real, caught, and its cause named."""

import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import seqpar
from seqpar.testing import assert_same_gradients, assert_same_loss, plain_loss
from seqpar.testing.ranks import RankError, ranks

PADDING = 0
TOKENS = 14
"""Targets that are not ignored."""
CAP = 2.0


class Deaf(torch.autograd.Function):
    """Gradients stored in forward, handed out whatever comes from above, to hidden alone or to both."""

    @staticmethod
    def forward(ctx, hidden, weight, target, parts):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
            loss = F.cross_entropy(F.linear(*leaves).flatten(0, -2), target.flatten(), reduction="sum")
        ctx.stored, ctx.parts = torch.autograd.grad(loss, leaves), parts
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        both = [g if name in ctx.parts else upstream * g for g, name in zip(ctx.stored, ("hidden", "weight"), strict=1)]
        return *both, None, None


def deaf(parts):
    return lambda generator, criterion, hidden, target: Deaf.apply(hidden, generator.weight, target, parts)


def mean(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(ignore_index=criterion.ignore_index), hidden, target)


def mean_of_all_rows(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / target.numel()


def dropped_rows(generator, criterion, hidden, target):
    rows = target.numel() // 4 * 4
    return criterion(generator(hidden.flatten(0, -2)[:rows]), target.flatten()[:rows])


def dropped_steps(generator, criterion, hidden, target):
    steps = target.size(1) // 2 * 2
    return plain_loss(generator, criterion, hidden[:, :steps], target[:, :steps])


def counted_padding(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(reduction="sum"), hidden, target)


def twice(generator, criterion, hidden, target):
    loss = plain_loss(generator, criterion, hidden, target)
    loss.backward(retain_graph=True)
    return loss


def halved(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / 2


def detached(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden.detach(), target)


def in_float32(generator, criterion, hidden, target):
    return criterion(F.linear(hidden.float(), generator.weight.float()).flatten(0, -2), target.flatten()).double()


class Scaled(torch.autograd.Function):
    """The loss as it is, with another gradient."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream.square()


def squared(*given):
    return Scaled.apply(plain_loss(*given))


def parts(generator, criterion, hidden, target, rows=4, keep=lambda number: True):
    """The losses of chunks of rows, and how many of each count."""
    pieces = enumerate(zip(hidden.flatten(0, -2).split(rows), target.flatten().split(rows), strict=True))
    return [(criterion(generator(h), t), (t != criterion.ignore_index).sum()) for n, (h, t) in pieces if keep(n)]


def mean_of_means(*given):
    means = [loss / count for loss, count in parts(*given)]
    return sum(means) / len(means)


def skipped(*given):
    return sum(loss for loss, _ in parts(*given, keep=lambda number: number != 1))


def dropped_chunk_with_its_own_mean(*given):
    kept = parts(*given, keep=lambda number: number != 3)
    return sum(loss for loss, _ in kept) / sum(count for _, count in kept)


def shifted(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden[:, :-1], target[:, 1:])


def shifted_back(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden[:, 1:], target[:, :-1])


def rolled(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target.roll(1, -1))


class NarrowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *losses):
        return sum((loss.bfloat16() for loss in losses), start=torch.zeros((), dtype=torch.bfloat16)).double()

    @staticmethod
    def backward(ctx, upstream):
        return (upstream,) * len(ctx.needs_input_grad)


def summed_in_bfloat16(*given):
    return NarrowSum.apply(*(loss for loss, _ in parts(*given)))


class NarrowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.dtype = dtype
        return weight.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream.to(ctx.dtype).double(), None


def weight_summed_in(dtype):
    def loss(generator, criterion, hidden, target):
        logits = F.linear(hidden, NarrowGradient.apply(generator.weight, dtype))
        return criterion(logits.flatten(0, -2), target.flatten())

    return loss


class Capped(nn.Linear):
    def forward(self, x):
        return CAP * torch.tanh(super().forward(x) / CAP)


def no_softcap_derivative(generator, criterion, hidden, target):
    z = F.linear(hidden, generator.weight)
    capped = z + (CAP * torch.tanh(z / CAP) - z).detach()
    return criterion(capped.flatten(0, -2), target.flatten())


def smoothed_as(convention):
    def loss(generator, criterion, hidden, target):
        other = seqpar.LabelSmoothing(0.1, convention, ignore_index=criterion.ignore_index)
        return plain_loss(generator, other, hidden, target)

    return loss


def unsmoothed(generator, criterion, hidden, target):
    return plain_loss(generator, seqpar.CrossEntropy(ignore_index=criterion.ignore_index), hidden, target)


class Wrong(NamedTuple):
    """A wrong engine."""

    cause: str
    loss: object
    smoothing: str = ""
    softcap: bool = False
    tokens: int = 1
    ignored: int = PADDING


ONLY_THE_GRADIENT = "; the value is right, only the gradient is wrong"
WRONG = {
    "mean": Wrong("a mean instead of a sum: all gradients are 1/14 times the plain ones, and 14 targets are not", mean),
    "mean of all rows": Wrong("a mean over all 15 targets, ignored padding counted: all gradients", mean_of_all_rows),
    "dropped rows": Wrong("the last chunk is dropped: hidden has no gradient in its last 3 rows", dropped_rows),
    "dropped steps": Wrong("the last chunk is dropped: hidden has no gradient in its last 1 time steps", dropped_steps),
    "skipped": Wrong("a chunk in the middle is skipped: hidden has no gradient in its rows 4 to 6, of 15,", skipped),
    "dropped, own mean": Wrong(
        "the last chunk is dropped: hidden has no gradient in its last 3 rows, of 15, and 14/11 times the plain one",
        dropped_chunk_with_its_own_mean,
        tokens=TOKENS,
    ),
    "padding": Wrong("ignored padding is counted: hidden has a gradient in 1 rows whose target", counted_padding),
    "mean of means": Wrong("a mean of means: each part is divided by its own tokens", mean_of_means, tokens=TOKENS),
    "twice": Wrong("accumulation: all gradients are 2 times the plain ones, as if never set to zero; the value", twice),
    "halved": Wrong("accumulation: all gradients are 1/2 of the plain ones", halved),
    "detached": Wrong("hidden: no gradient at all", detached),
    "float32": Wrong("float32 on the way", in_float32),
    "bfloat16 loss": Wrong("sums in bfloat16: the loss has no digits beyond those of bfloat16", summed_in_bfloat16),
    "bfloat16 weight": Wrong("sums in bfloat16: generator.weight has no digits", weight_summed_in(torch.bfloat16)),
    "float16 weight": Wrong("sums in float16: generator.weight has no digits", weight_summed_in(torch.float16)),
    "deaf": Wrong("the upstream factor is ignored: an eighth of the loss leaves the gradient of hidden, gen",
        deaf("hidden, weight"), ignored=-100),
    "deaf weight": Wrong("the upstream factor is ignored: an eighth of the loss leaves the gradient of generator.w",
        deaf("weight"), ignored=-100),
    "squared": Wrong("the upstream factor is squared: an eighth of the loss has 1/64 of the gradient of", squared),
    "shifted": Wrong("targets shifted by one: each token is held against the next one's target", shifted),
    "shifted back": Wrong("targets shifted by one: each token is held against the target before it", shifted_back),
    "rolled": Wrong("targets shifted by one, and those of the beginning are at the end", rolled),
    "softcap": Wrong("the softcap's derivative is missing", no_softcap_derivative, softcap=True),
    "torch for fairseq": Wrong("the smoothing convention 'torch', where the criterion has 'fairseq'",
        smoothed_as("torch"), "fairseq"),
    "harvard for torch": Wrong("the smoothing convention 'harvard', where the criterion has 'torch'",
        smoothed_as("harvard"), "torch"),
    "fairseq for harvard": Wrong("the smoothing convention 'fairseq', where the criterion has 'harvard'",
        smoothed_as("fairseq"), "harvard"),
    "no smoothing": Wrong("no label smoothing, where the criterion has 0.1", unsmoothed, "fairseq"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_is_caught_its_cause_named_first_and_its_smallest_failure_fails(name):
    wrong = WRONG[name]
    torch.manual_seed(1)
    generator = (Capped if wrong.softcap else nn.Linear)(4, 6, bias=False)
    target = torch.arange(1, 16).reshape(3, 5) ** 2 % 5 + 1
    if wrong.ignored == PADDING:
        target[1, 2] = PADDING
    criterion = nn.CrossEntropyLoss(ignore_index=wrong.ignored, reduction="sum")
    if wrong.smoothing:
        criterion = seqpar.LabelSmoothing(0.1, wrong.smoothing, ignore_index=PADDING)
    hidden, loss, tokens = torch.randn(3, 5, 4), wrong.loss, {"tokens": wrong.tokens}
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, **tokens)
    first, *more = str(caught.value).splitlines()
    assert first.startswith(f"Likely cause: {wrong.cause}")
    assert "is off by" in str(caught.value) or "has shape" in str(caught.value)
    assert more[-2].startswith("Smallest part of these inputs that fails: hidden (")
    with pytest.raises(AssertionError):
        eval(more[-1].strip(), globals(), locals())


def hardly_larger(generator, criterion, hidden, target):
    return criterion(generator(hidden).flatten(0, 1), target.flatten()) * (1 + 5e-13)


def test_the_call_that_is_printed_has_the_tolerance_of_the_one_that_failed():
    torch.manual_seed(1)
    generator, criterion = nn.Linear(4, 6), nn.CrossEntropyLoss(reduction="sum")
    hidden, target, loss = torch.randn(3, 5, 4), torch.randint(6, (3, 5)), hardly_larger
    assert_same_loss(generator, criterion, hidden, target, loss=loss)
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, rtol=1e-13)
    printed = str(caught.value).splitlines()[-1].strip()
    assert printed.endswith("loss=loss, rtol=1e-13)")
    with pytest.raises(AssertionError):
        eval(printed, globals(), locals())


@pytest.mark.parametrize("name", ["twice", "deaf", "squared", "softcap", "bfloat16 weight"])
def test_that_only_the_gradient_is_wrong_is_said(name):
    wrong = WRONG[name]
    torch.manual_seed(1)
    generator = (Capped if wrong.softcap else nn.Linear)(4, 6, bias=False)
    hidden, target = torch.randn(3, 5, 4), torch.arange(15).reshape(3, 5) ** 2 % 5 + 1
    criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=wrong.loss)
    assert str(caught.value).splitlines()[0].endswith(ONLY_THE_GRADIENT)


@pytest.mark.parametrize("tanh", [torch.tanh, torch.Tensor.tanh])
def test_a_missing_softcap_derivative_is_named_in_two_functions_of_ones_own(tanh):
    weight, x = torch.randn(5, 4).double().requires_grad_(), torch.randn(4).double()

    def loss(straight=False):
        z = weight @ x
        capped = tanh(z)
        if straight:
            capped = z + (capped - z).detach()
        return capped.square().sum()

    with pytest.raises(AssertionError, match=r"^Likely cause: the softcap's derivative is missing"):
        assert_same_gradients(lambda: loss(straight=True), loss, {"weight": weight})


@pytest.mark.parametrize("lengths", [[3, 3, 4, 4, 4], [1, 5, 5, 2, 2], [2, 5, 5, 5, 3, 3, 3]])
def test_the_mean_of_the_sentences_means_is_named_where_several_are_equally_long(lengths):
    def mean_of_sentences(generator, criterion, hidden, target):
        sentences = zip(hidden, target, strict=True)
        return sum(plain_loss(generator, criterion, h, t) / (t != PADDING).sum() for h, t in sentences) / len(target)

    torch.manual_seed(0)
    target = torch.arange(1, 6).repeat(len(lengths), 1)
    target[torch.arange(5) >= torch.tensor(lengths)[:, None]] = PADDING
    criterion = nn.CrossEntropyLoss(ignore_index=PADDING, reduction="sum")
    with pytest.raises(AssertionError, match=r"^Likely cause: a mean of means: each part is divided by its own tokens"):
        assert_same_loss(
            nn.Linear(4, 6),
            criterion,
            torch.randn(len(lengths), 5, 4),
            target,
            loss=mean_of_sentences,
            tokens=sum(lengths),
        )


def test_a_part_of_a_step_is_divided_by_its_own_tokens():
    """Not by the whole step's, which would make every loss of a part wrong."""

    def wrong_for_three(generator, criterion, hidden, target):
        counted = (target != PADDING).sum()
        wrong = 1 + (target == 3).sum()
        return plain_loss(generator, criterion, hidden, target) / counted * wrong

    generator, target = nn.Linear(4, 6), torch.tensor([[1, 2, 4], [2, 3, 1]])
    criterion = nn.CrossEntropyLoss(ignore_index=PADDING, reduction="sum")
    with pytest.raises(AssertionError, match=r"target \[\[1, 2\], \[2, 3\]\](.|\n)*tokens=4\)$"):
        assert_same_loss(generator, criterion, torch.randn(2, 3, 4), target, loss=wrong_for_three, tokens=6)


def test_a_loss_that_divides_by_the_steps_tokens_by_itself_is_not_wrong_for_every_part():
    """Its smallest failing part has what is wrong, and not one token fewer because of the count."""

    def wrong_for_three(generator, criterion, hidden, target):
        return plain_loss(generator, criterion, hidden, target) / 6 * (1 + (target == 3).sum())

    generator, target = nn.Linear(4, 6), torch.tensor([[1, 2, 4], [2, 3, 1]])
    criterion = nn.CrossEntropyLoss(ignore_index=PADDING, reduction="sum")
    with pytest.raises(AssertionError, match=r"target \[\[1, 2\], \[2, 3\]\](.|\n)*tokens=4\)$"):
        assert_same_loss(generator, criterion, torch.randn(2, 3, 4), target, loss=wrong_for_three, tokens=6)


STEP = 12
"""Tokens that are not ignored, over both ranks."""


def on_a_rank(rank, world, wrong):
    torch.manual_seed(0)
    generator, criterion = nn.Linear(4, 5).double(), nn.CrossEntropyLoss(reduction="sum")
    hidden, target = torch.randn(2, 8, 4).double()[rank], torch.randint(5, (2, 8))[rank]
    target[: 4 * rank] = -100
    own = [8, 4][rank]
    factors = {
        "right": world / STEP,
        "local": 1 / own,
        "forgot": 1 / STEP,
        "twice": world**2 / STEP,
        "not reduced": world / own,
    }

    def chosen(*given):
        if wrong == "on rank 1 alone":
            given[0].weight.register_hook(lambda grad: dist.all_reduce(grad.clone()) and None)
            # Twice the gradient of this rank's own tokens
            given = *given[:2], given[2] + rank * (given[2] - given[2].detach()), given[3]
        loss = plain_loss(*given) * factors.get(wrong, world / STEP)
        if wrong == "reduced twice" and not given[0].weight._backward_hooks:
            given[0].weight.register_hook(lambda grad: dist.all_reduce(grad := grad.clone()) or grad)
        if wrong == "silent" and rank == 1:
            return loss.detach()
        return loss

    try:
        assert_same_loss(
            generator,
            criterion,
            hidden,
            target,
            loss=None if wrong == "engine" else chosen,
            tokens=STEP,
            group=dist.group.WORLD,
        )
    except AssertionError as error:
        return str(error)
    return ""


def test_ranks_with_the_steps_token_count_are_accepted():
    assert ranks(2, on_a_rank, "right") == ranks(2, on_a_rank, "engine") == ["", ""]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("local", r"the local token count, .*: here 8 of the step's 12 tokens, .* 3/4 times .*, 12 / \(8 x 2 ranks\)"),
        ("not reduced", r"the local token count, without an all-reduce of it: here 8 .* 3/2 times .*, 12 / 8$"),
        ("reduced twice", r"a gradient is reduced twice: that of generator.weight is 2 times"),
        ("silent", r"rank 1 contributes nothing: the gradient of generator.weight is that of the other ranks alone"),
        ("forgot", r"the world size: all gradients are 1/2 times the plain ones, averaged"),
        ("twice", r"the world size: all gradients are 2 times the plain ones, multiplied"),
    ],
)
def test_a_wrong_count_over_ranks_is_named_on_every_rank(wrong, cause):
    first, second = ranks(2, on_a_rank, wrong)
    assert re.match(f"rank 0: Likely cause: {cause}", first.splitlines()[0])
    assert first == second


def test_a_rank_that_looks_for_the_cause_alone_does_not_wait_in_a_hook_for_the_others():
    first, second = ranks(2, on_a_rank, "on rank 1 alone")
    assert first.startswith("rank 1: Likely cause: none of the usual ones")
    assert "the gradient of hidden is off by" in first
    assert first == second


def of_all_ranks(target):
    count = (target != PADDING).sum()
    dist.all_reduce(count)
    return count


def right_in_ranks(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) * dist.get_world_size() / of_all_ranks(target)


def own_mean_in_ranks(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / (target != PADDING).sum().clamp(min=1)


def without_the_world_size(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / of_all_ranks(target)


def otherwise_smoothed_in_ranks(generator, criterion, hidden, target):
    other = seqpar.LabelSmoothing(0.1, "torch", ignore_index=PADDING)
    return right_in_ranks(generator, other, hidden, target)


def raises_in_rank_1(generator, criterion, hidden, target):
    if dist.get_rank() == 1:
        raise KeyError("nobody")
    return plain_loss(generator, criterion, hidden, target)


def whole_batch():
    """Five sentences of three words, of which two are padded, and how many words count."""
    torch.manual_seed(0)
    target = torch.arange(15).reshape(5, 3) % 6 + 1
    target[2:4, 1:] = PADDING
    head = nn.Linear(4, 7), seqpar.LabelSmoothing(0.1, "fairseq", ignore_index=PADDING)
    return *head, torch.randn(5, 3, 4), target


@pytest.mark.unswitched
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("loss", [None, right_in_ranks], ids=["seqpar's", "own"])
def test_one_call_proves_a_loss_over_ranks_with_unequal_tokens(world, loss):
    assert_same_loss(*whole_batch(), loss=loss, ranks=world, tokens=11)


@pytest.mark.unswitched
@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (
            own_mean_in_ranks,
            r"the local token count, .*: here 3 of the step's 11 tokens, and this rank's part of gen",
        ),
        (without_the_world_size, "the world size: all gradients are 1/2 times the plain ones"),
        (otherwise_smoothed_in_ranks, "the smoothing convention 'torch', where the criterion has 'fairseq'"),
    ],
)
def test_one_call_over_ranks_names_the_cause_and_the_smallest_part_that_fails(loss, cause):
    generator, criterion, hidden, target = whole_batch()
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, ranks=2, tokens=11)
    first, *more = str(caught.value).splitlines()
    assert re.match(f"rank 0: Likely cause: {cause}", first)
    assert "the loss is off by" in str(caught.value)
    assert more[-2].startswith("Smallest part of these inputs that fails: hidden (3, 1, 4), target [[")
    assert more[-1].endswith("ranks=2)")
    with pytest.raises(AssertionError, match=cause.split(":")[0]):
        eval(more[-1].strip(), globals(), locals())


@pytest.mark.unswitched
@pytest.mark.usefixtures("impatient_ranks")
def test_an_error_of_a_rank_is_shown_with_its_number():
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*KeyError: 'nobody'"):
        assert_same_loss(*whole_batch(), loss=raises_in_rank_1, ranks=2)


def test_what_cannot_be_proved_over_ranks_is_refused_in_one_line():
    generator, criterion, hidden, target = whole_batch()
    given = generator, criterion, hidden
    with pytest.raises(ValueError, match="group is for a call in every rank, and ranks for one call"):
        assert_same_loss(*given, target, ranks=2, group=object())
    with pytest.raises(ValueError, match="ranks is 1; it must be a whole number of at least 2"):
        assert_same_loss(*given, target, ranks=1)
    with pytest.raises(ValueError, match=r"target has shape \(5, 3\) and ranks is 6; its first dimension"):
        assert_same_loss(*given, target, ranks=6)
    with pytest.raises(ValueError, match="each of 2 ranks has 3 tokens that count, and with equal counts a mean of m"):
        assert_same_loss(generator, criterion, hidden[:2], target[:2], ranks=2)
    with pytest.raises(TypeError, match=r"cannot be sent to the ranks \(.*<lambda>.*\); define it at the top level of"):
        assert_same_loss(*given, target, loss=lambda *given: plain_loss(*given), ranks=2)
