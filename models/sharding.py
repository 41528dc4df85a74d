"""A model's weights and time steps over ranks: a table says which weight is cut along which axis.

The layout of Megatron-LM (Shoeybi et al. 2019, sections 3 and 5): a matrix that widens is cut by its outputs, the one
that narrows again by its inputs, so that attention and feed-forward network cost one sum over the group each, forward
and backward; embedding and generator are cut by the vocabulary. The model stays what it was: modules of the same name
with a part of the weight stand where the whole ones stood, and hooks carry what has to be carried.

    vocab = split_weights(model, vocab_group)      # model(src, tgt) as before, on the same batch in every rank
    split_time_steps(model, sequence_group)        # model(src, tgt) returns this rank's time steps of tgt
    hidden = model(src, tgt_in)
    loss = seqpar.linear_cross_entropy(hidden, model.generator.weight, seqpar.split_time(tgt_out, sequence_group),
                                       bias=model.generator.bias, vocab=vocab)

Gradients are then this rank's: of its part of a cut weight (whole for it), and of its time steps (to be summed over
the sequence ranks, as over data ranks). A split model trains; to translate, put the weights together again with `join`.

Shape suffixes: B sentences, T time steps, D model width, v this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from models.attention import Attention, subsequent_mask
from models.transformer import Embedding, EncoderDecoder, FeedForward
from seqpar.distributed.collectives import (
    copy_to_group,
    gather_numbers,
    join_from_group,
    rank_in,
    sum_from_group,
    world_size,
)
from seqpar.distributed.sequence import part_sizes


class Cut(NamedTuple):
    """How a weight is shared out."""

    axis: int
    """Along its outputs (0) or its inputs (1)."""
    blocks: int = 1
    """Matrices that lie one behind the other along the axis; each is cut by itself."""


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
"""Name of a weight -> how it is cut. Every other one is whole on every rank: norms, and biases added after a sum."""


def cut_of(name: str) -> Cut | None:
    """What the table says of a weight of `EncoderDecoder`; None where it is whole on every rank."""
    return next((cut for pattern, cut in TABLE.items() if fnmatch(name, pattern)), None)


def cut(name: str, whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's part of a weight, a copy; the weight itself where it is not cut.

    Parts differ by one row or column at most, larger ones first.
    """
    how = cut_of(name)
    if how is None or world == 1:
        return whole
    blocks = whole.chunk(how.blocks, how.axis)
    return torch.cat(
        [block.split(part_sizes(block.size(how.axis), world), how.axis)[rank] for block in blocks], how.axis
    )


def join(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The opposite of `cut`: the weight from all ranks' parts, in rank order."""
    how = cut_of(name)
    if how is None or len(parts) == 1:
        return parts[0]
    blocks = zip(*(part.chunk(how.blocks, how.axis) for part in parts), strict=True)
    return torch.cat([torch.cat(block, how.axis) for block in blocks], how.axis)


def join_over(name: str, part: Tensor, group: ProcessGroup | None) -> Tensor:
    """The weight that every rank of the group has a part of, whole on every rank; detached."""
    how, world = cut_of(name), world_size(group)
    if how is None or world == 1:
        return part.detach()
    sizes = [size for (size,) in gather_numbers([part.size(how.axis)], group)]
    return join(name, join_from_group(part.detach(), sizes, how.axis, group).split(sizes, how.axis))


def split_weights(model: EncoderDecoder, group: ProcessGroup | None) -> seqpar.VocabShard:
    """Cuts the model's weights by the table, in place; ties stay. Returns the vocabulary's part, for the loss.

    Plain equivalent of what the model then computes: the same model, whole. Every rank must give it the same inputs
    (and the same dropout). Only this rank's parts are kept.

    Raises:
        ValueError: heads that do not divide by the ranks; fewer subwords or feed-forward units than ranks.
    """
    world, rank, vocab_size = world_size(group), rank_in(group), model.generator.out_features
    if world == 1:
        return seqpar.VocabShard(None, 0, vocab_size)
    _check_divisible(model, world)
    parts: dict[int, nn.Parameter] = {}

    def part_of(name: str, whole: Tensor) -> nn.Parameter:
        if id(whole) not in parts:
            own = cut(name, whole.detach(), rank, world).clone()
            parts[id(whole)] = nn.Parameter(own, requires_grad=whole.requires_grad)
        return parts[id(whole)]

    vocabs = {
        name: seqpar.VocabShard(group, sum(part_sizes(size, world)[:rank]), size)
        for name, size in (("src_embed", model.src_embed.lookup.num_embeddings), ("tgt_embed", vocab_size))
    }
    for name, module in list(model.named_modules()):
        if isinstance(module, Embedding):
            weight = part_of(f"{name}.lookup.weight", module.lookup.weight)
            module.lookup = _SplitLookup(weight, vocabs[name])  # type: ignore[assignment]
        elif isinstance(module, Attention):
            module.heads //= world
        elif isinstance(module, nn.Linear) and (how := cut_of(f"{name}.weight")):
            weight = part_of(f"{name}.weight", module.weight)
            bias = part_of(f"{name}.bias", module.bias)
            if name == "generator":  # the loss reads it
                module.weight, module.bias, module.out_features = weight, bias, len(weight)
                continue
            split = _SplitOutputs if how.axis == 0 else _SplitInputs
            outer, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(outer), own_name, split(weight, bias, group))
    return vocabs["tgt_embed"]


