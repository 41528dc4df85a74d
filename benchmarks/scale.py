"""Count what one rank sends in a step, by layout, for worlds of up to thousands of ranks, without the machines.

    python -m benchmarks.scale                  # the collectives and bytes of each layout
    python -m benchmarks.scale --worlds 8 64

torch's fake process group runs one rank's program of any world and moves no data; every other rank is assumed to have
the same numbers. Collectives are counted, and the bytes they hold (an all-gather's output, a reduce-scatter's input).
That is no measure of time, and tells nothing about how a network carries them out. Each step is the third one: what DDP
and FSDP2 set up in the first two is not counted.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from seqpar.markdown_table import markdown_table

BATCH = 2
"""Sentences of one rank."""
TIME = 32
WIDTH = 16
VOCAB_SIZE = 8192
"""Rows of both weights; a multiple of every world, so that FSDP2 pads nothing."""

CHUNKS = (1, 4, 16)
WORLDS = (8, 64, 512, 4096)

INNER = 8
"""Ranks of a mesh's inner axis: the GPUs of one machine."""

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
    """Hold the collectives of one step, by kind, and their bytes."""

    collectives: dict[str, int]
    size: int


class Wire(TorchDispatchMode):
    """Count the collectives that run inside, and answer for the other ranks, which have what this rank has.

    Args:
        rows_of: the groups over which a vocabulary is split, with the rows of each rank's equal shard.
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
            self.size += max(_bytes(argument) for argument in arguments[:2])
            self._answer(name, arguments)
        return result

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "allreduce_":
            for tensor in arguments[0]:
                if tensor.dtype == torch.float64:  # losses and token counts, which are checked; no one reads the rest
                    tensor.mul_(dist.ProcessGroup.unbox(arguments[1]).size())
        if name == "allgather_":
            group = dist.ProcessGroup.unbox(arguments[2])
            if group in self.rows_of:
                rows = self.rows_of[group]
                for rank, theirs in enumerate(arguments[0][0]):
                    # The bounds of that rank's shard, which VocabShard checks
                    theirs[1] = span_number(rank * rows, (rank + 1) * rows)

    @property
    def sent(self) -> Sent:
        """Return what has run so far."""
        return Sent(dict(self.collectives), self.size)


def _bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    if isinstance(argument, (list, tuple)):
        return sum(_bytes(each) for each in argument)
    return 0


class Trunk(nn.Module):
    """The smallest model below the projection: an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states (batch, time, WIDTH)."""
        return torch.tanh(self.embed(tokens))


class VocabLoss(nn.Module):
    """Hold this rank's rows of the projection, and compute the loss over the whole vocabulary."""

    def __init__(self, group: ProcessGroup, chunk_tokens: int) -> None:
        super().__init__()
        rows = VOCAB_SIZE // group.size()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))
        self.vocab = seqpar.VocabShard(group, group.rank() * rows, VOCAB_SIZE)
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, target: Tensor) -> seqpar.TokenLoss:
        """Return the summed loss."""
        return seqpar.linear_cross_entropy(
            hidden, self.weight, target, vocab=self.vocab, label_smoothing=0.1, chunk_tokens=self.chunk_tokens
        )


Step = Callable[[], object]


def _whole_head(chunk_tokens: int) -> tuple[seqpar.ModelWithLoss, nn.Linear]:
    generator = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), chunk_tokens=chunk_tokens)
    return seqpar.ModelWithLoss(Trunk(), engine), generator


def data_parallel(model: nn.Module, group: ProcessGroup) -> DistributedDataParallel:
    """Wrap in DDP with its default all-reduce, written as a hook because the fake group's own result is empty."""

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(group, hook)
    return wrapped


def _step(model: nn.Module, group: ProcessGroup | None, reduces: bool = True, time: int = TIME) -> Step:
    """Return one optimizer step's forward and backward, with the exact division."""
    tokens = torch.randint(VOCAB_SIZE, (BATCH, time))

    def run() -> seqpar.TokenLoss:
        return seqpar.accumulate_gradients(
            [tokens],
            lambda batch: model(batch, target=batch),
            tokens_of=lambda batch: batch.numel(),
            model=model if reduces else None,
            group=group if reduces else seqpar.THIS_PROCESS,
        )

    return run


def _world() -> ProcessGroup:
    return init_device_mesh("cpu", (dist.get_world_size(),)).get_group()


