"""Cases of the loss over a projection, and the plain loss and logits of `seqpar.testing` to compare them with."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from seqpar.rows.conventions import CONVENTIONS
from seqpar.testing.plain_reference import plain_linear_cross_entropy, plain_logits

__all__ = ["LinearCase", "linear_cases", "on_another_device", "plain_logits", "plain_loss"]


@dataclass(frozen=True)
class LinearCase:
    """One loss to compute; `tensors` draws its inputs."""

    lead: tuple[int, ...]
    width: int
    vocab_size: int
    padding: int
    padding_share: float
    bias: bool
    weighted: bool
    eps: float
    convention: str
    z_loss: float
    softcap: float | None
    temperature: float
    token_weighted: bool
    loss_scale: float
    coarse: bool
    """Whether hidden and weight are small whole numbers, so that logits tie."""
    chunk_tokens: int | None
    upstream: float
    frozen: frozenset[str]
    seed: int

    def tensors(self) -> dict[str, Tensor]:
        """hidden, weight, bias and token_weight as float64 leaves, class_weight and target."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            drawn = torch.randn(shape, dtype=torch.float64, generator=random)
            return drawn.round() if self.coarse else drawn

        target = torch.randint(self.vocab_size, self.lead, generator=random)
        if 0 <= self.padding < self.vocab_size:
            target = target.where(target != self.padding, (self.padding + 1) % self.vocab_size)
        target = target.where(torch.rand(self.lead, generator=random) >= self.padding_share, self.padding)
        made = {"hidden": normal(*self.lead, self.width), "weight": normal(self.vocab_size, self.width)}
        if self.bias:
            made["bias"] = normal(self.vocab_size)
        if self.token_weighted:
            made["token_weight"] = normal(*self.lead)
        for name, tensor in made.items():
            tensor.requires_grad_(name not in self.frozen)
        if self.weighted:
            made["class_weight"] = torch.rand(self.vocab_size, dtype=torch.float64, generator=random) + 0.1
        return made | {"target": target}

    @property
    def options(self) -> dict:
        """The keywords of `linear_cross_entropy` that are no tensors."""
        return {
            "ignore_index": self.padding,
            "label_smoothing": self.eps,
            "smoothing_convention": self.convention,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "temperature": self.temperature,
            "loss_scale": self.loss_scale,
            "chunk_tokens": self.chunk_tokens,
        }


@st.composite
def linear_cases(draw: st.DrawFn) -> LinearCase:
    """At most 30 rows, 2..13 classes, every option on and off."""
    convention = draw(st.sampled_from([*CONVENTIONS]))
    excludes = not CONVENTIONS[convention].padding
    vocab_size = draw(st.integers(3 if excludes else 2, 13))
    lead = draw(st.one_of(st.tuples(st.integers(1, 30)), st.tuples(st.integers(1, 5), st.integers(1, 6))))
    inside = excludes or draw(st.booleans())
    return LinearCase(
        lead=lead,
        width=draw(st.integers(1, 6)),
        vocab_size=vocab_size,
        padding=draw(st.integers(0, vocab_size - 1)) if inside else -100,
        padding_share=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        bias=draw(st.booleans()),
        weighted=draw(st.booleans()),
        eps=draw(st.sampled_from([0.0, 0.1, 0.9])),
        convention=convention,
        z_loss=draw(st.sampled_from([0.0, 1e-4, 0.5])),
        softcap=draw(st.sampled_from([None, None, 30.0, 0.7])),
        temperature=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        token_weighted=draw(st.booleans()),
        loss_scale=draw(st.sampled_from([1.0, 1.0, 2.0**16, 1 / 7])),
        coarse=draw(st.booleans()),
        chunk_tokens=draw(st.sampled_from([None, 1, 2, 3, 7, 100])),
        upstream=draw(st.sampled_from([1.0, 1 / 7, -3.0, 0.0, 1e4])),
        frozen=draw(st.frozensets(st.sampled_from(["hidden", "weight", "bias", "token_weight"]), max_size=3)),
        seed=draw(st.integers(0, 2**16)),
    )


def plain_loss(
    hidden,
    weight,
    target,
    bias=None,
    class_weight=None,
    token_weight=None,
    *,
    loss_scale=1.0,
    chunk_tokens=None,
    **options,
) -> Tensor:
    """The plain loss, which has neither a scale nor chunks."""
    return plain_linear_cross_entropy(hidden, weight, target, bias, class_weight, token_weight, **options)


def on_another_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that says it is on a GPU, and has no numbers; it needs none."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


def small(rows=12, width=4, vocab_size=9, dtype=torch.float64):
    torch.manual_seed(3)
    hidden, weight = (torch.randn(n, width, dtype=dtype, requires_grad=True) for n in (rows, vocab_size))
    return hidden, weight, torch.randint(vocab_size, (rows,))


def errors(loss, inputs, truth):
    """Relative distance of loss and gradients from the float64 truth."""
    got = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, truth, strict=False)]
