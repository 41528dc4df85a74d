"""A small encoder-decoder of plain torch with its loss, micro-batches for it, and their gradient as one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import seqpar
from tests.seqpar.integrations.tiny_models import taken

PAD, VOCAB, WIDTH = 0, 23, 8


class Trunk(nn.Module):
    """(source, target so far) -> hidden states (batch, time, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.mix(self.target(target) + self.source(source).mean(1, keepdim=True))[0]  # type: ignore[no-any-return]


def with_loss(smoothing: float = 0.1) -> seqpar.ModelWithLoss:
    torch.manual_seed(3)
    criterion = seqpar.LabelSmoothing(smoothing, "torch", ignore_index=PAD)
    engine = seqpar.LossCompute(nn.Linear(WIDTH, VOCAB), criterion, chunk_tokens=5)
    return seqpar.ModelWithLoss(Trunk(), engine).double()


def micro_batches(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Of uneven sizes, lengths and padding."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        rows, time = (int(torch.randint(1, 6, (), generator=g)) for _ in range(2))
        target = torch.randint(1, VOCAB, (rows, time + 2), generator=g)
        target[:, 2:][torch.rand(rows, time, generator=g) < 0.4] = PAD
        source = torch.randint(1, VOCAB, (rows, 3), generator=g)
        batches.append({"source": source, "target_in": target[:, :-1], "target": target[:, 1:]})
    return batches


def loss_of(model: Any, micro_batch: dict[str, Tensor]) -> seqpar.TokenLoss:
    return model(micro_batch["source"], micro_batch["target_in"], target=micro_batch["target"])  # type: ignore[no-any-return]


def tokens_of(micro_batch: dict[str, Tensor]) -> Tensor:
    return (micro_batch["target"] != PAD).sum()


def whole(tensor: Tensor) -> Tensor:
    """A tensor, put together if FSDP2 sharded it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, put together if FSDP2 sharded them; every rank calls this."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def wrapped(model: nn.Module, way: str, *units: nn.Module, **options: Any) -> nn.Module:
    """A model under DDP, or under FSDP2 with units of its own below it; as it is for any other way."""
    if way == "ddp":
        return DistributedDataParallel(model)
    for unit in (*units, model) if way.startswith("fsdp2") else ():
        fully_shard(unit, **options)
    return model


def as_one_batch(batches: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients of all micro-batches on one device, the logits written out."""
    model = with_loss()
    generator = model.loss.head["generator"]
    criterion = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1, ignore_index=PAD)
    losses = [
        criterion(generator(model.model(b["source"], b["target_in"])).flatten(0, 1), b["target"].flatten())
        for b in batches
    ]
    return taken(model, torch.stack(losses).sum() / sum(tokens_of(b) for b in batches))
