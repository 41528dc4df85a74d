"""Distribution of the model over the devices of one process, or over processes according to the setting `layout`.

In every layout the gradient of a step equals that of all its tokens on one device. `Parts` determines which part of
each weight a process has.

Ranks are numbered by (data, shard, vocab), the last one fastest: ranks that communicate most are neighbours,
usually on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import seqpar
from models import EncoderDecoder
from models.compiled import compile_layers, compiling, without_compiling
from models.sharding import cut_of, split_weights, whole_outputs
from models.transformer import allocate
from recipes.translation.data.batches import Batch, padded_batch
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.tensors import MIXED
from recipes.translation.processes.ranks import Ranks
from recipes.translation.settings.config import LayoutConfig, TrainingConfig
from recipes.translation.text.subwords import PAD, UNK
from recipes.translation.training.compilation import check_compiler, explain_compile_errors
from recipes.translation.training.half_precision import AUTOCAST
from recipes.translation.training.objective import Objective, Teacher
from recipes.translation.training.parts import (
    Axes,
    OpenedModel,
    Parts,
    fill,
    gather_together,
    shard_layers,
    shard_module,
)
from seqpar.distributed.collectives import group_sum, whole_tensor


def axes_of(layout: LayoutConfig, world: int) -> Axes:
    """Return the axes of a layout for `world` processes; raise ConfigError if their product is not `world`."""
    others = layout.shard * layout.vocab
    axes = Axes(layout.data or max(1, world // others), layout.shard, layout.vocab)
    if prod(axes) != world:
        product = " x ".join(f"{name} {size}" for name, size in axes._asdict().items())
        started = f"{world} were"
        if world == 1:
            started = "1 was"
        raise ConfigError(
            f"layout {product} needs {prod(axes)} processes, but {started} started: start {prod(axes)}, for example "
            f"with torchrun --nproc-per-node {prod(axes)}, or change the layout"
        )
    return axes


class Groups(NamedTuple):
    """The process groups of this process; None stands for this process alone."""

    tokens: ProcessGroup | None
    """Ranks with different tokens, over which gradients are summed."""
    vocab: ProcessGroup | None
    """Ranks that split the vocabulary and have the same tokens."""
    shards: DeviceMesh | None
    """The mesh (copy, shard) if weights are sharded."""

    @classmethod
    def of(cls, axes: Axes, ranks: Ranks, timeout: float, device: torch.device) -> Groups:
        """Make the groups of a layout; every rank must call it, since making a group is a collective of all ranks."""
        world = torch.arange(ranks.world)
        nccl = device.type == "cuda" and ranks.local_world <= torch.cuda.device_count()

        def group(rows: Tensor) -> ProcessGroup | None:
            if rows.size(1) == 1:
                return None
            # One group of all ranks exists already, and each additional one costs connections between all pairs
            if len(rows) == 1 and not nccl and ranks.step_group is not None:
                return ranks.step_group
            backend = "gloo"
            if nccl:
                backend = "nccl"
            own, _ = dist.new_subgroups_by_enumeration(
                rows.tolist(), timeout=timedelta(seconds=timeout), backend=backend
            )
            if backend == "gloo":
                ranks.gloo_groups.append(own)
            return own  # type: ignore[no-any-return]

        # Each row is a group. Since ranks are numbered with the last axis fastest, `view` and a transpose give the
        # rows. Data 2, vocab 2: vocab [[0, 1], [2, 3]], tokens [[0, 2], [1, 3]]
        vocab = group(world.view(-1, axes.vocab))
        tokens = group(world.view(-1, axes.vocab).T)
        if axes.shard == 1:
            return cls(tokens, vocab, None)
        copies_shards_vocab = world.view(axes.data, axes.shard, axes.vocab)
        shards = group(copies_shards_vocab.mT.reshape(-1, axes.shard))
        copies = group(copies_shards_vocab.flatten(1).T)
        mine = copies_shards_vocab[:, :, ranks.rank % axes.vocab]
        assert shards is not None
        if copies is None:
            mesh = DeviceMesh.from_group(shards, device.type, mesh=mine[0], mesh_dim_names=("shard",))
        else:
            mesh = DeviceMesh.from_group([copies, shards], device.type, mesh=mine, mesh_dim_names=("copy", "shard"))
        return cls(tokens, vocab, mesh)


class Layout:
    """A model distributed for training.

    Args:
        model: on the device "meta"; it is split in place, and gets memory only for this process's parts.
        weights: each weight with its name, whole and the same on every rank; each is asked for once the previous one
            is in place.
        settings: those of the training.
        layout: how the processes share the work.
        devices: from `machine.devices_of`.
        ranks: the processes.
        teacher: the model to learn from, which is sharded as `model` is.

    Raises:
        ConfigError: for a layout that does not fit the model.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        weights: Iterable[tuple[str, Tensor]],
        settings: TrainingConfig,
        layout: LayoutConfig,
        devices: list[torch.device],
        ranks: Ranks,
        teacher: OpenedModel | None = None,
    ) -> None:
        self.settings = settings
        self.axes = axes = axes_of(layout, ranks.world)
        self.devices = devices
        self.device = devices[0]
        if self.device.type != "cpu":
            # FSDP2 gathers weights on the current device, and NCCL assumes that it belongs to this process
            torch.accelerator.set_device_index(self.device.index)
        self.groups = Groups.of(axes, ranks, layout.timeout, self.device)
        self.data_rank = ranks.rank // axes.vocab
        self.data_ranks = axes.data * axes.shard
        self.model = model
        self.parts = Parts(axes, ranks, model)
        self.reducer: nn.Module | None = None
        self.stance: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which a step runs; it determines what may be compiled."""
        if self.settings.compile:
            ranks.run_on_all(lambda: check_compiler(devices))
            compile_layers(model)
            self.stance = compiling
        beside = None
        if teacher is not None:
            self._fill_teacher(teacher)
            beside = Teacher(teacher.model, devices)
        objective = Objective(settings, beside)
        if ranks.world == 1:
            allocate(model, self.device)
            self.parts.fill_model(self.model, weights)
            self.forward = self.over_devices(model, objective)
        else:
            self.forward = self._distribute(objective, weights)
        self._settle()

    def _fill_teacher(self, teacher: OpenedModel) -> None:
        """Give the teacher its weights: all of them or, if the model is sharded, this rank's rows."""
        axes, ranks, mesh = Axes(prod(self.axes), 1, 1), self.parts.ranks, None
        if self.groups.shards is not None:
            # Ranks that split the vocabulary have the same rows
            axes, ranks, mesh = self.axes._replace(vocab=1), replace(ranks, rank=self.data_rank), self.groups.shards
        fill(teacher, axes, ranks, mesh, self.device)

    def _distribute(
        self, objective: Objective, weights: Iterable[tuple[str, Tensor]]
    ) -> Callable[[Batch], seqpar.TokenLoss]:
        """Split and wrap the model together with its loss, and fill it; return the forward of a batch."""
        try:
            shard = split_weights(self.model, self.groups.vocab)
        except ValueError as error:
            raise ConfigError(f"layout.vocab {self.axes.vocab}: {error}") from error
        vocab = shard if self.axes.vocab > 1 else None
        # A shard of the vocabulary stays on its device
        own_devices = None if vocab else self.devices
        if self.groups.shards is not None:
            shard_layers(self.model, self.groups.shards, self.device)
        allocate(self.model, self.device)
        if self.groups.shards is None:
            # Before DDP sends rank 0's weights to all, so that they agree whatever processors drew them
            self.parts.fill_model(self.model, weights)
        both = seqpar.ModelWithLoss(objective.passes(self.model), objective.loss(self.model, own_devices, vocab))
        self.usual_loss = Objective(self.settings).loss(self.model, own_devices, vocab)
        if self.groups.shards is not None:
            # Everything outside the layers
            shard_module(both, self.groups.shards)
            self.parts.fill_model(self.model, weights)
            self.reducer = both
        elif self.groups.tokens is not None:
            self.reducer = DistributedDataParallel(
                both,
                device_ids=None if self.device.type == "cpu" else [self.device],
                process_group=self.groups.tokens,
                gradient_as_bucket_view=True,
            )
        wrapped = self.reducer or both
        return lambda batch: wrapped(batch.src, batch.tgt_in, target=batch.tgt_out)

    def _settle(self) -> None:
        """Run a step that changes nothing, so that later steps compute the same with and without a resume before them.

        DDP assigns gradients their final places in its buckets after the first backward, and over more than two ranks
        the order of summation depends on the place. If a run's first real step settled the places, the first step after
        a resume would have different ones from the same step of an uninterrupted run.

        Layers are also compiled here, with a batch whose numbers of sentences, source steps and target steps per device
        are all different, as `compiling` requires.
        """
        if not self.settings.compile and not isinstance(self.reducer, DistributedDataParallel):
            return
        sentences, source, target = 1, 1, 1
        if self.settings.compile:
            target = min(27, self.settings.max_length)
            sentences, source = 32 * len(self.devices), min(22, target - 1)
        with explain_compile_errors():
            self.accumulate([padded_batch([[UNK] * source] * sentences, [[UNK] * target] * sentences)])
        self.model.zero_grad()
        if self.settings.compile:
            self.stance = without_compiling

    def __str__(self) -> str:
        layers = ", layers compiled" if self.settings.compile else ""
        if self.groups == Groups(None, None, None):
            return f"devices {', '.join(map(str, self.devices))}{layers}"
        # An axis of 1 process distributes nothing
        axes = " x ".join(f"{name} {size}" for name, size in self.axes._asdict().items() if size > 1)
        return f"{prod(self.axes)} processes ({axes}), here {self.device}{layers}"

    def over_devices(self, model: EncoderDecoder, objective: Objective) -> Callable[[Batch], seqpar.TokenLoss]:
        """Return the forward of a batch over this process's devices only; hidden states stay on them."""
        passes = seqpar.DataParallel(objective.passes(model), self.devices, gather_outputs=False)
        loss = objective.loss(model, self.devices, None)

        def forward(batch: Batch) -> seqpar.TokenLoss:
            loss.prefetch()
            hidden = passes(batch.src, batch.tgt_in)
            per_token: dict[str, list[Tensor]] = {}
            if isinstance(hidden[0], tuple):  # on each device, with further tensors for each token
                hidden, more = zip(*hidden, strict=True)
                per_token = {name: [tensors[name] for tensors in more] for name in more[0]}
            found: seqpar.TokenLoss = loss(list(hidden), batch.tgt_out, **per_token)
            return found

        return forward

    @contextmanager
    def independent(self) -> Iterator[Ranks]:
        """Within the block, let each rank call the model for sentences of its own, without gradients.

        Yields the ranks that divide the sentences; those that split the vocabulary count as one. Every rank must enter
        the block, leaves it when all others do, and must call these ranks' `meet` before any collective.
        """
        ranks = self.parts.ranks.for_steps()
        if self.axes.vocab > 1:
            world = ranks.world // self.axes.vocab
            ranks = replace(ranks, rank=self.data_rank, world=world, group=self.groups.tokens)
        with ExitStack() as held:
            held.enter_context(whole_outputs(self.model))
            if self.groups.shards is not None:
                assert self.reducer is not None
                together = gather_together([self.reducer], self.groups.shards.get_group("shard"))
                ranks = replace(ranks, meet=held.enter_context(together))
            yield ranks

    def plain_loss(self, model: EncoderDecoder) -> Callable[[Batch], seqpar.TokenLoss]:
        """Return the function for a batch's usual loss, whatever the training objective; use it within `independent`.

        `model` is this layout's or, if this process has the whole model, one that takes its place.
        """
        usual = Objective(self.settings)
        if self.has_whole_model:
            return self.over_devices(model, usual)

        def forward(batch: Batch) -> seqpar.TokenLoss:
            on_device = Batch(*(ids.to(self.device) for ids in batch))
            hidden = self.model(on_device.src, on_device.tgt_in)
            found: seqpar.TokenLoss = self.usual_loss(hidden, on_device.tgt_out)
            return found

        return forward

    def accumulate(
        self, batches: Sequence[Batch], agree: Mapping[str, object] | None = None, scale: float = 1.0
    ) -> seqpar.TokenLoss:
        """Add the gradient of a whole step, divided once by the tokens of its batches on all ranks; return its loss.

        `agree` names what must be the same on all ranks. The gradient is multiplied by `scale`, the returned loss is
        not.
        """
        with self.stance():
            return seqpar.accumulate_gradients(
                batches,
                self.loss_of,
                self.tokens_of,
                model=self.reducer,
                group=self.groups.tokens or seqpar.THIS_PROCESS,
                backward=Tensor.backward if scale == 1 else lambda loss: (loss * scale).backward(),
                agree=agree,
            )

    def loss_of(self, batch: Batch) -> seqpar.TokenLoss:
        """Return the summed loss of this rank's tokens of a batch.

        Ranks that split the vocabulary must pass the same batch.
        """
        half = AUTOCAST.get(self.settings.precision)
        with torch.autocast(self.device.type, half, enabled=half is not None):
            return self.forward(Batch(*(ids.to(self.device, non_blocking=True) for ids in batch)))

    def tokens_of(self, batch: Batch) -> Tensor:
        """Return the number of target tokens of a batch that this rank computes."""
        return (batch.tgt_out != PAD).sum()

    def clip(self, largest: float, scale: float = 1.0) -> Tensor:
        """Clip the gradient norm of the whole model to `largest` (0 does not clip); return the norm before clipping.

        The norm is a tensor, not read from the device. The gradient is first divided by `scale`, a power of two.
        """
        named = list(self.model.named_parameters())
        if scale != 1:
            torch._foreach_mul_([p.grad for _, p in named if p.grad is not None], 1 / scale)
        split = [p.grad for name, p in named if p.grad is not None and self._is_cut(name)]
        whole = [p.grad for name, p in named if p.grad is not None and not self._is_cut(name)]
        norm = whole_tensor(torch.nn.utils.get_total_norm(whole))
        if self.axes.vocab > 1:
            # |g|^2 = the sum over the vocabulary ranks of |g_split|^2 + |g_whole|^2, which is the same on all of them
            split_square = whole_tensor(torch.nn.utils.get_total_norm(split)).square()
            norm = (group_sum(split_square.to(self.device), self.groups.vocab) + norm.square()).sqrt()
        if largest:
            torch.nn.utils.clip_grads_with_norm_([p for _, p in named], largest, norm)
        return norm

    def _is_cut(self, name: str) -> bool:
        return self.axes.vocab > 1 and cut_of(name) is not None

    @property
    def has_whole_model(self) -> bool:
        """Return whether `model` was neither split nor sharded."""
        return self.axes[1:] == (1, 1)

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer's moments by their names `optimizer/<parameter>/<what>`."""
        return {
            f"optimizer/{name}/{what}": torch.as_tensor(value)
            for name, parameter in self.model.named_parameters()
            for what, value in sorted(optimizer.state.get(parameter, {}).items())
        }

    def fill_moments(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
        """Set the optimizer's moments from rank 0's whole ones, which `parts.copy_parts` made from `moments`."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # In the weights' dtype, which differs if the run is resumed in another precision
                moments = {what: torch.zeros_like(parameter, requires_grad=False) for what in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        own = self.moments(optimizer)

        def check() -> None:
            if lacking := sorted(own.keys() - saved.keys()):
                raise CheckpointError(
                    f"training.safetensors has no {lacking[0]}, one of the optimizer's moments; {MIXED}"
                )

        self.parts.ranks.run_on_main(check)
        self.parts.receive(own, saved)
