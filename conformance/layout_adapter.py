"""Describe an implementation of a training step over several ranks to the checks: its function and its layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from conformance.adapter import Implementation


class Row(NamedTuple):
    """How the ranks of a layout divide a step: rank = ((group x outer + place) x near + place) x inner + place."""

    sizes: tuple[tuple[int, int], ...]
    """Numbers of ranks, each with the number of ranks that have different tokens."""
    wrap: str = "ddp"
    """What reduces the gradients of ranks with different tokens: "ddp", "fsdp2", "hsdp" or "zero3"."""
    inner: str = ""
    """What ranks with the same tokens divide among them: "classes", "time and classes", "DTensor classes", "layers" or
    "halves of layers"; or what neighbours with different tokens do: "experts"."""
    is_time: bool = False
    """Whether neighbours have different time steps of the same sentences."""
    outer: int = 1
    """In how many rows the ranks with different tokens are arranged."""
    micro_batches: int = 1
    is_alone: bool = False
    """Whether each rank is a group of its own, with its own step."""
    loses_one: bool = False
    """Whether the last rank goes away during the step."""

    @property
    def splits_classes(self) -> bool:
        """Return whether ranks have different classes."""
        return self.inner.endswith("classes")


LINE = ((2, 2), (4, 4))
SAME_TOKENS = ((2, 1), (4, 1))
ROWS: dict[str, Row] = {
    "data parallel": Row(LINE),
    "FSDP2": Row(LINE, "fsdp2"),
    "HSDP": Row(((4, 4),), "hsdp", outer=2),
    "ZeRO-3": Row(((4, 4),), "zero3"),
    "split vocabulary": Row(SAME_TOKENS, inner="classes"),
    "split sequence": Row(LINE, is_time=True),
    "pipeline": Row(SAME_TOKENS, inner="layers", micro_batches=4),
    "zero bubble": Row(SAME_TOKENS, inner="halves of layers", micro_batches=8),
    "data x vocabulary": Row(((4, 2),), inner="classes"),
    "data x sequence": Row(((4, 4),), is_time=True, outer=2),
    "FSDP2 x vocabulary": Row(((4, 2),), "fsdp2", inner="classes"),
    "FSDP2 x sequence": Row(((4, 4),), "fsdp2", is_time=True, outer=2),
    "HSDP x vocabulary": Row(((8, 4),), "hsdp", inner="classes", outer=2),
    "sequence x vocabulary": Row(((2, 1), (4, 2)), inner="time and classes"),
    "DTensor model": Row(SAME_TOKENS, inner="DTensor classes"),
    "expert parallel": Row(((2, 2), (4, 4)), "", inner="experts"),
    "data x expert": Row(((4, 4),), "", inner="experts", outer=2),
    "accumulation": Row(LINE, micro_batches=3),
    "a replica that goes away": Row(LINE, "", loses_one=True),
    "DiLoCo's inner step": Row(SAME_TOKENS, is_alone=True),
}
"""The layouts in the table. In "sequence x vocabulary", Megatron's sequence parallelism, the ranks that split a
vocabulary run the model on their own time steps, and the loss on all of them."""
LAYOUTS = tuple(ROWS)
EVERY_LAYOUT: frozenset[str] = frozenset({*LAYOUTS, "float64", "smoothing", "uneven vocabulary", "mean"})


@dataclass(frozen=True)
class Work:
    """What a rank is given for a training step."""

    layout: str
    model: Any
    """`hidden = model(tokens)` with shape (B, t, D), and the generator `model.head`, an `nn.Linear` without a bias,
    whose weight may be the embedding's. With a split vocabulary `model.head` has only this rank's classes, and with
    split experts `model.experts` is a `conformance.layout_experts.Experts`."""
    micro_batches: list[tuple[Tensor, Tensor]]
    """This rank's (tokens, target), (B, t) each; a target is the token's class or `ignore_index`."""
    vocab_size: int
    """The number of classes on all ranks together."""
    label_smoothing: float
    """eps, of which every class gets eps / V, as in `torch.nn.CrossEntropyLoss`."""
    loss_scale: float
    """Multiplies the loss before its backward; the gradients stay scaled."""
    reduction: Literal["sum", "mean"]
    """"mean" (if "mean" is in `offers`): differentiate the implementation's own mean over this rank's tokens, with
    `backward()`, under DDP. This must raise an error, or give the gradient of the whole step's mean."""
    start: int = 0
    """This rank's first class."""
    token_group: ProcessGroup | None = None
    """The ranks that have different tokens, over which gradients are reduced. In all groups, None means only this
    rank."""
    data_group: ProcessGroup | None = None
    """The ranks that have different sentences."""
    sequence_group: ProcessGroup | None = None
    """The ranks that have different time steps of the same sentences."""
    token_mesh: DeviceMesh | None = None
    """The ranks with different tokens in rows and columns, for HSDP."""
    expert_group: ProcessGroup | None = None
    """The ranks with different experts of the same layer and different tokens; `data_group` has the same experts."""
    vocab_group: ProcessGroup | None = None
    """The ranks that have different classes and the same sentences."""
    pipeline_group: ProcessGroup | None = None
    """The ranks that have different layers."""
    stages: Mapping[int, nn.Module] = field(default_factory=dict)
    """This rank's stages of the model in a pipeline, by number; the last stage returns hidden states and has the
    generator as `head`."""
    stage_count: int = 0
    survivors: Callable[[], ProcessGroup] | None = None
    """Returns the ranks with different tokens that remain. Every rank calls it after backward; on the rank that goes
    away it raises an error."""
    ignore_index: int = -100

    @property
    def row(self) -> Row:
        """Return how the ranks divide the step among them."""
        return ROWS[self.layout]


@dataclass(frozen=True, repr=False)
class LayoutAdapter(Implementation):
    """An implementation of a training step over several ranks: `function(work)`, called in every rank.

        adapter = LayoutAdapter("mine", my_step, offers=frozenset({"data parallel", "float64"}))

    It runs forward, backward and the reduction of gradients, which it leaves in `.grad`, and returns the mean loss over
    the tokens of the whole step; in a pipeline only the loss from the last stage counts. It may wrap `work.model` in
    DDP, or call `fully_shard` on it. Without "float64" in `offers` its numbers may be off by float32's rounding.
    """

    part: ClassVar[str] = "layouts"
    offers: frozenset[str] = EVERY_LAYOUT
