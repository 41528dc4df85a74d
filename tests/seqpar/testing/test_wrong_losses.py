"""Wrong losses, as users and engines make them: each is run for real and caught, and its cause says what is known."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqpar
from seqpar.testing import assert_same_gradients, assert_same_loss, plain_loss
from tests.backward import with_gradient

PAD, VOCAB, CAP = 0, 7, 2.0
TOKENS = 14
"""Targets that are not ignored."""
WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 3.0, 1.0])


def cross_entropy(**settings):
    return nn.CrossEntropyLoss(**({"ignore_index": PAD, "reduction": "sum"} | settings))


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


def of_logits(logits, criterion, target):
    return criterion(logits.flatten(0, -2), target.flatten())


def scored(generator, hidden):
    """The logits without what a subclass of nn.Linear does besides."""
    return F.linear(hidden, generator.weight, generator.bias)


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


class NarrowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *losses):
        return sum((loss.bfloat16() for loss in losses), start=torch.zeros((), dtype=torch.bfloat16)).double()

    @staticmethod
    def backward(ctx, upstream):
        return (upstream,) * len(ctx.needs_input_grad)


def weight_summed_in(dtype):
    def loss(generator, criterion, hidden, target):
        logits = F.linear(
            hidden, with_gradient(generator.weight, lambda upstream: upstream.to(dtype).double()), generator.bias
        )
        return of_logits(logits, criterion, target)

    return loss


def times(factor):
    return lambda *given: plain_loss(*given) * factor


def mean(generator, criterion, hidden, target):
    return plain_loss(generator, nn.CrossEntropyLoss(ignore_index=criterion.ignore_index), hidden, target)


def mean_of_all_rows(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target) / target.numel()


def twice(generator, criterion, hidden, target):
    loss = plain_loss(generator, criterion, hidden, target)
    loss.backward(retain_graph=True)
    return loss


def in_float32(generator, criterion, hidden, target):
    logits = F.linear(hidden.float(), generator.weight.float(), generator.bias.float())
    return of_logits(logits, criterion, target).double()


def chunks(generator, criterion, hidden, target, numbers=range(4)):
    """The losses of these chunks of four rows, and how many of each count."""
    pieces = [*zip(hidden.flatten(0, -2).split(4), target.flatten().split(4), strict=True)]
    there = [pieces[number] for number in numbers if number < len(pieces)]
    return [(criterion(generator(h), t), (t != PAD).sum()) for h, t in there]


def of_chunks(*numbers):
    return lambda *given: sum(loss for loss, _ in chunks(*given, numbers=numbers))


in_chunks = of_chunks(0, 1, 2, 3)


def mean_of_means(*given):
    means = [loss / count for loss, count in chunks(*given)]
    return sum(means) / len(means)


def dropped_chunk_with_its_own_mean(*given):
    kept = chunks(*given, numbers=range(3))
    return sum(loss for loss, _ in kept) / sum(count for _, count in kept)


def summed_in_bfloat16(*given):
    return NarrowSum.apply(*(loss for loss, _ in chunks(*given)))


def of_steps(hidden_steps, target_steps=None):
    """The loss of these time steps, held against those targets."""

    def loss(generator, criterion, hidden, target):
        return plain_loss(generator, criterion, hidden[:, hidden_steps], target[:, target_steps or hidden_steps])

    return loss


def rolled(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden, target.roll(1, -1))


def by(criterion):
    """The loss by another criterion."""
    return lambda generator, _, hidden, target: plain_loss(generator, criterion, hidden, target)


def smoothed(convention, eps=0.1):
    return by(seqpar.LabelSmoothing(eps, convention, ignore_index=PAD))


def smoothed_mean(*given):
    return smoothed("harvard")(*given) / 4


def uncapped(generator, criterion, hidden, target):
    return of_logits(scored(generator, hidden), criterion, target)


def uncapped_mean(*given):
    return uncapped(*given) / 13


def no_softcap_derivative(generator, criterion, hidden, target):
    z = scored(generator, hidden)
    return of_logits(z + (CAP * torch.tanh(z / CAP) - z).detach(), criterion, target)


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
    return of_logits(F.linear(hidden, generator.weight, bias), criterion, target)


def heated(generator, criterion, hidden, target):
    return of_logits(generator(hidden) / 1.3, criterion, target)


def detached(generator, criterion, hidden, target):
    return plain_loss(generator, criterion, hidden.detach(), target)


class Wrong(NamedTuple):
    """A wrong loss."""

    cause: str
    loss: Any
    generator: Any = nn.Linear
    criterion: Any = cross_entropy
    tokens: int = 1
    padded: bool = True
    """Whether one target is ignored."""


UNIGNORED = {"criterion": partial(cross_entropy, ignore_index=-100), "padded": False}
NO_BIAS = partial(nn.Linear, bias=False)
ONE_TENTH = partial(cross_entropy, label_smoothing=0.1)
WEIGHTED = partial(cross_entropy, weight=WEIGHTS)


def stated(convention):
    """A criterion that says itself how it smooths."""
    return lambda: seqpar.LabelSmoothing(0.1, convention, ignore_index=PAD)


ONLY_THE_GRADIENT = ".*; the value is right, only the gradient is wrong$"
NONE = "none of the usual ones; "
CHANGES = r"the generator or the criterion changes from call to call: criterion.step went from (\d) to \d;"
NOT_LINEAR = "the backward of the generator or the criterion is not linear, .* have an eighth of the gradient of hidden"
WRONG = [
    Wrong("a mean instead of a sum: all gradients are 1/14 times the plain ones, and 14 targets are not", mean),
    Wrong("a mean over all 15 targets, ignored padding counted: all gradients", mean_of_all_rows),
    Wrong("the last chunk is dropped: hidden has no gradient in its last 3 rows, of 15, and the right",
        of_chunks(0, 1, 2)),
    Wrong("the last chunk is dropped: hidden has no gradient in its last 1 time steps", of_steps(slice(4))),
    Wrong("the first chunk is dropped: hidden has no gradient in its first 2 time steps, of", of_steps(slice(2, None))),
    Wrong("a chunk in the middle is skipped: hidden has no gradient in its rows 4 to 6, of 15,", of_chunks(0, 2, 3)),
    Wrong("the last chunk is dropped: hidden has no gradient in its last 3 rows, of 15, and 14/11 times the plain one",
        dropped_chunk_with_its_own_mean, tokens=TOKENS),
    Wrong("a chunk is counted 2 times: the gradient of hidden is 2 times the plain one in its last",
        of_chunks(0, 1, 2, 3, 3)),
    Wrong("a chunk is counted 3 times: .* 3 times the plain one in its rows 4 to 6, of 15",
        of_chunks(0, 1, 1, 1, 2, 3)),
    Wrong("ignored padding is counted: hidden has a gradient in 1 rows whose target is ignored",
        by(nn.CrossEntropyLoss(reduction="sum"))),
    Wrong("a mean of means: each part is divided by its own tokens", mean_of_means, tokens=TOKENS),
    Wrong(f"accumulation: all gradients are 2 times the plain ones, as if never set to zero{ONLY_THE_GRADIENT}", twice),
    Wrong("accumulation: all gradients are 1/2 of the plain ones", times(1 / 2)),
    Wrong("the wrong sign: all gradients are -1 times", times(-1)),
    Wrong("hidden: no gradient at all", detached),
    Wrong("float32 on the way", in_float32),
    Wrong("sums in bfloat16: the loss has no digits beyond those of bfloat16", summed_in_bfloat16),
    Wrong(f"sums in bfloat16: generator.weight has no digits{ONLY_THE_GRADIENT}", weight_summed_in(torch.bfloat16)),
    Wrong("sums in float16: generator.weight has no digits", weight_summed_in(torch.float16)),
    Wrong("the upstream factor is ignored: an eighth of the loss leaves the gradient of hidden, gen"
        f"{ONLY_THE_GRADIENT}", deaf("hidden, weight"), NO_BIAS, **UNIGNORED),
    Wrong("the upstream factor is ignored: an eighth of the loss leaves the gradient of generator.w",
        deaf("weight"), NO_BIAS, **UNIGNORED),
    Wrong(f"the upstream factor is squared: an eighth of the loss has 1/64 of the gradient of{ONLY_THE_GRADIENT}",
        lambda *given: with_gradient(plain_loss(*given), torch.square)),
    Wrong("targets shifted by one: each token is held against the next one's target",
        of_steps(slice(-1), slice(1, None))),
    Wrong("targets shifted by one: each token is held against the target before it",
        of_steps(slice(1, None), slice(-1))),
    Wrong("targets shifted by one, and those of the beginning are at the end", rolled),
    Wrong(f"the softcap's derivative is missing{ONLY_THE_GRADIENT}", no_softcap_derivative, Capped),
    Wrong("the softcap is missing: tanh is left out$", uncapped, Capped),
    Wrong("the softcap is missing: tanh is left out; besides, all gradients are multiplied by 1/13",
        uncapped_mean, Capped),
    Wrong("the smoothing convention 'torch', where the criterion has 'fairseq'",
        smoothed("torch"), criterion=stated("fairseq")),
    Wrong("the smoothing convention 'harvard', where the criterion has 'torch'",
        smoothed("harvard"), criterion=stated("torch")),
    Wrong("the smoothing convention 'fairseq', where the criterion has 'harvard'",
        smoothed("fairseq"), criterion=stated("harvard")),
    Wrong("the smoothing convention 'torch', where the criterion has 'fairseq'$",
        smoothed("torch"), criterion=WrittenOut),
    Wrong("no label smoothing, where the criterion has 0.1", by(cross_entropy()), criterion=stated("fairseq")),
    Wrong("no label smoothing, where the criterion has 0.1 in the convention 'fairseq'",
        by(cross_entropy()), criterion=WrittenOut),
    Wrong("label smoothing of 0.2 in the convention 'torch', where the criterion has 0.1 in the convention 'torch'",
        smoothed("torch", 0.2), criterion=ONE_TENTH),
    Wrong("label smoothing of 0.3 in the convention 'torch', where the criterion has no label smoothing$",
        smoothed("torch", 0.3)),
    Wrong("the smoothing convention 'harvard', where .* 'torch'; besides, all gradients are multiplied by 1/4",
        smoothed_mean, criterion=ONE_TENTH),
    Wrong("the smoothing convention 'harvard', where .* 'torch'; besides, all gradients are multiplied by 7/2",
        smoothed_mean, criterion=ONE_TENTH, tokens=TOKENS),
    Wrong("the plain cross-entropy with no label smoothing, where the criterion is another one, or has class w",
        by(cross_entropy()), criterion=WEIGHTED),
    Wrong("the plain cross-entropy with label smoothing of 0.1 in the convention 'torch', where the criterion is "
        "another", smoothed("torch"), criterion=Focal),
    Wrong(CHANGES, plain_loss, criterion=Annealed),
    Wrong(CHANGES, plain_loss, criterion=Buffered),
    Wrong("the generator or the criterion changes from call to call: criterion.step changed; the plain loss itself is",
        plain_loss, criterion=OfEachClass),
    Wrong("the loss under test changes from call to call: it is .* in one and .* in the next", dropping),
    Wrong("the loss under test changes from call to call: it is .* in one and .* in the next; only the value is wrong$",
        growing()),
    Wrong(NOT_LINEAR, of_chunks(0, 1, 2, 3, 3), Clamped),
    Wrong(NOT_LINEAR, in_chunks, Normalised),
    Wrong(NOT_LINEAR, in_chunks, criterion=NormalisedLoss),
    Wrong(f"{NONE}the gradient of hidden is no multiple of the plain one; all others are right", all_rows_wrong),
    Wrong(f"{NONE}the gradient of hidden is 5 times the plain one in its rows 1 to 2, 0 times the plain one in its row "
        "14, of 15, and right elsewhere; all others are right; the value is right", some_rows_wrong),
    Wrong(f"{NONE}the gradient of hidden is not 0, as the plain one is, in its 6 rows, of 15",
        unweighted_row, criterion=WEIGHTED),
    Wrong(f"{NONE}the gradient of generator.bias is 2 times the plain one; all others are right; the value",
        doubled_bias),
    Wrong(f"{NONE}the gradient of hidden, generator.weight, generator.bias is no multiple of the plain on", heated),
    Wrong(f"{NONE}all gradients are right, only the value is wrong$", lambda *given: plain_loss(*given) + 1),
]  # fmt: skip


def tensors(padded=True):
    """Hidden states of three sentences of five tokens, and targets of which one may be ignored."""
    target = torch.arange(1, 16).reshape(3, 5) ** 2 % 5 + 1
    if padded:
        target[1, 2] = PAD
    return torch.randn(3, 5, 4), target


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.cause[:70])
def test_a_wrong_loss_is_caught_its_cause_named_first_and_its_smallest_failure_fails(wrong):
    torch.manual_seed(1)
    generator, criterion = wrong.generator(4, VOCAB), wrong.criterion()
    hidden, target = tensors(wrong.padded)
    loss = wrong.loss
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, tokens=wrong.tokens)
    first, *more = str(caught.value).splitlines()
    assert re.match(f"Likely cause: {wrong.cause}", first), first
    assert "is off by" in str(caught.value) or "has shape" in str(caught.value)
    assert more[-2].startswith("Smallest part of these inputs that fails: hidden (")
    with pytest.raises(AssertionError):
        eval(more[-1].strip(), globals(), locals())


@pytest.mark.parametrize("kind", [{"generator": Clamped}, {"generator": Normalised}, {"criterion": NormalisedLoss}])
def test_a_loss_whose_backward_is_not_linear_is_right_where_it_does_the_same(kind):
    """Times 1/8, too, because the plain loss is multiplied before its backward."""
    torch.manual_seed(1)
    generator, criterion = kind.get("generator", nn.Linear)(4, VOCAB), kind.get("criterion", cross_entropy)()
    assert_same_loss(generator, criterion, torch.randn(3, 5, 4), torch.ones(3, 5).long(), loss=plain_loss)


def hardly_larger(*given):
    return plain_loss(*given) * (1 + 5e-13)


def test_the_call_that_is_printed_has_the_tolerance_of_the_one_that_failed():
    torch.manual_seed(1)
    generator, criterion, loss = nn.Linear(4, VOCAB), cross_entropy(), hardly_larger
    hidden, target = tensors()
    assert_same_loss(generator, criterion, hidden, target, loss=loss)
    with pytest.raises(AssertionError) as caught:
        assert_same_loss(generator, criterion, hidden, target, loss=loss, rtol=1e-13)
    printed = str(caught.value).splitlines()[-1].strip()
    assert printed.endswith("loss=loss, rtol=1e-13)")
    with pytest.raises(AssertionError):
        eval(printed, globals(), locals())


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
        return sum(plain_loss(generator, criterion, h, t) / (t != PAD).sum() for h, t in sentences) / len(target)

    torch.manual_seed(0)
    target = torch.arange(1, 6).repeat(len(lengths), 1)
    target[torch.arange(5) >= torch.tensor(lengths)[:, None]] = PAD
    given = nn.Linear(4, 6), cross_entropy(), torch.randn(len(lengths), 5, 4), target
    with pytest.raises(AssertionError, match=r"^Likely cause: a mean of means: each part is divided by its own tokens"):
        assert_same_loss(*given, loss=mean_of_sentences, tokens=sum(lengths))


@pytest.mark.parametrize("of_the_part", [True, False])
def test_a_part_of_a_step_is_divided_by_its_own_tokens_unless_the_loss_divides_by_the_steps(of_the_part):
    """Otherwise every loss of a part would be wrong; the smallest failing part has the class that is."""

    def wrong_for_three(generator, criterion, hidden, target):
        counted = (target != PAD).sum() if of_the_part else 6
        return plain_loss(generator, criterion, hidden, target) / counted * (1 + (target == 3).sum())

    generator, target = nn.Linear(4, 6), torch.tensor([[1, 2, 4], [2, 3, 1]])
    with pytest.raises(AssertionError, match=r"target \[\[1, 2\], \[2, 3\]\](.|\n)*tokens=4\)$"):
        assert_same_loss(generator, cross_entropy(), torch.randn(2, 3, 4), target, loss=wrong_for_three, tokens=6)


def model(weight, mix, *, embedded=None, projected=None, reduction="sum", **settings):
    """The loss of a language model whose table of embeddings is its generator, too."""
    source, target = torch.arange(12) % VOCAB, torch.arange(1, 13) % VOCAB
    states = F.linear(F.embedding(source, weight if embedded is None else embedded), mix).tanh()
    logits = F.linear(states, weight if projected is None else projected)
    return F.cross_entropy(logits, target, reduction=reduction, **settings)


def once(parameter, times):
    """The parameter itself, with a gradient so many times too large."""
    return times * parameter - (times - 1) * parameter.detach()


NUMBERS = iter(range(2, 99))
OF_A_MODEL = [
    (r"a missed tie: weight is used 2 times, and its gradient is that of use 2 \(linear\) alone;? ?(the value.*)?$",
        lambda w, mix: model(w, mix, embedded=w.detach())),
    (r"a missed tie: .* that of use 2 \(linear\) alone; besides, all gradients are multiplied by 1/12",
        lambda w, mix: model(w, mix, embedded=w.detach(), reduction="mean")),
    (r"a missed tie: .* that of use 1 \(embedding\) alone", lambda w, mix: model(w, mix, projected=w.detach())),
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
    ("random numbers, such as those of dropout .* the plain loss itself is .* in another",
        lambda w, mix: F.dropout(w, 0.5).sum()),
]  # fmt: skip


@pytest.mark.unswitched
@pytest.mark.parametrize(("cause", "loss"), OF_A_MODEL)
def test_a_mistake_in_a_whole_model_is_found_and_its_cause_says_what_is_known(cause, loss):
    torch.manual_seed(1)
    weight, mix = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (VOCAB, 4))
    plain = loss if "random" in cause else model
    with pytest.raises(AssertionError) as caught:
        assert_same_gradients(lambda: loss(weight, mix), lambda: plain(weight, mix), {"weight": weight, "mix": mix})
    first = str(caught.value).splitlines()[0]
    assert re.match(f"Likely cause: {cause}", first), first
