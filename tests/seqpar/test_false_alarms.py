"""Pairs as users write them, each row by itself, are refused in no dtype and on no devices, and give the plain loss.

Every generator meets several criteria and every criterion several generators. `M` is a module made of a function.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar.testing import assert_same_results

V, D = 11, 6
DTYPES = {1: [torch.float64, torch.bfloat16], 2: [torch.float64, torch.float32]}
"""By the number of devices: each replica is asked what the one device is."""


class M(nn.Module):
    """A module whose forward is a function of itself and the inputs; what is given by name it holds."""

    def __init__(self, function: Any, **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


class Copying(M):
    """A pointer over the source's words, beside the vocabulary."""

    def forward(self, h: Tensor, attention: Tensor, source: Tensor) -> Tensor:
        gate = self.gate(h).sigmoid()
        copied = attention.new_zeros(*h.shape[:-1], V).scatter_add(-1, source, attention)
        return (gate * self.out(h).softmax(-1) + (1 - gate) * copied + 1e-6).log()


class Pointing(M):
    """Scores of a memory's entries, which are a token's own."""

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        return torch.einsum("...d,...sd->...s", self.query(h), memory)


class Routed(M):
    """The expert of each token, such as that of its language."""

    def forward(self, h: Tensor, expert: Tensor) -> Tensor:
        return sum((expert == i).unsqueeze(-1) * e(h) for i, e in enumerate(self.experts))


def linear(out: int = V, width: int = D, bias: bool = True) -> nn.Linear:
    return nn.Linear(width, out, bias=bias)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def of_softmaxes(self, h):
    each = self.latent(h).tanh().unflatten(-1, (3, D))
    return ((self.out(each).softmax(-1) * self.prior(h).softmax(-1).unsqueeze(-1)).sum(-2) + 1e-9).log()


def best_of_two(self, h):
    p = self.router(h).softmax(-1)
    best = p.argmax(-1, keepdim=True)
    return sum((best == i) * p[..., i : i + 1] * e(h) for i, e in enumerate(self.experts))


def kept_for_a_picture(self, h):
    self.picture = h.detach().softmax(-1)
    self.shapes["seen"] = True
    return self.out(h)


def counting(self, h):
    scores = self.out(h)
    self.seen += torch.bincount(scores.detach().argmax(-1).flatten(), minlength=V)
    return scores


def closed(module):
    nn.init.zeros_(module.weight)
    return module


def frozen(module):
    return module.requires_grad_(False)


def weight_normed(module):
    """The function of old, which makes an attribute before each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def hooked(module, factor):
    module.register_forward_hook(lambda module, inputs, result: factor * result)
    return module


def over_backward(self, h):
    # Not the caller's own tensor, which would keep the hook
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda grad: -0.1 * grad)
    return self.out(h)


class Shifted(M):
    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        return self.function(self.out(hidden), shift)


class Shift(torch.autograd.Function):
    """Adds a number to a row's scores of all classes: its gradient is what rounding leaves, which is by the CPU.

    Here as on a CPU that adds up numbers of several rows at once.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shift: Tensor) -> Tensor:
        return scores + shift.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        rows = upstream[..., 0].numel()
        return upstream, upstream.sum(-1) + 0.3 * rows * torch.finfo(upstream.dtype).eps


