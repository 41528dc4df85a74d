"""Splitting a model's weights and time steps over ranks, by a table that says along which axis each weight is split.

This is the layout of Megatron-LM (Shoeybi et al. 2019, sections 3 and 5): the first matrix of attention or feed-forward
network is split by its outputs, the last one by its inputs, so that each of these needs one sum over the group in
forward and one in backward; embedding and generator are split by the vocabulary. The code of the model does not change:
modules with a slice of the weight replace the whole ones under the same names, and hooks communicate.

    vocab = split_weights(model, vocab_group)      # model(src, tgt) as before, on the same batch in every rank
    split_time_steps(model, sequence_group)        # model(src, tgt) returns this rank's time steps of tgt
    hidden = model(src, tgt_in)
    loss = seqpar.linear_cross_entropy(hidden, model.generator.weight, seqpar.split_time(tgt_out, sequence_group),
                                       bias=model.generator.bias, vocab=vocab)

Each rank then has the complete gradient of its slice of a split weight, but only that of its own time steps, which must
be summed over the sequence ranks, as over data ranks. A split model translates within `whole_outputs`.

Shape suffixes: B sentences, T time steps, t time steps on this rank, D model width, v classes on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from models.attention import Attention, KeyValues, subsequent_mask
from models.decoder_only import DecoderOnly
from models.embedding import Embedding
from models.ensemble import SPLIT
from models.lora import LoraLinear
from models.transformer import EncoderDecoder, FeedForward, Residual
from seqpar.distributed.collectives import (
    copy_to_group,
    join_from_group,
    rank_in,
    sum_from_group,
    world_size,
)
from seqpar.distributed.sequence import part_sizes


class Cut(NamedTuple):
    """How a weight is split over ranks."""

    axis: int
    """0 splits the outputs, 1 the inputs."""
    blocks: int = 1
    """Matrices that are concatenated along the axis; each of them is split."""


TABLE: dict[str, Cut] = {
    "*_embed.lookup.weight": Cut(0),
    "generator.weight": Cut(0),
    "generator.bias": Cut(0),
    "*_attention.query.*": Cut(0),
    "*_attention.key_value.*": Cut(0, blocks=2),
    "*_attention.output.weight": Cut(1),
    "*.feed_forward.inner.*": Cut(0),
    "*.feed_forward.outer.weight": Cut(1),
}
"""How each weight is split, by a pattern of its name. Other weights are whole on every rank: those of norms, and biases
that are added after a sum."""


def cut_of(name: str) -> Cut | None:
    """Return how a weight of `EncoderDecoder` is split; None if it is whole on every rank."""
    return next((cut for pattern, cut in TABLE.items() if fnmatch(name, pattern)), None)


def cut(name: str, whole: Tensor, rank: int, world: int) -> Tensor:
    """Return a copy of a rank's slice of a weight; the weight itself if it is not split.

    Slices differ by one row or column at most; the larger ones come first.
    """
    how = cut_of(name)
    if how is None or world == 1:
        return whole
    # Keys and values are two blocks of one matrix, and a rank needs both blocks' rows of its own heads
    blocks = whole.chunk(how.blocks, how.axis)
    return torch.cat(
        [block.split(part_sizes(block.size(how.axis), world), how.axis)[rank] for block in blocks], how.axis
    )


def join(name: str, slices: Sequence[Tensor]) -> Tensor:
    """Return the weight that `cut` divides into these slices, in rank order."""
    how = cut_of(name)
    if how is None or len(slices) == 1:
        return slices[0]
    blocks = zip(*(own.chunk(how.blocks, how.axis) for own in slices), strict=True)
    return torch.cat([torch.cat(block, how.axis) for block in blocks], how.axis)


def split_weights(model: EncoderDecoder, group: ProcessGroup | None) -> seqpar.VocabShard:
    """Split the model's weights by the table, in place, and return this rank's shard of the vocabulary, for the loss.

    Tied weights remain tied, and only this rank's slices stay in memory. The split model computes what the whole model
    would; every rank must give it the same inputs and the same random numbers of dropout.

    Raises:
        ValueError: heads that are not divisible by the ranks; fewer subwords or feed-forward units than ranks; a model
            with layers of another kind, such as LoRA, or one that is split already.
    """
    world = world_size(group)
    rank = rank_in(group)
    vocab_size = model.generator.out_features
    if world == 1:
        return seqpar.VocabShard(None, 0, vocab_size)
    _check_kinds(model)
    _check_divisible(model, world)
    split = _split_of(model)
    # By the identity of the whole weight, so that tied weights share one slice
    slices: dict[int, nn.Parameter] = {}

    def slice_of(name: str, whole: Tensor) -> nn.Parameter:
        if id(whole) not in slices:
            own = cut(name, whole.detach(), rank, world).clone()
            slices[id(whole)] = nn.Parameter(own, requires_grad=whole.requires_grad)
        return slices[id(whole)]

    vocabs = {
        name: seqpar.VocabShard(group, sum(part_sizes(size, world)[:rank]), size)
        for name, size in (("src_embed", model.src_embed.lookup.num_embeddings), ("tgt_embed", vocab_size))
    }
    for name, module in list(model.named_modules()):
        if isinstance(module, Embedding):
            weight = slice_of(f"{name}.lookup.weight", module.lookup.weight)
            module.lookup = _SplitLookup(weight, vocabs[name])  # type: ignore[assignment]
        elif isinstance(module, Attention):
            module.heads //= world
            module.__class__ = _SplitAttention
            vars(module)["group"] = group
        elif isinstance(module, Residual):
            module.enter = _Entered(group)
        elif isinstance(module, nn.Linear) and (how := cut_of(f"{name}.weight")):
            module.weight = slice_of(f"{name}.weight", module.weight)
            module.bias = slice_of(f"{name}.bias", module.bias)
            module.out_features = len(module.weight)
            if how.axis == 1:
                model.set_submodule(name, _SummedLinear(module.weight, module.bias, group))
    model.decoder.register_forward_pre_hook(partial(_memory_entered, group))
    split.vocab = vocabs["tgt_embed"]
    return split.vocab


def split_time_steps(model: EncoderDecoder, group: ProcessGroup | None) -> None:
    """Add hooks by which each rank of the group computes its own time steps of `model(src, tgt)`.

    Every rank passes the whole batch and receives `split_time(model(src, tgt), group)`, contiguous time steps in rank
    order. Each layer joins keys and values over the ranks; everything else is computed for this rank's time steps
    alone. Gradients are those of the loss of these time steps: the model's gradient is their sum over the ranks.

    Raises ValueError for a decoder-only model, whose pairs are packed.
    """
    if world_size(group) == 1:
        return
    if not isinstance(model.src_embed, Embedding):
        raise ValueError(
            f"the time steps of a {type(model).__name__} are not split over ranks: only those of a Transformer are; "
            "split the batch"
        )
    if isinstance(model, DecoderOnly):
        raise ValueError("a decoder-only model packs several pairs into a row, whose time steps are not split")
    split = _TimeSteps(group)
    _split_of(model).time_steps = split
    model.register_forward_pre_hook(split.begin, with_kwargs=True)
    for name, module in model.named_modules():
        side = "tgt"
        if name.startswith(("src_", "encoder.")) or name.endswith("memory_attention.key_value"):
            side = "src"
        if isinstance(module, Embedding):
            module.register_forward_pre_hook(split.embed_own(side))
        elif name.endswith(".key_value"):
            module.register_forward_hook(split.join(side))


@dataclass
class _Split:
    """How a model is split, for `whole_outputs`."""

    vocab: seqpar.VocabShard | None = None
    time_steps: _TimeSteps | None = None


def _split_of(model: EncoderDecoder) -> _Split:
    if not hasattr(model, SPLIT):
        setattr(model, SPLIT, _Split())
    split: _Split = getattr(model, SPLIT)
    return split


@contextmanager
def whole_outputs(model: EncoderDecoder) -> Iterator[None]:
    """Within the block, let a split model compute what the whole one would: all time steps and all logits.

    Ranks that split the vocabulary must call the model alike, and those that split the time steps may call it as they
    like. A search takes the same steps on all ranks that search the same sentences, since their logits are the same.
    The loss, which has this rank's classes, is computed as before. A model that is not split stays as it is.
    """
    split: _Split | None = getattr(model, SPLIT, None)
    if split is None:
        yield
        return
    generator = model.generator
    delattr(model, SPLIT)
    if split.vocab:
        model.generator = _JoinedLogits(generator, split.vocab)  # type: ignore[assignment]
    if split.time_steps:
        split.time_steps.paused = True
    try:
        yield
    finally:
        if split.time_steps:
            split.time_steps.paused = False
        model.generator = generator
        setattr(model, SPLIT, split)


class _JoinedLogits(nn.Module):
    """A generator of which each rank has some rows, and the logits of all."""

    def __init__(self, own: nn.Linear, vocab: seqpar.VocabShard) -> None:
        super().__init__()
        self.own = own
        self.vocab = vocab
        self.out_features = vocab.vocab_size

    @property
    def weight(self) -> Tensor:
        """Return this rank's rows, which are on the device and in the dtype of the model."""
        return self.own.weight

    def forward(self, x: Tensor) -> Tensor:
        sizes = part_sizes(self.vocab.vocab_size, world_size(self.vocab.group))
        return join_from_group(self.own(x), sizes, x.dim() - 1, self.vocab.group)