def split_time_steps(model: EncoderDecoder, group: ProcessGroup | None) -> None:
    """Lets each rank of the group compute its own time steps of `model(src, tgt)`, in place, by hooks.

    Every rank gives the whole batch and receives `split_time(model(src, tgt), group)`, in contiguous order. Each layer
    joins keys and values over the ranks, everything else is this rank's time steps alone. Gradients are of this rank's
    part of the loss: their sum over the ranks is the model's.
    """
    if world_size(group) == 1:
        return
    split = _TimeSteps(group)
    model.register_forward_pre_hook(split.begin, with_kwargs=True)
    for name, module in model.named_modules():
        side = "src" if name.startswith(("src_", "encoder.")) or name.endswith("memory_attention.key_value") else "tgt"
        if isinstance(module, Embedding):
            module.register_forward_pre_hook(split.embed_own(side))
        elif name.endswith(".key_value"):
            module.register_forward_hook(split.join(side))


class _TimeSteps:
    """The hooks of `split_time_steps`, and the lengths of the batch at hand, which they need."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.sizes: dict[str, list[int]] = {}

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(zip(("src", "tgt", "src_mask", "tgt_mask"), args, strict=False)) | kwargs
        self.sizes = {side: part_sizes(given[side].size(1), world_size(self.group)) for side in ("src", "tgt")}
        tgt, mask = given["tgt"], given.get("tgt_mask")
        # This rank's queries look at all keys: which of them are later is no longer a matter of its shape
        given["tgt_mask"] = subsequent_mask(tgt.size(1), tgt.device) if mask is None else mask
        for name, sides in (("src_mask", ("src", "tgt")), ("tgt_mask", ("tgt",))):
            given[name] = self._own_queries(name, given.get(name), {side: given[side].size(1) for side in sides})
        return (), given

    def _own_queries(self, name: str, mask: Tensor | None, times: dict[str, int]) -> Tensor | None:
        """The rows of a mask that belong to this rank's time steps, where it has a row for each one of `times`."""
        if mask is None or mask.dim() != 4 or mask.size(2) == 1:  # the model itself refuses what it would misread
            return mask
        if set(times.values()) != {mask.size(2)}:
            steps = " and ".join(f"{side} has {time} time steps" for side, time in times.items())
            raise ValueError(
                f"{name} has {mask.size(2)} rows of queries, but {steps}: pass a row for each step that looks through "
                "it, or one for all of them"
            )
        start, stop = self._own("tgt")
        return mask[:, :, start:stop]

    def embed_own(self, side: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            start, stop = self._own(side)
            return args[0][:, start:stop], start

        return hook

    def join(self, side: str) -> Any:
        def hook(_: nn.Module, __: Any, output_BtD: Tensor) -> Tensor:
            return join_from_group(output_BtD, self.sizes[side], 1, self.group)

        return hook

    def _own(self, side: str) -> tuple[int, int]:
        sizes, rank = self.sizes[side], rank_in(self.group)
        return sum(sizes[:rank]), sum(sizes[: rank + 1])


class _SplitLookup(nn.Module):
    """Rows of an embedding: those of other ranks' subwords arrive in the sum."""

    def __init__(self, weight_vD: nn.Parameter, vocab: seqpar.VocabShard) -> None:
        super().__init__()
        self.weight = weight_vD
        self.vocab = vocab

    def forward(self, tokens: Tensor) -> Tensor:
        index, owned = self.vocab.locate(tokens, len(self.weight))
        return sum_from_group(F.embedding(index, self.weight) * owned.unsqueeze(-1), self.vocab.group)


class _Split(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group


class _SplitOutputs(_Split):
    """Some of a linear map's outputs; the input is the same on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(copy_to_group(x, self.group), self.weight, self.bias)


class _SplitInputs(_Split):
    """A linear map of inputs that lie on several ranks; the output is whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return sum_from_group(F.linear(x, self.weight), self.group) + self.bias


def _check_divisible(model: EncoderDecoder, world: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.heads % world:
            raise ValueError(
                f"{name} has {module.heads} heads, which do not divide by {world} ranks; choose a number of ranks that "
                "divides the heads"
            )
        if isinstance(module, nn.Embedding) and module.num_embeddings < world:
            raise ValueError(f"{name} has {module.num_embeddings} rows for {world} ranks; choose fewer ranks")
        if isinstance(module, FeedForward) and module.inner.out_features < world:
            raise ValueError(f"{name} has {module.inner.out_features} units for {world} ranks; choose fewer ranks")
