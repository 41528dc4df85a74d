"""Small losses drawn for several ranks, the plain one-device answer, and what runs them in a rank.

Everything here is picklable; ranks return values, names and gradients, and the parent compares.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.distributed.collectives import sum_from_group
from seqpar.testing import assert_same_results
from tests.seqpar.published import Smoothing, smoothed_targets

Answer = tuple[float, dict[str, Tensor | None]]
"""A rank's loss (the sum over all ranks) and gradients by name."""


@dataclass(frozen=True)
class Case:
    """One training step: each rank's micro-batches, a model, a criterion."""

    sizes: tuple[tuple[tuple[int, int], ...], ...]
    """Per rank, per micro-batch: (batch, time); time may be 0."""
    empty: tuple[int, ...]
    """Ranks whose targets are all ignored."""
    vocab_size: int
    width: int
    head: str
    criterion: str
    frozen: str
    chunk_tokens: int | None
    padding_share: float
    factor: float
    seed: int

    @property
    def padding(self) -> int:
        """The ignored target."""
        return 1 if CRITERIA[self.criterion].convention == "harvard" else -100

    @property
    def tied(self) -> bool:
        """The generator's weight is the embedding's."""
        return self.head.startswith("tied")

    @property
    def bias(self) -> bool:
        """The generator has one."""
        return self.head in ("bias", "tied, bias")

    def micro_batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """A rank's (tokens, target) pairs."""
        made = []
        for i, size in enumerate(self.sizes[rank]):
            generator = torch.Generator().manual_seed(self.seed + 97 * rank + i)
            tokens, target = torch.randint(self.vocab_size, (2, *size), generator=generator)
            target = target.where(target != self.padding, 0)
            share = 1.0 if rank in self.empty else self.padding_share
            made.append((tokens, target.where(torch.rand(size, generator=generator) >= share, self.padding)))
        return made


class WeightedSmoothing(Smoothing):
    """-sum w q log p; with harvard each class's whole term of the KL divergence is weighted."""

    def __init__(self, eps: float, convention: str, padding: int, weight: Tensor) -> None:
        super().__init__(eps, convention, padding)
        self.padding_idx = padding
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        q = smoothed_targets(target, logits.size(-1), self.eps, self.convention, self.padding)
        terms = -q * torch.log_softmax(logits, -1)
        if self.convention == "harvard":
            terms = terms + torch.special.xlogy(q, q)
        return ((terms * self.weight).sum(-1) * (target != self.padding)).sum()


@dataclass(frozen=True)
class Criterion:
    """How much smoothing, by which convention, and whether classes have weights."""

    eps: float = 0.0
    convention: str = "torch"
    weighted: bool = False

    def weight(self, case: Case) -> Tensor | None:
        """(V,), no two alike."""
        return torch.linspace(0.5, 2, case.vocab_size, dtype=torch.float64) if self.weighted else None

    def plain(self, case: Case) -> nn.Module:
        """torch's own, or the published equation where torch has none."""
        weight = self.weight(case)
        if self.convention == "torch":
            return nn.CrossEntropyLoss(weight, label_smoothing=self.eps, reduction="sum")
        if weight is None:
            return Smoothing(self.eps, self.convention, case.padding)
        return WeightedSmoothing(self.eps, self.convention, case.padding, weight)

    def module(self, case: Case) -> nn.Module:
        """What the engine is given: a criterion of seqpar, or one of the user's."""
        if self.weighted:
            return self.plain(case)
        if not self.eps:
            return seqpar.CrossEntropy()
        return seqpar.LabelSmoothing(self.eps, self.convention, ignore_index=case.padding)  # type: ignore[arg-type]

    def options(self, case: Case) -> dict[str, Any]:
        """The keywords of `linear_cross_entropy`; class weights are those of the whole vocabulary."""
        return {
            "ignore_index": case.padding,
            "label_smoothing": self.eps,
            "smoothing_convention": self.convention,
            "class_weight": self.weight(case),
            "chunk_tokens": case.chunk_tokens,
        }