class _SplitAttention(Attention):
    """An attention with some of the heads."""

    group: ProcessGroup | None

    def log_weights(self, x: Tensor, lookup: KeyValues, mask: Tensor | None = None) -> Tensor:
        """Compute those of all ranks' heads."""
        own_BHTS = super().log_weights(x, lookup, mask)
        return join_from_group(own_BHTS, [self.heads] * world_size(self.group), 1, self.group)


class _TimeSteps:
    """The hooks of `split_time_steps`, and the numbers of time steps of the current batch, which they need."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.paused = False
        """Whether every rank computes all time steps."""
        self.sizes: dict[str, list[int]] = {}

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.paused:
            return args, kwargs
        given = dict(zip(("src", "tgt", "src_mask", "tgt_mask"), args, strict=False)) | kwargs
        self.sizes = {side: part_sizes(given[side].size(1), world_size(self.group)) for side in ("src", "tgt")}
        tgt = given["tgt"]
        # This rank's queries attend to the keys of all ranks, so a causal mask no longer follows from the shape alone
        if given.get("tgt_mask") is None:
            given["tgt_mask"] = subsequent_mask(tgt.size(1), tgt.device)
        for name, sides in (("src_mask", ("src", "tgt")), ("tgt_mask", ("tgt",))):
            given[name] = self._own_queries(name, given.get(name), {side: given[side].size(1) for side in sides})
        return (), given

    def _own_queries(self, name: str, mask: Tensor | None, times: dict[str, int]) -> Tensor | None:
        """Return the rows of a mask for this rank's time steps, if it has one for each step of `times`."""
        if mask is None or mask.dim() != 4 or mask.size(2) == 1:  # the model itself raises for a mask of other dims
            return mask
        if set(times.values()) != {mask.size(2)}:
            steps = " and ".join(f"{side} has {time} time steps" for side, time in times.items())
            raise ValueError(
                f"{name} has {mask.size(2)} rows of queries, but {steps}: pass a row for each step that attends by it, "
                "or one for all of them"
            )
        start, stop = self._own("tgt")
        return mask[:, :, start:stop]

    def embed_own(self, side: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Any, ...]]:
        """Return a hook that gives an embedding this rank's tokens, and the position of the first one."""

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
            if self.paused:
                return args
            start, stop = self._own(side)
            return args[0][:, start:stop], start

        return hook

    def join(self, side: str) -> Callable[[nn.Module, object, Tensor], Tensor]:
        """Return a hook that joins the keys and values of all ranks."""

        def hook(_: nn.Module, __: object, output_BtD: Tensor) -> Tensor:
            if self.paused:
                return output_BtD
            return join_from_group(output_BtD, self.sizes[side], 1, self.group)

        return hook

    def _own(self, side: str) -> tuple[int, int]:
        sizes = self.sizes[side]
        rank = rank_in(self.group)
        return sum(sizes[:rank]), sum(sizes[: rank + 1])


