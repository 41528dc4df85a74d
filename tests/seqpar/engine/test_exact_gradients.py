"""The engine's value and every gradient equal the plain un-chunked single-device loss, in float64 within 1e-12."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import seqpar
from seqpar.rows.conventions import CONVENTIONS
from seqpar.testing import assert_same_gradients, plain_loss
from seqpar.testing.strategies import Case, cases
from tests.seqpar.published import Generator2018, LabelSmoothing2018, Smoothing


class Mixture(nn.Module):
    """A mixture of softmaxes (Yang et al. 2018), with one weight used twice: a tie inside the generator."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.gate, self.out = nn.Linear(width, 2), nn.Linear(width, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.stack([self.out(torch.tanh(f(x))).softmax(-1) for f in (self.first, self.second)], -1)
        return (parts * self.gate(x).softmax(-1).unsqueeze(-2)).sum(-1).log()


class Deep(nn.Module):
    """A weight-normed hidden layer in front of a projection without bias."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(width, width + 1))
        self.out = nn.Linear(width + 1, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


class Phases(nn.Module):
    """Complex weights, one of each number of dimensions, whose gradients have imaginary parts."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        shapes = {"weight": (vocab_size, width), "bias": (vocab_size,), "turn": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.complex128)))

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.weight.dtype) @ self.weight.T + self.bias
        return z.abs() + (z * self.turn).real


class Temperature(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.ignore_index = padding
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits * self.scale, target, ignore_index=self.ignore_index, reduction="sum")


GENERATORS = {
    "linear": nn.Linear,
    "no bias": lambda width, vocab_size: nn.Linear(width, vocab_size, bias=False),
    "2018": Generator2018,
    "mixture": Mixture,
    "deep": Deep,
    "complex": Phases,
}
if os.environ.get("SEQPAR_TEST_DEVICE") == "emulated":
    # It has no views of complex tensors, and one generator would skip the tests of all
    del GENERATORS["complex"]


def class_weights(vocab_size: int) -> Tensor:
    return torch.linspace(0.5, 2, vocab_size, dtype=torch.float64)


CRITERIA = {
    "ours": lambda case: seqpar.CrossEntropy(ignore_index=case.padding),
    "torch": lambda case: nn.CrossEntropyLoss(reduction="sum", ignore_index=case.padding),
    "torch, weighted and smoothed": lambda case: nn.CrossEntropyLoss(
        class_weights(case.vocab_size), reduction="sum", ignore_index=case.padding, label_smoothing=0.2
    ),
    "own parameter": lambda case: Temperature(case.padding),
}


def equal_on(case: Case, generator: nn.Module, criterion: nn.Module, reference: nn.Module, frozen: str, spread: str):
    """Holds the engine against the plain loss, through a trunk, so that the one backward is part of the claim."""
    torch.manual_seed(case.seed)
    target, trunk = case.targets(), nn.Linear(case.width, case.width).double()
    generator, criterion, reference = generator.double(), criterion.double(), reference.double()
    trunk.requires_grad_("trunk" not in frozen)
    generator.requires_grad_("head" not in frozen)
    if frozen == "a bias":
        [p.requires_grad_(False) for n, p in generator.named_parameters() if n.endswith("bias")]
    x = case.hidden()
    engine = seqpar.LossCompute(
        generator, criterion, case.device_list(), chunk_tokens=case.chunk_tokens, chunk_size=case.chunk_size
    )

    def candidate() -> Tensor:
        hidden = torch.tanh(trunk(x))
        if spread == "scattered":
            hidden = seqpar.scatter(hidden, case.device_list() or ["cpu"])
        return engine(hidden, target).total * case.upstream

    def plain() -> Tensor:
        return plain_loss(generator, reference, torch.tanh(trunk(x)), target) * case.upstream

    shared = {} if reference is not criterion else {f"criterion.{n}": p for n, p in criterion.named_parameters()}
    named = {f"generator.{n}": p for n, p in generator.named_parameters()}
    assert_same_gradients(candidate, plain, {f"trunk.{n}": p for n, p in trunk.named_parameters()} | named | shared)


FROZEN = st.sampled_from(["nothing", "trunk", "head", "trunk and head", "a bias"])
SPREAD = st.sampled_from(["whole", "scattered"])


@given(cases(), st.sampled_from(sorted(GENERATORS)), st.sampled_from(sorted(CRITERIA)), FROZEN, SPREAD)
def test_any_generator_and_criterion_have_the_plain_gradient(case, generator, criterion, frozen, spread):
    torch.manual_seed(case.seed)
    made = CRITERIA[criterion](case)
    equal_on(case, GENERATORS[generator](case.width, case.vocab_size), made, made, frozen, spread)