CRITERIA = {
    "ours": Criterion(),
    "torch": Criterion(0.1, "torch"),
    "fairseq": Criterion(0.2, "fairseq"),
    "harvard": Criterion(0.1, "harvard"),
    "class weights": Criterion(weighted=True),
    "class weights, torch": Criterion(0.2, "torch", weighted=True),
    "class weights, fairseq": Criterion(0.1, "fairseq", weighted=True),
    "class weights, harvard": Criterion(0.2, "harvard", weighted=True),
}
HEADS, FROZEN = ("bias", "no bias", "tied", "tied, bias"), ("nothing", "head", "trunk", "bias")


class Model(nn.Module):
    """A decoder in small: embedding, positions where they are given, a mixing layer; every token alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab_size, case.width)
        self.mix = nn.Linear(case.width, case.width)
        self.generator = nn.Linear(case.width, case.vocab_size, bias=case.bias)
        if case.tied:
            self.generator.weight = self.embed.weight
        if case.frozen == "head":
            self.generator.requires_grad_(False)
        if case.frozen == "trunk":
            self.mix.requires_grad_(False)
            self.embed.requires_grad_(case.tied)
        if case.frozen == "bias" and case.bias:
            self.generator.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        return torch.tanh(self.mix(x if positions is None else x + torch.sin(positions.double()).unsqueeze(-1)))


def build(case: Case) -> seqpar.ModelWithLoss:
    """The same weights wherever it is called."""
    torch.manual_seed(case.seed)
    model = Model(case).double()
    engine = seqpar.LossCompute(model.generator, CRITERIA[case.criterion].module(case), chunk_tokens=case.chunk_tokens)
    return seqpar.ModelWithLoss(model, engine)


class SplitEmbedding(nn.Module):
    """Rows of other ranks are 0; the sum over the group is the embedding."""

    def __init__(self, weight: nn.Parameter, vocab: seqpar.VocabShard) -> None:
        super().__init__()
        self.weight, self.vocab = weight, vocab

    def forward(self, tokens: Tensor) -> Tensor:
        local, rows = tokens - self.vocab.start, len(self.weight)
        owned = (local >= 0) & (local < rows)
        padded = torch.cat([self.weight, self.weight.new_zeros(1, self.weight.size(1))])
        return sum_from_group(F.embedding(local.where(owned, rows), padded), self.vocab.group)


class SplitLoss(nn.Module):
    """`linear_cross_entropy` of the rows that are here, in an engine's place."""

    def __init__(self, generator: nn.Module, vocab: seqpar.VocabShard, options: dict[str, Any]) -> None:
        super().__init__()
        self.generator, self.vocab, self.options = generator, vocab, options

    def forward(self, hidden: Tensor, target: Tensor) -> seqpar.TokenLoss:
        weight, bias = self.generator.weight, self.generator.bias
        return seqpar.linear_cross_entropy(hidden, weight, target, bias=bias, vocab=self.vocab, **self.options)


def build_split(case: Case, vocab: seqpar.VocabShard, rows: int, own_class_weights: bool) -> seqpar.ModelWithLoss:
    """What `build` makes, with this rank's rows of the generator, and of the embedding where it is tied."""
    model, here = build(case).model, slice(vocab.start, vocab.start + rows)
    generator: Any = model.generator
    for name, whole in list(generator.named_parameters()):
        setattr(generator, name, nn.Parameter(whole.detach()[here].clone(), whole.requires_grad))
    if case.tied:
        model.embed = SplitEmbedding(generator.weight, vocab)
    options = CRITERIA[case.criterion].options(case)
    if own_class_weights and options["class_weight"] is not None:
        options["class_weight"] = options["class_weight"][here]
    return seqpar.ModelWithLoss(model, SplitLoss(generator, vocab, options))


