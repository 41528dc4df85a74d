"""Small losses drawn for several ranks, the plain one-device answer, and what runs them in a rank.

Everything here is picklable; ranks return values, names and gradients, and the parent compares.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.testing import assert_same_results
from tests.seqpar.published import Smoothing

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
        return 1 if self.criterion == "harvard" else -100

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


CRITERIA: dict[str, tuple[Callable[[Case], nn.Module], Callable[[Case], nn.Module] | None]] = {
    "ours": (lambda c: seqpar.CrossEntropy(), lambda c: nn.CrossEntropyLoss(reduction="sum")),
    "class weights": (
        lambda c: nn.CrossEntropyLoss(torch.linspace(0.5, 2, c.vocab_size, dtype=torch.float64), reduction="sum"),
        None,
    ),
    "torch": (lambda c: seqpar.LabelSmoothing(0.1, "torch"), lambda c: Smoothing(0.1, "torch", -100)),
    "fairseq": (lambda c: seqpar.LabelSmoothing(0.2, "fairseq"), lambda c: Smoothing(0.2, "fairseq", -100)),
    "harvard": (
        lambda c: seqpar.LabelSmoothing(0.1, "harvard", ignore_index=1),
        lambda c: Smoothing(0.1, "harvard", 1),
    ),
}
HEADS, FROZEN = ("bias", "no bias", "tied"), ("nothing", "head", "trunk", "bias")


class Model(nn.Module):
    """A decoder in small: embedding, positions where they are given, a mixing layer; every token alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab_size, case.width)
        self.mix = nn.Linear(case.width, case.width)
        self.generator = nn.Linear(case.width, case.vocab_size, bias=case.head == "bias")
        if case.head == "tied":
            self.generator.weight = self.embed.weight
        if case.frozen == "head":
            self.generator.requires_grad_(False)
        if case.frozen == "trunk":
            self.mix.requires_grad_(False)
        if case.frozen == "bias" and case.head == "bias":
            self.generator.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        return torch.tanh(self.mix(x if positions is None else x + torch.sin(positions.double()).unsqueeze(-1)))


def build(case: Case) -> seqpar.ModelWithLoss:
    """The same weights wherever it is called."""
    torch.manual_seed(case.seed)
    model = Model(case).double()
    engine = seqpar.LossCompute(model.generator, CRITERIA[case.criterion][0](case), chunk_tokens=case.chunk_tokens)
    return seqpar.ModelWithLoss(model, engine)


def reference(case: Case, batches: list[tuple[Any, ...]] | None = None) -> Answer:
    """The plain, un-chunked loss of all ranks' tokens as one batch, divided once."""
    both = build(case)
    model, ours_and_plain = both.model, CRITERIA[case.criterion]
    criterion = (ours_and_plain[1] or ours_and_plain[0])(case)
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
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(both: seqpar.ModelWithLoss, units: str = "", shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    """`fully_shard` on the named children of the model ("a+b": as one unit), then on the whole."""
    where = mesh(*(shape or (dist.get_world_size(),)))
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
    if layout == "fsdp2":
        return shard(both, "mix")
    if layout == "fsdp2, head a unit":
        tied = both.model.generator.weight is both.model.embed.weight
        return shard(both, "mix" if tied else "mix generator")
    if layout == "fsdp2, head in a shared unit":
        tied = both.model.generator.weight is both.model.embed.weight
        return shard(both, "embed+mix+generator" if tied else "mix+generator")
    if layout == "hsdp":
        return shard(both, "mix", (2, dist.get_world_size() // 2))
    raise ValueError(layout)


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
def cases(draw: st.DrawFn, world: int, micro_batches: tuple[int, int] = (1, 1), rectangular: bool = False) -> Case:
    """Cases of at most 4 x 5 tokens a micro-batch; `rectangular`: one size for all."""
    size = st.tuples(st.integers(1, 4), st.integers(0 if not rectangular else 1, 5))
    criterion = draw(st.sampled_from(sorted(CRITERIA)))
    if rectangular:
        sizes: Any = [[draw(st.tuples(st.integers(1, 3), st.integers(1, 11)))]] * world
    else:
        least, most = micro_batches
        sizes = draw(st.lists(st.lists(size, min_size=least, max_size=most), min_size=world, max_size=world))
        if not any(sizes):
            sizes[draw(st.integers(0, world - 1))] = [draw(size)]
    return Case(
        sizes=tuple(tuple(s) for s in sizes),
        empty=draw(st.sampled_from([(), (), (0,), (world - 1,), tuple(range(world))])),
        vocab_size=draw(st.integers(3, 9)),
        width=draw(st.integers(1, 4)),
        head=draw(st.sampled_from(HEADS)),
        criterion=criterion,
        frozen=draw(st.sampled_from(FROZEN)),
        chunk_tokens=draw(st.sampled_from([None, 1, 2, 5, 50])),
        padding_share=draw(st.sampled_from([0.0, 0.3, 0.8])),
        factor=draw(st.sampled_from([1.0, 1 / 7, -3.0, 0.0, 1e4])),
        seed=draw(st.integers(0, 2**16)),
    )
