"""What one rank sends in a step, by layout, for worlds of up to thousands of ranks: counted, without the machines.

    python -m benchmarks.scale                  # the table in docs/scaling.md
    python -m benchmarks.scale --worlds 8 64

torch's fake process group runs one rank's program of any world and moves no data; every other rank is taken to have
the same numbers. The count is of collectives and of the bytes they hold (an all-gather's output, a reduce-scatter's
input), not of time, and says nothing of how a network does them. Each step is the third one: what DDP and FSDP2 set
up in the first two is not counted.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.distributed.vocab_parallel import span_number

BATCH, TIME, WIDTH, VOCAB = 2, 32, 16, 8192
"""Of one rank. The vocabulary is the rows of both weights and a multiple of every world: FSDP2 pads nothing."""

CHUNKS, WORLDS = (1, 4, 16), (8, 64, 512, 4096)

INNER = 8
"""Ranks of a mesh's inner axis: one machine's GPUs."""

NAMES = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "broadcast_": "broadcast",
}


class Sent(NamedTuple):
    """The collectives of one step: kind -> how many, and bytes."""

    collectives: dict[str, int]
    size: int

    @property
    def number(self) -> int:
        """Of all kinds."""
        return sum(self.collectives.values())


class Wire(TorchDispatchMode):
    """Counts the collectives that run inside, and answers for the other ranks, which have what this rank has.

    `rows_of` names the groups that share a vocabulary out: there every rank reports its own, equal part of it.
    """

    def __init__(self, rows_of: dict[ProcessGroup, int] | None = None) -> None:
        super().__init__()
        self.rows_of = rows_of or {}
        self.collectives: Counter[str] = Counter()
        self.size = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*arguments, **(keywords or {}))
        namespace, name = operation._schema.name.split("::")
        if namespace == "c10d":
            self.collectives[NAMES.get(name, name)] += 1
            self.size += max(_bytes(arguments[0]), _bytes(arguments[1]) if len(arguments) > 1 else 0)
            self._answer(name, arguments)
        return result

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "allreduce_":
            for tensor in arguments[0]:
                if tensor.dtype == torch.float64:  # losses and token counts, which are checked; nobody reads the rest
                    tensor.mul_(dist.ProcessGroup.unbox(arguments[1]).size())
        if name == "allgather_":
            group = dist.ProcessGroup.unbox(arguments[2])
            rows = self.rows_of.get(group)
            for rank, theirs in enumerate(arguments[0][0] if rows else []):
                theirs[1] = span_number(rank * rows, (rank + 1) * rows)  # as VocabShard.check asks

    @property
    def sent(self) -> Sent:
        """What ran so far."""
        return Sent(dict(self.collectives), self.size)


def _bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(_bytes(a) for a in argument) if isinstance(argument, (list, tuple)) else 0


class Trunk(nn.Module):
    """The smallest model below the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (batch, time, WIDTH)."""
        return torch.tanh(self.embed(tokens))


class VocabLoss(nn.Module):
    """This rank's rows of the projection, and the loss over the whole vocabulary."""

    def __init__(self, group: ProcessGroup, chunk_tokens: int) -> None:
        super().__init__()
        rows = VOCAB // group.size()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))
        self.vocab = seqpar.VocabShard(group, group.rank() * rows, VOCAB)
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, target: Tensor) -> seqpar.TokenLoss:
        """The summed loss."""
        return seqpar.linear_cross_entropy(
            hidden, self.weight, target, vocab=self.vocab, label_smoothing=0.1, chunk_tokens=self.chunk_tokens
        )


Step = Callable[[], object]


def _whole_head(chunk_tokens: int) -> tuple[seqpar.ModelWithLoss, nn.Linear]:
    generator = nn.Linear(WIDTH, VOCAB, bias=False)
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), chunk_tokens=chunk_tokens)
    return seqpar.ModelWithLoss(Trunk(), engine), generator


def data_parallel(model: nn.Module, group: ProcessGroup) -> DistributedDataParallel:
    """DDP, its all-reduce as it is by default; spelled as a hook, for the fake group's own result is empty."""

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP would want annotations that are no strings
        dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(group, hook)
    return wrapped


def _step(model: nn.Module, group: ProcessGroup | None, reduces: bool = True, time: int = TIME) -> Step:
    """One optimizer step's forward and backward, with the exact division."""
    tokens = torch.randint(VOCAB, (BATCH, time))

    def run() -> seqpar.TokenLoss:
        return seqpar.accumulate_gradients(
            [tokens],
            lambda batch: model(batch, target=batch),
            tokens_of=lambda batch: batch.numel(),
            model=model if reduces else None,
            group=group,
        )

    return run


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _mesh(inner: str) -> tuple[ProcessGroup, ProcessGroup]:
    """The groups of data x `inner` that this rank is in: data, inner."""
    size = min(INNER, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("data", inner))
    return mesh.get_group("data"), mesh.get_group(inner)