def reference(case: Case, batches: list[tuple[Any, ...]] | None = None) -> Answer:
    """The plain, un-chunked loss of all ranks' tokens as one batch, divided once."""
    both = build(case)
    model, criterion = both.model, CRITERIA[case.criterion].plain(case)
    if batches is None:
        batches = [b for rank in range(len(case.sizes)) for b in case.micro_batches(rank)]
    hidden = torch.cat([model(*inputs).flatten(0, 1) for *inputs, _ in batches])
    target = torch.cat([target.flatten() for *_, target in batches])
    total = criterion(model.generator(hidden), target)
    tokens = max(1, int((target != case.padding).sum()))
    (total * case.factor / tokens).backward()
    zero = {n: torch.zeros_like(p) if p.requires_grad else None for n, p in both.named_parameters()}
    return float(total.detach()), {n: p.grad if p.grad is not None else zero[n] for n, p in both.named_parameters()}


def assert_answers(answers: list[Answer], expected: Answer) -> None:
    """Every rank has the loss and every gradient of the single device, in float64 within 1e-12."""
    plain = torch.tensor(expected[0], dtype=torch.float64), expected[1]
    for rank, (total, gradients) in enumerate(answers):
        for name, grad in expected[1].items():
            got = gradients[name]
            assert (got is None) == (grad is None), f"rank {rank}: {name} has gradient {got}, expected {grad}"
        try:
            assert_same_results((torch.tensor(total, dtype=torch.float64), gradients), plain)
        except AssertionError as error:
            error.add_note(f"on rank {rank}")
            raise


def gradients_of(both: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, whole, under the name it has in the unwrapped module."""
    whole = {}
    for name, p in both.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        whole[name.removeprefix("module.")] = None if grad is None else grad.clone()
    return whole


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    """The ranks of the pool as a mesh; made once per shape, in every rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


def shard(
    both: seqpar.ModelWithLoss, units: str = "", where: DeviceMesh | None = None, **options: Any
) -> seqpar.ModelWithLoss:
    """`fully_shard` on the named children of the model ("a+b": as one unit), then on the whole."""
    where = where or mesh(dist.get_world_size())
    for unit in units.split():
        parts = [getattr(both.model, name) for name in unit.split("+")]
        fully_shard(parts if len(parts) > 1 else parts[0], mesh=where, **options)
    return fully_shard(both, mesh=where, **options)


@contextlib.contextmanager
def torch_may_warn() -> Iterator[None]:
    """FSDP2 says of any nn.Linear that is a unit that its output is a view."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


def wrap(both: seqpar.ModelWithLoss, layout: str, **options: Any) -> Any:
    """The module a trainer would call."""
    if layout == "ddp":
        return DistributedDataParallel(both, **options)
    tied = both.model.generator.weight is both.model.embed.weight
    if layout == "fsdp2":
        return shard(both, "mix", **options)
    if layout == "fsdp2, head a unit":
        return shard(both, "mix" if tied else "mix generator", **options)
    if layout == "fsdp2, head in a shared unit":
        return shard(both, "embed+mix+generator" if tied else "mix+generator", **options)
    if layout == "hsdp":
        return shard(both, "mix", mesh(2, dist.get_world_size() // 2), **options)
    raise ValueError(layout)


SMALL = Case((((2, 3),), ((3, 5),)), (), 7, 4, "tied", "torch", "nothing", 2, 0.3, 1.0, 5)
"""Two ranks with 6 and 15 targets, a tied head."""


class TwoLayers(nn.Module):
    """A model of two units with its loss, the sum of its squared outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(3, 3).double()
        self.above = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> seqpar.TokenLoss:
        return seqpar.TokenLoss(self.above(self.below(x)).square().sum(), torch.tensor(len(x)))


def rows_of(rank: int) -> Tensor:
    """(rank + 1, 3): as many tokens as no other rank has."""
    return torch.randn(rank + 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def assert_two_layers(members: Iterable[int], answers: Iterable[dict[str, Tensor | None]], frozen: str = "") -> None:
    """These gradients of TwoLayers are those of the mean over the tokens of these ranks."""
    model = TwoLayers()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    model(torch.cat([rows_of(rank) for rank in members])).mean.backward()
    for gradients in answers:
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-12, atol=1e-14)


class PlainLoss(nn.Module):
    """The un-chunked loss, in an engine's place."""

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, hidden: Tensor, target: Tensor) -> seqpar.TokenLoss:
        logits, target = self.generator(hidden).flatten(0, 1), target.flatten()
        return seqpar.TokenLoss(F.cross_entropy(logits, target, reduction="sum"), (target != -100).sum())