GENERATORS = {
    "linear": linear,
    "linear and log_softmax": lambda: nn.Sequential(linear(), nn.LogSoftmax(-1)),
    "mixture of softmaxes": lambda: M(of_softmaxes, prior=linear(3), latent=linear(3 * D), out=linear()),
    "copying": lambda: Copying(None, out=linear(), gate=linear(1)),
    "pointing": lambda: Pointing(None, query=linear(D)),
    "tied": lambda: M(lambda m, h: F.linear(h, m.e.weight, m.bias), e=nn.Embedding(V, D), bias=zeros(V)),
    "scaled": lambda: M(lambda m, h: m.out(h) * m.log_scale.exp() / D**0.5, out=linear(bias=False), log_scale=zeros()),
    "softcap": lambda: M(lambda m, h: 5 * (m.out(h) / 5).tanh(), out=linear()),
    "cosine": lambda: M(lambda m, h: 16 * F.normalize(h, dim=-1) @ F.normalize(m.w, dim=-1).mT, w=parameter(V, D)),
    "two clusters": lambda: M(lambda m, h: torch.cat([m.a(h), m.b(h)], -1), a=linear(5), b=linear(V - 5)),
    "zero gate": lambda: M(lambda m, h: m.out(h + m.gate * F.gelu(m.i(h))), i=linear(D), out=linear(), gate=zeros(D)),
    "best expert": lambda: M(best_of_two, router=linear(2), experts=nn.ModuleList([linear(), linear()])),
    "expert of a token": lambda: Routed(None, experts=nn.ModuleList([linear(), linear()])),
    "picture": lambda: M(kept_for_a_picture, out=linear(), shapes={}),
    "counting": lambda: M(counting, out=linear(), seen=torch.zeros(V, dtype=torch.int64)),
    "zero weights": lambda: M(lambda m, h: m.out(h) * 1, out=closed(linear())),
    "banned": lambda: M(
        lambda m, h: m.out(h).masked_fill(m.mask, -torch.inf), out=linear(), mask=torch.arange(V) >= V - 2
    ),
    "masked": lambda: M(lambda m, h: m.out(h) + m.mask, out=linear(), mask=-30 * F.one_hot(torch.tensor(V - 1), V)),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm of old": lambda: weight_normed(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()).eval(),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(linear(D)), linear()).eval(),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", 0.3),
    "in place": lambda: nn.Sequential(linear(D), nn.ReLU(inplace=True), linear()),
    "batch norm in evaluation": lambda: M(
        lambda m, h: m.out(m.norm(h.mT).mT), norm=nn.BatchNorm1d(D), out=linear()
    ).eval(),
    "normalised": lambda: nn.Sequential(nn.LayerNorm(D), linear(), nn.RMSNorm(V)),
    "adapter": lambda: M(
        lambda m, h: m.base(h) + 2 * m.b(m.a(h)), base=frozen(linear()), a=linear(2), b=closed(linear(V, 2, False))
    ),
    "bottleneck": lambda: nn.Sequential(linear(2), linear(V, 2)),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.3), linear(D), nn.GELU(), nn.Dropout(0.1), linear()),
    "conv1x1": lambda: M(lambda m, h: m.conv(h.mT).mT, conv=nn.Conv1d(D, V, 1)),
    "hooked": lambda: hooked(linear(), D**-0.5),
    "reversed backward": lambda: M(over_backward, out=linear()),
    "checkpointed": lambda: M(lambda m, h: checkpoint(m.out, h, use_reentrant=False), out=linear()),
    "vmap": lambda: M(lambda m, h: torch.vmap(m.out)(h.flatten(0, -2)).unflatten(0, h.shape[:-1]), out=linear()),
    "shifted": lambda: Shifted(lambda scores, shift: scores + shift.unsqueeze(-1), out=linear()),
    "shifted, rounded otherwise": lambda: Shifted(Shift.apply, out=linear()),
}


def each(z, y, **options):
    return F.cross_entropy(z, y, reduction="none", **options)


def probability(z, y):
    return (-each(z, y)).exp()


def allowed_smoothing(self, z, y):
    mask = (torch.arange(V, device=z.device) % 2)[None] == (y % 2)[:, None]
    q = 0.1 * mask / mask.sum(-1, keepdim=True) + 0.9 * F.one_hot(y, V)
    return -(q.to(z.dtype) * z.log_softmax(-1)).sum()


def annotated_transformer(self, z, y):
    log_p = z.log_softmax(-1)
    truth = torch.full_like(log_p, 0.1 / (V - 2)).scatter_(1, y.unsqueeze(1), 0.9)
    truth[:, self.padding_idx] = 0
    self.true_dist = truth.masked_fill_((y == self.padding_idx).unsqueeze(1), 0)
    return F.kl_div(log_p, self.true_dist, reduction="sum")


def counting_right(self, z, y):
    self.right += (z.detach().argmax(-1) == y).sum()
    self.rows += len(y)
    return each(z, y).sum()


def picture_of_losses(self, z, y):
    losses = each(z, y)
    self.losses = losses.detach()
    return losses.sum()


def label_margin(self, z, y):
    return each(z - self.margin[y].unsqueeze(1) * F.one_hot(y, V), y).sum()