def ddp(chunk_tokens: int) -> tuple[Step, Wire]:
    """Every rank has the whole model and its own tokens."""
    both, _ = _whole_head(chunk_tokens)
    return _step(data_parallel(both, _world()), None), Wire()


def fsdp2(chunk_tokens: int, shape: tuple[int, ...] | None = None) -> tuple[Step, Wire]:
    """Every rank has a part of every parameter and its own tokens; the generator is a unit."""
    both, generator = _whole_head(chunk_tokens)
    names = ("replicate", "shard") if shape else ("shard",)
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    fully_shard(generator, mesh=mesh)
    fully_shard(both, mesh=mesh)
    return _step(both, _world()), Wire()


def hsdp(chunk_tokens: int) -> tuple[Step, Wire]:
    """FSDP2 inside a machine, copies of it over machines."""
    inner = min(INNER, dist.get_world_size() // 2)
    return fsdp2(chunk_tokens, (dist.get_world_size() // inner, inner))


def vocab(chunk_tokens: int) -> tuple[Step, Wire]:
    """Every rank has a part of the vocabulary; all have the same tokens."""
    head = VocabLoss(_world(), chunk_tokens)
    both = seqpar.ModelWithLoss(Trunk(), head)
    return _step(both, None, reduces=False), Wire({_world(): len(head.weight)})


def data_x_vocab(chunk_tokens: int) -> tuple[Step, Wire]:
    """The vocabulary split inside a machine, DDP over machines."""
    data, inner = _mesh("vocab")
    head = VocabLoss(inner, chunk_tokens)
    wrapped = data_parallel(seqpar.ModelWithLoss(Trunk(), head), data)
    return _step(wrapped, None), Wire({inner: len(head.weight)})


def data_x_sequence(chunk_tokens: int) -> tuple[Step, Wire]:
    """Time steps split inside a machine, DDP over all ranks; targets across the seams are fetched."""
    _, inner = _mesh("sequence")
    both, _ = _whole_head(chunk_tokens)
    wrapped = data_parallel(both, _world())
    tokens = torch.randint(VOCAB, (BATCH, TIME))

    def run() -> object:
        target = seqpar.next_token_targets(tokens, inner)
        return seqpar.accumulate_gradients(
            [(tokens, target)],
            lambda batch: wrapped(batch[0], target=batch[1]),
            tokens_of=lambda batch: (batch[1] != -100).sum(),
            model=wrapped,
        )

    return run, Wire()


LAYOUTS: dict[str, Callable[[int], tuple[Step, Wire]]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "vocabulary": vocab,
    "data x vocabulary": data_x_vocab,
    "data x sequence": data_x_sequence,
}


class World(AbstractContextManager["World"]):
    """This process as rank 0 of `size` that are not there."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> World:
        dist.init_process_group("fake", rank=0, world_size=self.size, store=FakeStore())
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def count(layout: str, chunks: int) -> Sent:
    """What one rank of the present world sends in a step."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        step, wire = LAYOUTS[layout](BATCH * TIME // chunks)
        with Wire(wire.rows_of):
            step()
            step()
        with wire:
            step()
    return wire.sent


def counts(worlds: tuple[int, ...] = WORLDS, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> dict[str, Any]:
    """layout -> world -> chunks -> what is sent, with keys as JSON has them."""
    found: dict[str, Any] = {layout: {} for layout in layouts}
    for size in worlds:
        with World(size):
            for layout in layouts:
                found[layout][str(size)] = {str(chunks): count(layout, chunks)._asdict() for chunks in CHUNKS}
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: a row per layout and world."""
    chunks = "/".join(str(c) for c in CHUNKS)
    lines = [
        f"| layout | ranks | collectives, {chunks} chunks | KiB, {chunks} chunks | of {CHUNKS[1]} chunks |",
        "|---|---|---|---|---|",
    ]
    for layout, worlds in found.items():
        for size, by_chunks in worlds.items():
            sent = [Sent(**by_chunks[str(c)]) for c in CHUNKS]
            numbers, sizes = (
                " / ".join(x) for x in zip(*((str(s.number), f"{s.size / 1024:.1f}") for s in sent), strict=True)
            )
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(sent[1].collectives.items()))
            lines.append(f"| {layout} | {size} | {numbers} | {sizes} | {kinds} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), help="ranks of each simulated world")
    parser.add_argument("--json", action="store_true", help="the counts, for a program")
    options = parser.parse_args()
    found = counts(tuple(options.worlds))
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
