"""Mistakes as users make them in losses of their own: each is found, and its cause says what is known."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import seqpar
from seqpar.testing import assert_same_gradients, assert_same_loss, plain_loss

PAD, VOCAB, CAP = 0, 7, 2.0


def cross_entropy(**settings):
    return nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum", **settings)


class Capped(nn.Linear):
    def forward(self, x):
        return CAP * torch.tanh(super().forward(x) / CAP)


class Clamped(nn.Linear):
    def forward(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return super().forward(x)


class Normalised(nn.Linear):
    def forward(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda g: g / g.norm())
        return super().forward(x)


class NormalisedLoss(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__(ignore_index=PAD, reduction="sum")

    def forward(self, logits, target):
        logits = logits * 1
        if logits.requires_grad:
            logits.register_hook(lambda g: g / g.norm())
        return super().forward(logits, target)


class Annealed(nn.Module):
    """A criterion that smooths less in every call."""

    def __init__(self):
        super().__init__()
        self.ignore_index, self.step = PAD, 1

    def forward(self, logits, target):
        self.step += 1
        return F.cross_entropy(logits, target, ignore_index=PAD, reduction="sum", label_smoothing=0.5 / self.step)


class Buffered(Annealed):
    """The same, which counts in a buffer."""

    def __init__(self):
        super().__init__()
        del self.step
        self.register_buffer("step", torch.tensor(1))


class OfEachClass(Buffered):
    """The same with a count for each class."""

    def __init__(self):
        super().__init__()
        self.step = torch.ones(VOCAB)

    def forward(self, logits, target):
        self.step += 1
        weight = 1 / self.step
        return F.cross_entropy(logits, target, weight.to(logits), ignore_index=PAD, reduction="sum")


class WrittenOut(nn.Module):
    """Label smoothing as a user writes it: eps / (V - 1) for every class but the target."""

    ignore_index = PAD

    def forward(self, logits, target, eps=0.1, others=VOCAB - 1):
        log_p = logits.log_softmax(-1)
        q = torch.full_like(log_p, eps / others).scatter(1, target[:, None], 1 - eps)
        return -(q * log_p).sum(1)[target != PAD].sum()


class Focal(nn.Module):
    ignore_index = PAD

    def forward(self, logits, target):
        log_p = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
        return -((1 - log_p.exp()) ** 2 * log_p)[target != PAD].sum()


def rows(hidden, target, size=4):
    return list(zip(hidden.flatten(0, -2).split(size), target.flatten().split(size), strict=True))


def last_chunk_twice(generator, criterion, hidden, target):
    parts = rows(hidden, target)
    return sum(criterion(generator(h), t) for h, t in [*parts, parts[-1]])


def in_chunks(generator, criterion, hidden, target):
    return sum(criterion(generator(h), t) for h, t in rows(hidden, target))


def second_chunk_three_times(generator, criterion, hidden, target):
    parts = rows(hidden, target)
    return sum(criterion(generator(h), t) for h, t in [*parts, parts[1], parts[1]])


def first_steps_left_out(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden[:, 2:], target[:, 2:])


def minus(*given):
    return -plain_loss(*given)


def unweighted(generator, criterion, hidden, target):
    return plain_loss(generator, cross_entropy(), hidden, target)


def uncapped(generator, criterion, hidden, target):
    return criterion(F.linear(hidden, generator.weight, generator.bias).flatten(0, 1), target.flatten())


def uncapped_mean(*given):
    return uncapped(*given) / 13


def smoothed(eps, **settings):
    def loss(generator, criterion, hidden, target):
        return plain_loss(generator, cross_entropy(label_smoothing=eps, **settings), hidden, target)

    return loss


def smoothed_mean(generator, criterion, hidden, target):
    return plain_loss(generator, seqpar.LabelSmoothing(0.1, "harvard", ignore_index=PAD), hidden, target) / 4


def growing():
    factors = iter(range(1, 99))
    return lambda *given: plain_loss(*given) * next(factors)


def dropping(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, F.dropout(hidden, 0.3), target)


def some_rows_wrong(generator, criterion, hidden, target):
    factor = torch.ones_like(hidden)
    factor[0, 1:3] = 5
    factor[2, 4] = 0
    return plain_loss(generator, criterion, factor * hidden - ((factor - 1) * hidden).detach(), target)


def all_rows_wrong(generator, criterion, hidden, target):
    factor = 2 + torch.arange(hidden.size(1))[:, None] % 2
    return plain_loss(generator, criterion, factor * hidden - ((factor - 1) * hidden).detach(), target)


def unweighted_row(generator, criterion, hidden, target):
    """One token counts whose class has the weight 0; nothing reaches the generator from it."""
    logits = F.linear(hidden, generator.weight.detach()).flatten(0, 1)[target.flatten() == 2]
    return plain_loss(generator, criterion, hidden, target) + F.cross_entropy(logits, target[target == 2])


def doubled_bias(generator, criterion, hidden, target):
    bias = 2 * generator.bias - generator.bias.detach()
    return criterion(F.linear(hidden, generator.weight, bias).flatten(0, 1), target.flatten())


def heated(generator, criterion, hidden, target):
    return criterion(generator(hidden).flatten(0, 1) / 1.3, target.flatten())


def value_alone(*given):
    return plain_loss(*given) + 1


def other_padding(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(reduction="sum"), hidden, target)


def cross_entropy_with(**settings):
    return lambda: cross_entropy(**settings)


WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 3.0, 1.0])
CHANGES = r"the generator or the criterion changes from call to call: criterion.step went from (\d) to \d;"
NOT_LINEAR = "the backward of the generator or the criterion is not linear, .* have an eighth of the gradient of hidden"
MISTAKES = [
    ("a chunk is counted 2 times: the gradient of hidden is 2 times the plain one in its last", last_chunk_twice, {}),
    ("a chunk is counted 3 times: .* 3 times the plain one in its rows 4 to 6, of 15", second_chunk_three_times, {}),
    ("the first chunk is dropped: hidden has no gradient in its first 2 time steps, of", first_steps_left_out, {}),
    ("the wrong sign: all gradients are -1 times", minus, {}),
    ("ignored padding is counted: hidden has a gradient in 1 rows whose target is ignored", other_padding, {}),
    ("the plain cross-entropy with no label smoothing, where the criterion is another one, or has class w",
        unweighted, {"criterion": cross_entropy_with(weight=WEIGHTS)}),
    ("the plain cross-entropy with label smoothing of 0.1 in the convention 'torch', where the criterion is another",
        smoothed(0.1), {"criterion": Focal}),
    ("the smoothing convention 'torch', where the criterion has 'fairseq'$", smoothed(0.1), {"criterion": WrittenOut}),
    ("no label smoothing, where the criterion has 0.1 in the convention 'fairseq'",
        smoothed(0.0), {"criterion": WrittenOut}),
    ("label smoothing of 0.2 in the convention 'torch', where the criterion has 0.1 in the convention 'torch'",
        smoothed(0.2), {"criterion": cross_entropy_with(label_smoothing=0.1)}),
    ("label smoothing of 0.3 in the convention 'torch', where the criterion has no label smoothing$",
        smoothed(0.3), {}),
    ("the smoothing convention 'harvard', where .* 'torch'; besides, all gradients are multiplied by 1/4",
        smoothed_mean, {"criterion": cross_entropy_with(label_smoothing=0.1)}),
    ("the smoothing convention 'harvard', where .* 'torch'; besides, all gradients are multiplied by 7/2",
        smoothed_mean, {"criterion": cross_entropy_with(label_smoothing=0.1), "tokens": 14}),
    ("none of the usual ones; the gradient of hidden is no multiple of the plain one; all others are right",
        all_rows_wrong, {}),
    ("the softcap is missing: tanh is left out$", uncapped, {"generator": Capped}),
    ("the softcap is missing: tanh is left out; besides, all gradients are multiplied by 1/13",
        uncapped_mean, {"generator": Capped}),
    (CHANGES, plain_loss, {"criterion": Annealed}),
    (CHANGES, plain_loss, {"criterion": Buffered}),
    ("the generator or the criterion changes from call to call: criterion.step changed; the plain loss itself is",
        plain_loss, {"criterion": OfEachClass}),
    ("the loss under test changes from call to call: it is .* in one and .* in the next", dropping, {}),
    ("the loss under test changes from call to call: it is .* in one and .* in the next; only the value is wrong$",
        growing(), {}),
    (NOT_LINEAR, last_chunk_twice, {"generator": Clamped}),
    (NOT_LINEAR, in_chunks, {"generator": Normalised}),
    (NOT_LINEAR, in_chunks, {"criterion": NormalisedLoss}),
    ("none of the usual ones; the gradient of hidden is 5 times the plain one in its rows 1 to 2, 0 times the plain "
        "one in its row 14, of 15, and right elsewhere; all others are right; the value is right", some_rows_wrong, {}),
    ("none of the usual ones; the gradient of hidden is not 0, as the plain one is, in its 6 rows, of 15",
        unweighted_row, {"criterion": lambda: cross_entropy(weight=WEIGHTS)}),
    ("none of the usual ones; the gradient of generator.bias is 2 times the plain one; all others are right; the value",
        doubled_bias, {}),
    ("none of the usual ones; the gradient of hidden, generator.weight, generator.bias is no multiple of the plain on",
        heated, {}),
    ("none of the usual ones; all gradients are right, only the value is wrong$", value_alone, {}),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "loss", "given"), MISTAKES)
def test_a_mistake_in_a_loss_of_ones_own_is_found_and_its_cause_says_what_is_known(cause, loss, given):
    torch.manual_seed(1)
    generator, criterion = given.get("generator", nn.Linear)(4, VOCAB), given.get("criterion", cross_entropy)()
    target = torch.arange(1, 16).reshape(3, 5) ** 2 % 5 + 1
    target[1, 2] = PAD
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, torch.randn(3, 5, 4), target, loss=loss, tokens=given.get("tokens", 1))
    assert re.match(f"Likely cause: {cause}", str(caught.value).splitlines()[0]), str(caught.value).splitlines()[0]


@pytest.mark.parametrize("kind", [{"generator": Clamped}, {"generator": Normalised}, {"criterion": NormalisedLoss}])
def test_a_loss_whose_backward_is_not_linear_is_right_where_it_does_the_same(kind):
    """Times 1/8, too, because the plain loss is multiplied before its backward."""
    torch.manual_seed(1)
    generator, criterion = kind.get("generator", nn.Linear)(4, VOCAB), kind.get("criterion", cross_entropy)()
    assert_same_loss(generator, criterion, torch.randn(3, 5, 4), torch.ones(3, 5).long(), loss=plain_loss)


def model(weight, mix, *, embedded=None, reduction="sum", **settings):
    """The loss of a language model whose table of embeddings is its generator, too."""
    source, target = torch.arange(12) % VOCAB, torch.arange(1, 13) % VOCAB
    states = F.linear(F.embedding(source, weight if embedded is None else embedded), mix).tanh()
    return F.cross_entropy(F.linear(states, weight), target, reduction=reduction, **settings)


def once(parameter, times):
    """The parameter itself, with a gradient so many times too large."""
    return times * parameter - (times - 1) * parameter.detach()


NUMBERS = iter(range(2, 99))
OF_A_MODEL = [
    (r"a missed tie: weight is used 2 times, and its gradient is that of use 2 \(linear\) alone;? ?(the value.*)?$",
        lambda w, mix: model(w, mix, embedded=w.detach())),
    (r"a missed tie: .* that of use 2 \(linear\) alone; besides, all gradients are multiplied by 1/12",
        lambda w, mix: model(w, mix, embedded=w.detach(), reduction="mean")),
    (r"a use counted too often: of 2 uses of weight, its gradient has that of use 1 \(embedding\) 2 times",
        lambda w, mix: model(w, mix, embedded=once(w, 2))),
    ("none of the usual ones; the gradient of mix is 3 times the plain one; all others are right",
        lambda w, mix: model(w, once(mix, 3))),
    ("the wrong sign: all gradients are -1 times the plain ones", lambda w, mix: -model(w, mix)),
    ("the wrong sign: all gradients are -1/12 times the plain ones", lambda w, mix: -model(w, mix, reduction="mean")),
    ("none of the usual ones; all gradients are 3/2 times the plain ones", lambda w, mix: 1.5 * model(w, mix)),
    ("label smoothing of 0.1 in the convention 'torch', where the criterion has no label smoothing$",
        lambda w, mix: model(w, mix, label_smoothing=0.1)),
    ("the loss under test changes from call to call: it is ", lambda w, mix: model(w, mix) * next(NUMBERS)),
    ("random numbers, such as those of dropout", lambda w, mix: F.dropout(w, 0.5).sum()),
]  # fmt: skip


@pytest.mark.unswitched
@pytest.mark.parametrize(("cause", "loss"), OF_A_MODEL)
def test_a_mistake_in_a_whole_model_is_found_and_its_cause_says_what_is_known(cause, loss):
    torch.manual_seed(1)
    weight, mix = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (VOCAB, 4))
    plain = model
    if "random" in cause:
        plain = loss
    with pytest.raises(AssertionError) as caught:
        assert_same_gradients(lambda: loss(weight, mix), lambda: plain(weight, mix), {"weight": weight, "mix": mix})
    assert re.match(f"Likely cause: {cause}", str(caught.value).splitlines()[0]), str(caught.value).splitlines()[0]


def of_all_ranks(number):
    number = torch.as_tensor(number)
    dist.all_reduce(number)
    return number


def only_on(generator, criterion, hidden, target, speaking, world=3):
    own = plain_loss(generator, criterion, hidden, target) * world / 11
    return own if dist.get_rank() in speaking else own.detach()


def by_own_positions(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / target.numel()


def by_all_positions(generator, criterion, hidden, target):
    scale = dist.get_world_size() / of_all_ranks(target.numel())
    return plain_loss(generator, criterion, hidden, target) * scale


OVER_RANKS = [
    (3, "ranks 1 and 2 contribute nothing: the gradient of generator.weight is that of the other ranks alone; the v",
        partial(only_on, speaking=[0])),
    (3, "ranks 0 and 2 contribute nothing: ", partial(only_on, speaking=[1])),
    (3, "rank 1 contributes nothing: ", partial(only_on, speaking=[0, 2])),
    (3, "ranks 1 and 2 contribute nothing: .*; besides, all gradients are multiplied by 1/3",
        partial(only_on, speaking=[0], world=1)),
    (2, "the local number of targets, ignored ones counted: here 3 of the step's 15 targets, and this rank's part of ",
        by_own_positions),
    (2, "a mean over all 15 targets, ignored padding counted: all gradients are 11/15 times the plain ones, and only 1",
        by_all_positions),
]  # fmt: skip


@pytest.mark.unswitched
@pytest.mark.parametrize(("world", "cause", "loss"), OVER_RANKS)
def test_a_mistake_over_ranks_is_found_and_its_cause_says_what_is_known(world, cause, loss):
    torch.manual_seed(0)
    target = torch.arange(15).reshape(5, 3) % 6 + 1
    target[2:4, 1:] = PAD
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(
            nn.Linear(4, VOCAB), cross_entropy(), torch.randn(5, 3, 4), target, loss=loss, ranks=world, tokens=11
        )
    assert re.match(f"rank 0: Likely cause: {cause}", str(caught.value).splitlines()[0]), str(
        caught.value
    ).splitlines()[0]