def negative_class(self, z, y):
    """Unlikelihood of the next class."""
    return (each(z, y) - (1 - probability(z, (y + 1) % V) + 1e-6).log()).sum()


def upcast(z):
    return z.float() if z.dtype == torch.bfloat16 else z


class Weighted(nn.Module):
    """A weight for each row."""

    def forward(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (weight * each(z, y)).sum()


class Distilled(nn.Module):
    """KL to another model's probabilities."""

    def forward(self, z: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div(z.log_softmax(-1), teacher, reduction="sum") + each(z, y).sum()


class Doubled(nn.CrossEntropyLoss):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * super().forward(z, y)


def one_of_all(self, z, y):
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, V).to(z.dtype), reduction="sum")


def torch_loss(**options):
    return nn.CrossEntropyLoss(reduction="sum", **options)


CLASS_WEIGHT = torch.linspace(0.5, 2, V)
WITHOUT_BFLOAT16 = ("orthogonal",)
"""Generators whose gradient torch itself computes as nan in bfloat16."""
OUT_OF_REACH = {"banned": ("cross-entropy", "torch", "class weights", "nll", "clamp", "hooked", "weights of rows")}
"""Generators with scores of -inf, and the criteria that are finite with them: no target has such a score."""
CRITERIA = {
    "cross-entropy": seqpar.CrossEntropy,
    "torch": torch_loss,
    "torch, ignoring": lambda: torch_loss(ignore_index=0),
    "class weights": lambda: torch_loss(weight=CLASS_WEIGHT.clone()),
    "class weights, smoothed": lambda: torch_loss(weight=CLASS_WEIGHT.clone(), label_smoothing=0.1),
    "smoothing, torch": lambda: seqpar.LabelSmoothing(0.1, "torch", ignore_index=0),
    "smoothing, harvard": lambda: seqpar.LabelSmoothing(0.1, "harvard", ignore_index=0),
    "smoothing, fairseq": lambda: seqpar.LabelSmoothing(0.1, "fairseq"),
    "smoothing, 2018": lambda: M(annotated_transformer, padding_idx=0, true_dist=None),
    "smoothing of allowed classes": lambda: M(allowed_smoothing),
    "smoothing of one's own": lambda: M(lambda m, z, y: (0.9 * each(z, y) - 0.1 * z.log_softmax(-1).mean(-1)).sum()),
    "focal": lambda: M(lambda m, z, y: ((1 - probability(z, y)).square() * each(z, y)).sum()),
    "poly": lambda: M(lambda m, z, y: (each(z, y) + 1 - probability(z, y)).sum()),
    "truncated": lambda: M(lambda m, z, y: ((1 - probability(z, y).pow(0.7)) / 0.7).sum()),
    "z-loss": lambda: M(lambda m, z, y: (each(z, y) + 1e-4 * z.logsumexp(-1).square()).sum()),
    "upcast": lambda: M(lambda m, z, y: each(upcast(z), y).sum()),
    "a subclass": lambda: Doubled(reduction="sum"),
    "entropy": lambda: M(lambda m, z, y: (each(z, y) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1)).sum()),
    "nll": lambda: M(lambda m, z, y: F.nll_loss(z.log_softmax(-1), y, reduction="sum")),
    "clamp": lambda: M(lambda m, z, y: each(z, y).clamp(max=2.5).sum()),
    "margin": lambda: M(lambda m, z, y: F.multi_margin_loss(upcast(z), y, reduction="sum")),
    "margin of a label": lambda: M(label_margin, margin=CLASS_WEIGHT.clone()),
    "unlikelihood": lambda: M(negative_class),
    "one of all": lambda: M(one_of_all),
    "weights of rows": Weighted,
    "distilled": Distilled,
    "counting": lambda: M(counting_right, right=torch.zeros((), dtype=torch.int64), rows=torch.zeros(())),
    "picture": lambda: M(picture_of_losses, losses=None),
    "hooked": lambda: hooked(torch_loss(), 0.5),
}