class _SplitLookup(nn.Module):
    """Some rows of an embedding; the sum over the ranks adds those of the other ranks' subwords."""

    def __init__(self, weight_vD: nn.Parameter, vocab: seqpar.VocabShard) -> None:
        super().__init__()
        self.weight = weight_vD
        self.vocab = vocab
        self.num_embeddings = vocab.vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        # Another rank's subword is looked up as any row and multiplied by 0, and so is its gradient
        index, owned = self.vocab.locate(tokens, len(self.weight))
        return sum_from_group(F.embedding(index, self.weight) * owned.unsqueeze(-1), self.vocab.group)


class _Entered(nn.Module):
    """The input of a sublayer that is split: each rank has a term of its gradient, whose sum all ranks need."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return copy_to_group(x, self.group)


def _memory_entered(group: ProcessGroup | None, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Do the same for the memory, once for all layers of a decoder."""
    if len(args) < 3:  # a decoder-only model's has none
        return args
    return (*args[:2], copy_to_group(args[2], group), *args[3:])


class _SummedLinear(nn.Module):
    """A linear map y = W x + b of which a rank has some columns of W, and thus a term of every entry of y."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        # The bias is whole on every rank, and must be added once: after the sum
        return sum_from_group(F.linear(x, self.weight), self.group) + self.bias


def _check_kinds(model: EncoderDecoder) -> None:
    """Raise ValueError for a weight of the table in a layer of a kind that is not split: a tie with it would break."""
    lookups = {id(module.lookup) for module in model.modules() if isinstance(module, Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, _SummedLinear | _SplitLookup):
            raise ValueError(f"{name} is split already: split the weights of a whole model, once")
        if isinstance(module, LoraLinear):
            raise ValueError(f"{name} has LoRA, which is not split over ranks: split models.lora.without_lora(model)")
        known = isinstance(module, nn.Linear) or id(module) in lookups
        if not known and any(cut_of(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)):
            raise ValueError(
                f"{name} of a {type(model).__name__} is not split over ranks: only the layers of a Transformer are; "
                "split the batch"
            )


def _check_divisible(model: EncoderDecoder, world: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.heads % world:
            raise ValueError(
                f"{name} has {module.heads} heads, which are not divisible by {world} ranks; choose a number of ranks "
                "that divides the heads"
            )
        if isinstance(module, nn.Embedding) and module.num_embeddings < world:
            raise ValueError(f"{name} has {module.num_embeddings} rows for {world} ranks; choose fewer ranks")
        if isinstance(module, FeedForward) and module.inner.out_features < world:
            raise ValueError(f"{name} has {module.inner.out_features} units for {world} ranks; choose fewer ranks")
