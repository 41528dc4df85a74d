"""Describe an implementation of a training step over several ranks to the checks: its function and its layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from conformance.adapter import Implementation

Layout = Literal[
    "data parallel",
    "FSDP2",
    "split vocabulary",
    "split sequence",
    "pipeline",
    "data x vocabulary",
    "accumulation",
]
"""What the ranks share out. "accumulation" is data parallel with several micro-batches, "pipeline" has several too."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
EVERY_LAYOUT: frozenset[str] = frozenset({*LAYOUTS, "float64", "smoothing", "uneven vocabulary", "mean"})


@dataclass(frozen=True)
class Work:
    """What one rank is given for a training step."""

    layout: Layout
    model: Any
    """`hidden = model(tokens)` of shape (B, t, D), and the generator `model.head`, an `nn.Linear` without a bias, whose
    weight may be the embedding's. With a split vocabulary `model.head` has only this rank's classes."""
    micro_batches: list[tuple[Tensor, Tensor]]
    """This rank's (tokens, target), (B, t) each; a target is the token's class or `ignore_index`."""
    vocab_size: int
    """The number of all ranks' classes."""
    label_smoothing: float
    """eps, of which every class gets eps / V, as in `torch.nn.CrossEntropyLoss`."""
    loss_scale: float
    """Multiplies the loss before its backward; the gradients keep it."""
    reduction: Literal["sum", "mean"]
    """"mean" ("mean" in `offers`): differentiate the implementation's own mean of this rank's tokens, by `backward()`,
    under DDP. It must be an error, or the gradient of the whole step's mean."""
    start: int = 0
    """This rank's first class."""
    data_group: ProcessGroup | None = None
    """The ranks that have other sentences; None is this rank alone, and so for the next ones."""
    sequence_group: ProcessGroup | None = None
    """The ranks that have other time steps of the same sentences."""
    vocab_group: ProcessGroup | None = None
    """The ranks that have other classes, and the same sentences."""
    pipeline_group: ProcessGroup | None = None
    """The ranks that have other layers."""
    stage: nn.Module | None = None
    """This rank's part of the model in a pipeline; that of the last rank returns hidden states and has the generator
    as `head`."""
    ignore_index: int = -100

    @property
    def token_group(self) -> ProcessGroup | None:
        """Return the ranks that have other tokens, over which gradients are reduced."""
        return self.data_group or self.sequence_group


@dataclass(frozen=True)
class LayoutAdapter(Implementation):
    """An implementation of a training step over several ranks: `function(work)`, called in every rank.

        adapter = LayoutAdapter("mine", my_step, offers=frozenset({"data parallel", "float64"}))

    It runs forward, backward and the reduction of gradients, which it leaves in `.grad`, and returns the mean loss over
    the tokens of the whole step; in a pipeline only the last rank's counts. It may wrap `work.model` in DDP, or call
    `fully_shard` on it. Without "float64" in `offers` its numbers may be off by float32's rounding.
    """

    part: ClassVar[str] = "layouts"
    offers: frozenset[str] = EVERY_LAYOUT
