"""Splitting a model's weights over ranks, by a table that says along which axis each weight is split.

This is the layout of Megatron-LM (Shoeybi et al. 2019, sections 3 and 5): the first matrix of an attention or a
feed-forward network is split along its outputs, the last one along its inputs, so that each sublayer needs one sum over
the group in forward and one in backward; embedding and generator are split along the vocabulary. The model's code does
not change: modules with a slice of the weight replace the whole ones under the same names, and hooks communicate.

    vocab = split_weights(model, group)      # model(src, tgt) as before, on the same batch in every rank
    hidden = model(src, tgt_in)
    loss = seqpar.linear_cross_entropy(hidden, model.generator.weight, tgt_out, bias=model.generator.bias, vocab=vocab)

Each rank then has the complete gradient of its slice of a split weight. To translate with a split model, use
`whole_outputs`.

Shape suffixes: B sentences, T target time, S source time, H heads, D model width, v classes on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from models.attention import Attention, KeyValues
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
    """Number of matrices that are concatenated along the axis; each of them is split."""


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
"""How each weight is split, by a pattern for its name. Other weights are whole on every rank: those of norms, and
biases that are added after a sum."""


def cut_of(name: str) -> Cut | None:
    """Return how a weight of `EncoderDecoder` is split; None if it is whole on every rank."""
    return next((cut for pattern, cut in TABLE.items() if fnmatch(name, pattern)), None)


def cut(name: str, whole: Tensor, rank: int, world: int) -> Tensor:
    """Return a copy of a rank's slice of a weight; the weight itself if it is not split.

    Slices differ by at most one row or column; the larger ones come first.
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
    would; every rank must give it the same inputs and the same random numbers for dropout.

    Raises:
        ValueError: for a number of heads that the number of ranks does not divide; for fewer subwords or feed-forward
            units than ranks; for a model with other kinds of layers, such as LoRA, or one that is split already.
    """
    world = world_size(group)
    rank = rank_in(group)
    vocab_size = model.generator.out_features
    if world == 1:
        return seqpar.VocabShard(None, 0, vocab_size)
    _check_kinds(model)
    _check_divisible(model, world)
    # Keyed by the identity of the whole weight, so that tied weights share one slice
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
    model.decoder.register_forward_pre_hook(partial(_enter_memory, group))
    setattr(model, SPLIT, vocabs["tgt_embed"])
    return vocabs["tgt_embed"]


@contextmanager
def whole_outputs(model: EncoderDecoder) -> Iterator[None]:
    """Within the block, let a split model compute all logits, as the whole one would.

    All its ranks must make the same calls of the model. A search takes the same steps on each of them, since their
    logits are the same. The loss, over this rank's classes, is computed as before. An unsplit model stays as it is.
    """
    vocab: seqpar.VocabShard | None = getattr(model, SPLIT, None)
    if vocab is None:
        yield
        return
    generator = model.generator
    delattr(model, SPLIT)
    model.generator = _JoinedLogits(generator, vocab)  # type: ignore[assignment]
    try:
        yield
    finally:
        model.generator = generator
        setattr(model, SPLIT, vocab)


class _JoinedLogits(nn.Module):
    """A generator of which each rank has some rows, and which returns the logits of all."""

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
    """An attention with this rank's share of the heads."""

    group: ProcessGroup | None

    def log_weights(self, x: Tensor, lookup: KeyValues, mask: Tensor | None = None) -> Tensor:
        """Compute the log-weights of all ranks' heads."""
        own_BHTS = super().log_weights(x, lookup, mask)
        return join_from_group(own_BHTS, [self.heads] * world_size(self.group), 1, self.group)


class _SplitLookup(nn.Module):
    """Some rows of an embedding; the sum over the ranks adds those of the other ranks' subwords."""

    def __init__(self, weight_vD: nn.Parameter, vocab: seqpar.VocabShard) -> None:
        super().__init__()
        self.weight = weight_vD
        self.vocab = vocab
        self.num_embeddings = vocab.vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        # For another rank's subword an arbitrary row is looked up and multiplied by 0, and so is its gradient
        index, owned = self.vocab.locate(tokens, len(self.weight))
        return sum_from_group(F.embedding(index, self.weight) * owned.unsqueeze(-1), self.vocab.group)


class _Entered(nn.Module):
    """The input of a split sublayer: each rank has one term of its gradient, and all ranks need the sum."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return copy_to_group(x, self.group)


def _enter_memory(group: ProcessGroup | None, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Do the same for the memory, once for all layers of a decoder."""
    if len(args) < 3:  # a decoder-only model has no memory
        return args
    return (*args[:2], copy_to_group(args[2], group), *args[3:])


class _SummedLinear(nn.Module):
    """A linear map y = W x + b, of whose W a rank has some columns, and thus one term of every entry of y."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        # The bias is whole on every rank, and must be added once: after the sum
        return sum_from_group(F.linear(x, self.weight), self.group) + self.bias


def _check_kinds(model: EncoderDecoder) -> None:
    """Raise ValueError if a weight in the table belongs to a kind of layer that is not split: its ties would break."""
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