@pytest.mark.parametrize("convention", CONVENTIONS)
@settings(max_examples=1 + settings.default.max_examples // 3)  # of each of three conventions
@given(data=st.data(), eps=st.sampled_from([0.0, 0.1, 0.9]), frozen=FROZEN, spread=SPREAD)
def test_smoothing_has_the_gradient_of_its_published_formula(convention, data, eps, frozen, spread):
    case = data.draw(cases(padding_is_a_class=not CONVENTIONS[convention].padding))
    torch.manual_seed(case.seed)
    generator = data.draw(st.sampled_from(sorted(GENERATORS)))
    criterion = seqpar.LabelSmoothing(eps, convention, ignore_index=case.padding)
    reference = Smoothing(eps, convention, case.padding)
    equal_on(case, GENERATORS[generator](case.width, case.vocab_size), criterion, reference, frozen, spread)


@given(cases(padding_is_a_class=True), st.sampled_from([0.0, 0.1, 0.4]), FROZEN)
def test_the_2018_generator_and_criterion_have_the_plain_gradient(case, eps, frozen):
    torch.manual_seed(case.seed)
    criterion = LabelSmoothing2018(case.vocab_size, case.padding, eps)
    equal_on(case, Generator2018(case.width, case.vocab_size), criterion, criterion, frozen, "whole")


@given(cases(), st.booleans())
def test_a_tied_embedding_gets_both_its_gradients(case, frozen):
    """Embedding and generator share one weight; its gradient is the sum of both uses."""
    torch.manual_seed(case.seed)
    embed = nn.Embedding(case.vocab_size, case.width).double()
    generator = nn.Linear(case.width, case.vocab_size).double()
    generator.weight = embed.weight
    embed.weight.requires_grad_(not frozen)
    target, tokens = case.targets(), torch.randint(case.vocab_size, (case.batch, case.time))
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=case.padding)
    engine = seqpar.LossCompute(generator, criterion, case.device_list(), case.chunk_tokens, case.chunk_size)
    assert_same_gradients(
        lambda: engine(embed(tokens).tanh(), target).total * case.upstream,
        lambda: plain_loss(generator, criterion, embed(tokens).tanh(), target) * case.upstream,
        dict(generator.named_parameters()),
    )


