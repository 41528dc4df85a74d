"""The loss over a projection, written out plainly, and cases of it. Nothing here imports seqpar."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.seqpar.published import smoothed_targets


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
    convention = draw(st.sampled_from(["torch", "fairseq", "harvard"]))
    vocab_size = draw(st.integers({"torch": 2, "fairseq": 2, "harvard": 3}[convention], 13))
    lead = draw(st.one_of(st.tuples(st.integers(1, 30)), st.tuples(st.integers(1, 5), st.integers(1, 6))))
    inside = convention == "harvard" or draw(st.booleans())
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


def plain_logits(hidden, weight, bias=None, softcap=None, temperature=1.0) -> Tensor:
    """(N, V), capped, divided by the temperature."""
    logits = hidden.flatten(0, -2) @ weight.t()
    logits = logits if bias is None else logits + bias
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def plain_loss(
    hidden,
    weight,
    target,
    bias=None,
    class_weight=None,
    token_weight=None,
    *,
    ignore_index,
    label_smoothing,
    smoothing_convention,
    z_loss,
    softcap,
    temperature=1.0,
    **_,
) -> Tensor:
    """sum over kept rows of a (sum_k w_k q_k (-log p_k [+ log q_k with harvard]) + z_loss logsumexp(z)^2)."""
    logits, target = plain_logits(hidden, weight, bias, softcap, temperature), target.flatten()
    log_p = torch.log_softmax(logits, -1)
    q = smoothed_targets(target, logits.size(-1), label_smoothing, smoothing_convention, ignore_index)
    terms = -q * log_p
    if smoothing_convention == "harvard":
        terms = terms + torch.special.xlogy(q, q)
    if class_weight is not None:
        terms = terms * class_weight
    rows = terms.sum(-1) + z_loss * torch.logsumexp(logits, -1).square()
    rows = rows if token_weight is None else rows * token_weight.flatten()
    return (rows * (target != ignore_index)).sum()


def on_another_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that says it is on a GPU, and has no numbers; it needs none."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")