def _mesh(inner: str) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the two groups that this rank is in on a mesh of data x `inner`."""
    size = min(INNER, dist.get_world_size() // 2)
    # Neighbouring ranks are on one machine, so the axis that communicates most is the inner one
    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("data", inner))
    return mesh.get_group("data"), mesh.get_group(inner)


def ddp(chunk_tokens: int) -> tuple[Step, Wire]:
    """Give every rank the whole model and its own tokens."""
    both, _ = _whole_head(chunk_tokens)
    return _step(data_parallel(both, _world()), None), Wire()


def fsdp2(chunk_tokens: int, shape: tuple[int, ...] | None = None) -> tuple[Step, Wire]:
    """Give every rank a shard of every parameter and its own tokens; the generator is a unit of its own."""
    both, generator = _whole_head(chunk_tokens)
    names = ("replicate", "shard") if shape else ("shard",)
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    fully_shard(generator, mesh=mesh)
    fully_shard(both, mesh=mesh)
    return _step(both, _world()), Wire()


def hsdp(chunk_tokens: int) -> tuple[Step, Wire]:
    """Shard with FSDP2 inside a machine and replicate over machines."""
    inner = min(INNER, dist.get_world_size() // 2)
    return fsdp2(chunk_tokens, (dist.get_world_size() // inner, inner))


def vocab(chunk_tokens: int) -> tuple[Step, Wire]:
    """Give every rank a shard of the vocabulary and the same tokens."""
    head = VocabLoss(_world(), chunk_tokens)
    both = seqpar.ModelWithLoss(Trunk(), head)
    return _step(both, None, reduces=False), Wire({_world(): len(head.weight)})


def data_x_vocab(chunk_tokens: int) -> tuple[Step, Wire]:
    """Split the vocabulary inside a machine and use DDP over machines."""
    data, inner = _mesh("vocab")
    head = VocabLoss(inner, chunk_tokens)
    wrapped = data_parallel(seqpar.ModelWithLoss(Trunk(), head), data)
    return _step(wrapped, None), Wire({inner: len(head.weight)})


def data_x_sequence(chunk_tokens: int) -> tuple[Step, Wire]:
    """Split time steps inside a machine and use DDP over all ranks; targets across the seams are fetched."""
    _, inner = _mesh("sequence")
    both, _ = _whole_head(chunk_tokens)
    wrapped = data_parallel(both, _world())
    tokens = torch.randint(VOCAB_SIZE, (BATCH, TIME))

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


@contextmanager
def world_of(size: int) -> Iterator[None]:
    """Within the block, make this process rank 0 of a world of `size` ranks, of which the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def count(layout: str, chunks: int) -> Sent:
    """Return what one rank of the present world sends in a step."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        step, wire = LAYOUTS[layout](BATCH * TIME // chunks)
        with Wire(wire.rows_of):
            # What DDP and FSDP2 set up in their first steps does not count
            step()
            step()
        with wire:
            step()
    return wire.sent


def counts(worlds: tuple[int, ...] = WORLDS, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> dict[str, Any]:
    """Return what is sent, by layout, world and chunks, with keys as JSON has them."""
    found: dict[str, Any] = {layout: {} for layout in layouts}
    for size in worlds:
        with world_of(size):
            for layout in layouts:
                found[layout][str(size)] = {str(chunks): count(layout, chunks)._asdict() for chunks in CHUNKS}
    return found


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table with a row per layout and world."""
    chunks = "/".join(str(count) for count in CHUNKS)
    header = ["layout", "ranks", f"collectives, {chunks} chunks", f"KiB, {chunks} chunks", f"of {CHUNKS[1]} chunks"]
    rows = []
    for layout, worlds in found.items():
        for world, by_chunks in worlds.items():
            sent = [Sent(**by_chunks[str(count)]) for count in CHUNKS]
            numbers = " / ".join(str(sum(each.collectives.values())) for each in sent)
            sizes = " / ".join(f"{each.size / 1024:.1f}" for each in sent)
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(sent[1].collectives.items()))
            rows.append([layout, world, numbers, sizes, kinds])
    return markdown_table(header, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), help="ranks of each simulated world")
    options = parser.parse_args()
    for world in options.worlds:
        # Each is halved by layouts of two dimensions, and divides the rows of the weights
        if world < 2 or VOCAB_SIZE % world:
            parser.error(f"--worlds {world}: choose a power of 2 from 2 to {VOCAB_SIZE:,}")
    print(table(counts(tuple(options.worlds))))


if __name__ == "__main__":
    main()