class CopyGenerator(nn.Module):
    """A pointer generator (See et al. 2017): part of the probability is copied from the source by attention."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.out, self.gate, self.vocab_size = nn.Linear(width, vocab_size), nn.Linear(width, 1), vocab_size

    def forward(self, hidden: Tensor, attention: Tensor, source: Tensor, teacher: Tensor | None = None) -> Tensor:
        gate = torch.sigmoid(self.gate(hidden if teacher is None else hidden + teacher))
        copied = hidden.new_zeros(*hidden.shape[:-1], self.vocab_size).scatter_add(-1, source, attention)
        return (gate * self.out(hidden).softmax(-1) + (1 - gate) * copied + 1e-3).log()


@given(cases(), st.integers(1, 4), st.booleans())
def test_per_token_keywords_are_scattered_chunked_and_differentiated(case, source_length, with_teacher):
    torch.manual_seed(case.seed)
    generator = CopyGenerator(case.width, case.vocab_size).double()
    scores = torch.randn(case.batch, case.time, source_length, dtype=torch.float64, requires_grad=True)
    source = torch.randint(case.vocab_size, (case.batch, 1, source_length)).expand_as(scores)
    hidden, target = case.hidden().requires_grad_(), case.targets()
    teacher = torch.randn_like(hidden) if with_teacher else None
    criterion = nn.NLLLoss(reduction="sum", ignore_index=case.padding)
    engine = seqpar.LossCompute(generator, criterion, case.device_list(), case.chunk_tokens, case.chunk_size)
    extra = {"source": source, "teacher": teacher}
    assert_same_gradients(
        lambda: engine(hidden, target, attention=scores.softmax(-1), **extra).total * case.upstream,
        lambda: plain_loss(generator, criterion, hidden, target, attention=scores.softmax(-1), **extra) * case.upstream,
        {"hidden": hidden, "scores": scores, **dict(generator.named_parameters())},
    )


@given(st.lists(cases(max_devices=3), min_size=1, max_size=4), st.integers(0, 99))
def test_accumulated_micro_batches_have_the_gradient_of_one_batch(micro_batches, seed):
    """One division by the tokens of all of them; the losses have different sizes, padding, chunks and devices."""
    torch.manual_seed(seed)
    generator = nn.Linear(4, 14).double()
    data = [(torch.randn(c.batch, c.time, 4, dtype=torch.float64), c.targets(), c) for c in micro_batches]
    parts = [(h, t.where(t != c.padding, -100), c) for h, t, c in data]
    tokens = max(1, sum(int((t != -100).sum()) for _, t, _ in parts))
    criterion = seqpar.LabelSmoothing(0.1, "torch")

    def accumulated() -> Tensor:
        value = torch.zeros((), dtype=torch.float64)
        for hidden, target, case in parts:
            engine = seqpar.LossCompute(generator, criterion, case.device_list(), case.chunk_tokens, case.chunk_size)
            loss = engine(hidden, target).total / tokens
            loss.backward()
            value += loss.detach()
        return value.requires_grad_()  # its own backward adds nothing: the gradients are there already

    def plain() -> Tensor:
        hidden = torch.cat([h.flatten(0, 1) for h, _, _ in parts])
        target = torch.cat([t.flatten() for _, t, _ in parts])
        return nn.functional.cross_entropy(generator(hidden), target, label_smoothing=0.1, reduction="sum") / tokens

    assert_same_gradients(accumulated, plain, dict(generator.named_parameters()))


@given(cases(), st.booleans())
def test_counts_are_those_of_the_plain_predictions(case, grad):
    torch.manual_seed(case.seed)
    generator, hidden, target = nn.Linear(case.width, case.vocab_size).double(), case.hidden(), case.targets()
    criterion = seqpar.LabelSmoothing(0.3, "torch", ignore_index=case.padding)
    engine = seqpar.LossCompute(generator, criterion, case.device_list(), case.chunk_tokens, case.chunk_size)
    with torch.set_grad_enabled(grad):
        loss = engine(hidden, target)
    kept, logits = target != case.padding, generator(hidden)
    nll = nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=case.padding, reduction="sum"
    )
    assert loss.total.requires_grad == grad
    assert loss.tokens == kept.sum()
    assert loss.correct == ((logits.argmax(-1) == target) & kept).sum()
    assert loss.nll is not None
    assert not loss.nll.requires_grad
    torch.testing.assert_close(loss.nll, nll.detach(), rtol=1e-12, atol=1e-13)


class OwnForward(nn.Linear):
    """A projection that has no closed form."""

    def forward(self, x):
        return super().forward(x)


def errors(kind, devices):
    """Of weight and bias in bfloat16 over these devices, relative to float64."""
    torch.manual_seed(0)
    generator = kind(64, 500).bfloat16()
    hidden = torch.randn(512, 64).bfloat16()
    target = torch.randint(500, (512,))
    wide = [p.detach().double().requires_grad_() for p in generator.parameters()]
    nn.functional.cross_entropy(nn.functional.linear(hidden.double(), *wide), target, reduction="sum").backward()
    engine = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices)
    engine(hidden, target).total.backward()
    pairs = zip(generator.parameters(), wide, strict=True)
    return [float((p.grad.double() - w.grad).norm() / w.grad.norm()) for p, w in pairs]


@pytest.mark.parametrize("kind", [nn.Linear, OwnForward])
def test_in_bfloat16_the_gradient_of_eight_devices_is_as_precise_as_that_of_two(kind):
    """Rounded on each device first, it would be off by 4.1e-3 instead of 2.6e-3."""
    for of_eight, of_two in zip(errors(kind, ["cpu"] * 8), errors(kind, ["cpu"] * 2), strict=True):
        assert of_eight < 1.1 * of_two


@pytest.mark.parametrize("kind", [nn.Linear, OwnForward])
def test_a_device_list_without_tokens_for_a_device_and_a_scale_on_another_has_the_plain_gradient(kind):
    generator = kind(3, 7).double()
    hidden = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100])
    leaves = [hidden, *generator.parameters()]
    plain = nn.functional.cross_entropy(nn.functional.linear(*leaves[:2], leaves[2]), target, reduction="sum")
    expected = torch.autograd.grad(plain * 0.3, leaves)
    engine = seqpar.LossCompute(generator, nn.CrossEntropyLoss(reduction="sum"), ["cpu"] * 4)
    scale = torch.tensor(0.5, dtype=torch.float64)
    found = torch.autograd.grad(engine(hidden, target, loss_scale=scale).total * 0.3, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [nn.Linear, OwnForward])
def test_the_gradients_of_hidden_and_of_the_parameters_may_be_asked_for_one_after_the_other(kind):
    generator = kind(3, 7).double()
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randint(7, (5,))
    parameters = list(generator.parameters())
    plain = nn.functional.cross_entropy(nn.functional.linear(hidden, *parameters), target, reduction="sum")
    expected = torch.autograd.grad(plain, [hidden, *parameters])
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), ["cpu"] * 3)(hidden, target).total
    of_hidden = torch.autograd.grad(loss, hidden, retain_graph=True)
    of_parameters = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(of_hidden + of_parameters, expected, rtol=1e-12, atol=1e-15)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(loss, parameters)