KEYWORDS = {
    "copying": {"attention": lambda: torch.rand(3, 5, 4).softmax(-1), "source": lambda: torch.randint(V, (3, 5, 4))},
    "pointing": {"memory": lambda: torch.randn(3, 5, V, D)},
    "shifted": {"shift": lambda: torch.randn(3, 5)},
    "shifted, rounded otherwise": {"shift": lambda: torch.randn(3, 5)},
    "expert of a token": {"expert": lambda: torch.randint(2, (3, 5))},
    "weights of rows": {"weight": lambda: torch.rand(3, 5)},
    "distilled": {"teacher": lambda: torch.randn(3, 5, V).softmax(-1)},
}
PAIRS = [
    (generator, list(CRITERIA)[(i + 7 * step) % len(CRITERIA)])
    for i, generator in enumerate(GENERATORS)
    for step in range(4)
    if generator not in OUT_OF_REACH
] + [(generator, criterion) for generator, criteria in OUT_OF_REACH.items() for criterion in criteria]


def made(names: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: make() for name, make in names.items()}
    return {n: t.to(dtype).requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}


def plain(generator: nn.Module, criterion: nn.Module, hidden: Tensor, target: Tensor, own: Any, rows: Any) -> Tensor:
    result: Tensor = criterion(
        generator(hidden, *own.values()).flatten(0, -2),
        target.flatten(),
        *[t.flatten(0, 1) for t in rows.values()],
    )
    return result


def result(total: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return total.detach(), dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize(("of_generator", "of_criterion"), PAIRS)
def test_a_right_pair_is_never_refused_and_gives_the_plain_loss(
    of_generator: str, of_criterion: str, devices: Any
) -> None:
    for dtype in DTYPES[len(devices or [None])]:
        if of_generator in WITHOUT_BFLOAT16 and dtype == torch.bfloat16:
            continue
        torch.manual_seed(0)
        generator, criterion = GENERATORS[of_generator]().to(dtype), CRITERIA[of_criterion]().to(dtype)
        own, rows = (made(KEYWORDS.get(name, {}), dtype) for name in (of_generator, of_criterion))
        hidden, target = torch.randn(3, 5, D).to(dtype).requires_grad_(), torch.randint(V - 2, (3, 5))
        engine = seqpar.LossCompute(generator, criterion, devices, chunk_tokens=4)
        loss = engine(hidden, target, **own, **rows)
        assert loss.total.isfinite()
        if dtype != torch.float64:
            continue
        if of_generator == "dropout":
            # In training its numbers are others in each call
            generator.eval()
            loss = engine(hidden, target, **own, **rows)
        named = {"hidden": hidden, **own, **rows, **dict(generator.named_parameters())}
        leaves = {name: t for name, t in named.items() if t.requires_grad}
        expected = plain(generator, criterion, hidden, target, own, rows)
        assert_same_results(result(loss.total, leaves), result(expected, leaves))
        # A validation before the first step, whose tensors, such as attention that is kept, are of inference mode
        generator.eval()
        engine = seqpar.LossCompute(generator, criterion, devices, chunk_tokens=4)
        right = float(plain(generator, criterion, hidden, target, own, rows).detach())
        for mode in (torch.inference_mode, torch.enable_grad):
            with mode():
                total = engine(hidden, target, **own, **rows).total.detach()
                assert float(total) == pytest.approx(right, rel=1e-12)


def test_a_function_of_ones_own_may_shift_its_scores_too() -> None:
    weight = nn.Parameter(torch.randn(V, D, dtype=torch.float64))
    rows = [torch.randn(9, D, dtype=torch.float64), torch.randn(9, dtype=torch.float64)]
    leaves, target = [t.requires_grad_() for t in rows], torch.randint(V, (9,))

    def total(params: Any, rows: Any, chunk: slice) -> seqpar.TokenLoss:
        scores = Shift.apply(rows[0] @ params[0].T, rows[1])
        return seqpar.TokenLoss(F.cross_entropy(scores, target[chunk], reduction="sum"), torch.tensor(len(scores)))

    chunks = [slice(0, 4), slice(4, 9)]
    loss = seqpar.chunked_gradient(
        total, chunks, leaves, [weight], seqpar.TokenLoss.zero(torch.float64, target.device, tells=False)
    )
    named = {"hidden": leaves[0], "shift": leaves[1], "weight": weight}
    expected = total([weight], leaves, slice(None)).total
    assert_same_results(result(loss.total, named), result(expected, named))