def step(wrapped: Any, case: Case, rank: int, world: int) -> float:
    """The two lines of ModelWithLoss's docstring, with an upstream factor; the loss of all ranks."""
    ((tokens, target),) = case.micro_batches(rank)
    return differentiated(wrapped(tokens, target=target), world, case.factor)


def differentiated(loss: seqpar.TokenLoss, world: int, factor: float = 1.0) -> float:
    """The loss of all ranks, after a backward through the step's mean, of which a wrapper takes the ranks' mean."""
    count = seqpar.group_sum(loss.tokens, dist.group.WORLD).clamp(min=1)
    (loss.total * factor * world / count).backward()
    return float(seqpar.sum_over_ranks(loss, dist.group.WORLD).total)


def accumulate(both: Any, case: Case, rank: int, **options: Any) -> seqpar.TokenLoss:
    """The step of a rank's micro-batches by `accumulate_gradients`, with its upstream factor."""
    given: dict[str, Any] = {"backward": lambda loss: (loss * case.factor).backward()}
    return seqpar.accumulate_gradients(
        iter(case.micro_batches(rank)), lambda m: both(m[0], target=m[1]), count_tokens(case), **(given | options)
    )


def watch_buckets(wrapped: DistributedDataParallel) -> list[int]:
    """A list that grows by a bucket's number whenever DDP reduces it."""
    buckets: list[int] = []

    # Without annotations, which torch reads and which are strings here
    def hook(state, bucket):
        buckets.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    wrapped.register_comm_hook(None, hook)
    return buckets


def message(function: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    """The class and the text of the error that a call raises."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Communication(TorchDispatchMode):
    """Counts collectives by the name of torch's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.calls[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def count_tokens(case: Case) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """What `accumulate_gradients` asks for."""
    return lambda micro_batch: (micro_batch[-1] != case.padding).sum()


@st.composite
def cases(draw: st.DrawFn, world: int, micro_batches: tuple[int, int] = (1, 1), longest: int = 5) -> Case:
    """Cases of at most 4 x `longest` tokens a micro-batch, and at least one micro-batch."""
    size = st.tuples(st.integers(1, 4), st.integers(0, longest))
    least, most = micro_batches
    sizes = draw(st.lists(st.lists(size, min_size=least, max_size=most), min_size=world, max_size=world))
    if not any(sizes):
        sizes[draw(st.integers(0, world - 1))] = [(draw(st.integers(1, 4)), draw(st.integers(1, longest)))]
    seed = draw(st.integers(0, 2**16))
    # Dealt, not drawn: hypothesis makes most examples from parts of earlier ones, and 150 drawn ones miss some options
    deal = random.Random(f"{sizes} {seed}").choice
    some = sorted({(0,), (world - 1,), tuple(range(world))})
    return Case(
        sizes=tuple(tuple(s) for s in sizes),
        empty=deal([()] * 8 + some),
        vocab_size=draw(st.integers(3, 9)),
        width=draw(st.integers(1, 4)),
        head=deal(HEADS),
        criterion=deal(list(CRITERIA)),
        frozen=deal(FROZEN),
        chunk_tokens=deal([None, 1, 2, 5, 50]),
        padding_share=deal([0.0, 0.3, 0.8]),
        factor=deal([1.0, 1 / 7, -3.0, 1e4, 1.0, 1 / 7, -3.0, 1e4, 0.0]),
        seed=seed,
    )
