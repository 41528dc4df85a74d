"""Draw small cases of a chunked, multi-device loss with hypothesis, including odd and tiny sizes.

A test takes whole cases, or pieces of them for its own model:

    @given(cases())                          # everything at once
    def test_my_loss(case): ...

    @given(st.data())                        # or piece by piece, for a model of your own
    def test_my_model(data):
        shape = data.draw(shapes())
        target = data.draw(targets(shape, vocab_size=11, padding=0))
        assert_same_loss(generator, data.draw(criteria(11, padding=0)), hidden, target,
                         devices=data.draw(device_lists()), **data.draw(chunkings(*shape)))

With `ranks=2`, `shapes`, `targets` and `cases` draw what `assert_same_loss(..., ranks=2)` can divide: at least as many
sentences as ranks, with ranks that do not all get the same number of tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import seqpar
from seqpar.rows.conventions import CONVENTIONS
from seqpar.testing.ranks import unequal_cuts

MOST_BATCH = 7
MOST_TIME = 9
MOST_DEVICES = 9
PADDING_FRACTIONS = [0.0, 0.3, 0.8, 1.0]
"""The possible fractions of tokens that are padding."""
SEEDS = st.integers(0, 2**16)


class Chunking(TypedDict):
    """The two settings that cut an engine's rows into chunks; at most one is not None."""

    chunk_tokens: int | None
    chunk_size: int | None


def shapes(
    most_batch: int = MOST_BATCH, most_time: int = MOST_TIME, ranks: int = 1
) -> st.SearchStrategy[tuple[int, int]]:
    """Draw the shape (batch, time) of the tokens, from (1, 1) up, with at least one sentence for each rank.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import shapes
        >>> find(shapes(), lambda shape: shape[1] > 3)
        (1, 4)
    """
    return st.tuples(st.integers(ranks, max(ranks, most_batch)), st.integers(1, most_time))


def lengths(batch: int, time: int) -> st.SearchStrategy[list[int]]:
    """Draw the number of tokens of each sentence, from 0 to `time`.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import lengths
        >>> find(lengths(2, 5), lambda drawn: drawn[1] > 3)
        [0, 4]
    """
    return st.lists(st.integers(0, time), min_size=batch, max_size=batch)


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, int]) -> Tensor:
    """Draw a mask (batch, time), True for tokens; padding is at the ends of sentences, scattered, or everywhere.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import masks
        >>> find(masks((1, 3)), lambda mask: not mask.any())
        tensor([[False, False, False]])
    """
    batch, time = shape
    # (1, T) < (B, 1): the first tokens of each sentence
    if draw(st.booleans()):
        return torch.arange(time) < torch.tensor(draw(lengths(batch, time))).unsqueeze(1)
    return torch.rand(shape, generator=_random(draw(SEEDS))) >= draw(st.sampled_from(PADDING_FRACTIONS))


@st.composite
def targets(draw: st.DrawFn, shape: tuple[int, int], vocab_size: int, padding: int = -100, ranks: int = 1) -> Tensor:
    """Draw int64 targets (batch, time) in [0, vocab_size), equal to `padding` exactly where a drawn mask is False.

    With several ranks one target may be changed, so that not all ranks have the same number of tokens.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import targets
        >>> find(targets((1, 3), vocab_size=11, padding=0), lambda target: not target.any())
        tensor([[0, 0, 0]])
    """
    return _unequal(_pad(shape, vocab_size, padding, draw(SEEDS)), draw(masks(shape)), padding, ranks)


def device_lists(device: str = "cpu", most: int = MOST_DEVICES) -> st.SearchStrategy[list[str] | None]:
    """Draw a list with the device repeated up to `most` times, possibly more than there are rows, or None for no list.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import device_lists
        >>> find(device_lists(), lambda devices: devices and len(devices) > 1)
        ['cpu', 'cpu']
    """
    return st.integers(0, most).map(lambda count: [device] * count or None)


@st.composite
def chunkings(draw: st.DrawFn, batch: int, time: int) -> Chunking:
    """Draw a chunk size in tokens, in time steps, or neither, from 1 to more than there are.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import chunkings
        >>> find(chunkings(2, 3), lambda chunking: chunking["chunk_size"])
        {'chunk_tokens': None, 'chunk_size': 1}
    """
    cut = draw(st.sampled_from(["none", "tokens", "time"]))
    chunking: Chunking = {"chunk_tokens": None, "chunk_size": None}
    if cut == "tokens":
        chunking["chunk_tokens"] = draw(st.integers(1, batch * time + 2))
    if cut == "time":
        chunking["chunk_size"] = draw(st.integers(1, time + 2))
    return chunking


@st.composite
def vocabulary_splits(draw: st.DrawFn, vocab_size: int, world: int, least: Literal[0, 1] = 0) -> list[int]:
    """Draw how many classes each of `world` ranks has; the numbers may differ and, if `least` is 0, may be 0.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import vocabulary_splits
        >>> find(vocabulary_splits(7, world=2), lambda split: split[0] > 2)
        [3, 4]
    """
    # Rank r has the classes from cut r to cut r + 1; if these are equal it has none
    cut = st.integers(least, vocab_size - least)
    cuts = sorted(draw(st.lists(cut, min_size=world - 1, max_size=world - 1, unique=bool(least))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, vocab_size], strict=True)]


@st.composite
def criteria(draw: st.DrawFn, vocab_size: int, padding: int = -100) -> nn.Module:
    """Draw a summing criterion that ignores `padding`: cross-entropy, a smoothing convention, or torch's.

    A convention is drawn only if there are enough classes for it and it can exclude the padding.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import criteria
        >>> find(criteria(11, padding=0), lambda criterion: isinstance(criterion, nn.CrossEntropyLoss)).reduction
        'sum'
    """
    conventions = [name for name, shares in CONVENTIONS.items() if shares.is_defined(vocab_size, padding)]
    eps = draw(st.sampled_from([0.0, 0.1, 0.9]))
    kind = draw(st.sampled_from(["cross-entropy", "torch's", "torch's, weighted", *conventions]))
    if kind == "cross-entropy":
        return seqpar.CrossEntropy(ignore_index=padding)
    for convention in conventions:
        if kind == convention:
            return seqpar.LabelSmoothing(eps, convention, ignore_index=padding)
    weight = None
    if kind == "torch's, weighted":
        weight = torch.linspace(0.5, 2, vocab_size, dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, ignore_index=padding, label_smoothing=eps, reduction="sum")


@dataclass(frozen=True)
class Case:
    """One loss to compute: its sizes, targets with padding, a device list and a chunk size.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import cases
        >>> case = find(cases(), lambda case: case.batch == 2)
        >>> case.hidden().shape[:-1] == case.targets().shape
        True
    """

    batch: int
    time: int
    width: int
    vocab_size: int
    padding: int
    """The ignored target."""
    padding_share: float
    devices: int
    """How many times the device is listed; 0 means no device list."""
    chunk_tokens: int | None
    chunk_size: int | None
    upstream: float
    """The factor of the summed loss before backward."""
    seed: int
    ranks: int = 1
    """How many ranks the targets can be divided among."""

    def targets(self) -> Tensor:
        """Return targets (batch, time) in [0, vocab_size), a fraction `padding_share` of which is ignored."""
        shape = (self.batch, self.time)
        drawn = _pad(shape, self.vocab_size, self.padding, self.seed)
        mask = torch.rand(shape, generator=_random(self.seed + 2)) >= self.padding_share
        return _unequal(drawn, mask, self.padding, self.ranks)

    def hidden(self) -> Tensor:
        """Return float64 hidden states (batch, time, width), a leaf."""
        random = _random(self.seed + 1)
        return torch.randn(self.batch, self.time, self.width, dtype=torch.float64, generator=random)

    def device_list(self, device: str = "cpu") -> list[str] | None:
        """Return the device, repeated; None if the case has no device list."""
        return [device] * self.devices or None


@st.composite
def cases(draw: st.DrawFn, max_devices: int = MOST_DEVICES, padding_is_a_class: bool = False, ranks: int = 1) -> Case:
    """Draw a case of at most 7 x 9 tokens, 2 to 13 classes (at least 3 if padding is a class) and `max_devices`.

    Example:
        >>> from hypothesis import find
        >>> from seqpar.testing.strategies import cases
        >>> find(cases(), lambda case: case.devices == 2).device_list()
        ['cpu', 'cpu']
    """
    batch, time = draw(shapes(ranks=ranks))
    # At least two classes besides the padding, so that a target has an alternative
    fewest = 2
    if padding_is_a_class:
        fewest = 3
    vocab_size = draw(st.integers(fewest, 13))
    padding = -100
    if padding_is_a_class or draw(st.booleans()):
        padding = draw(st.integers(0, vocab_size - 1))
    width = draw(st.integers(1, 6))
    return Case(
        batch=batch,
        time=time,
        width=width,
        vocab_size=vocab_size,
        padding=padding,
        padding_share=draw(st.sampled_from(PADDING_FRACTIONS)),
        devices=len(draw(device_lists(most=max_devices)) or []),
        upstream=draw(st.sampled_from([1.0, 1 / 7, -3.0, 0.0, 1e4])),
        seed=draw(SEEDS),
        ranks=ranks,
        **draw(chunkings(batch, time)),
    )


def _random(seed: int) -> torch.Generator:
    """Return a separate generator, which leaves torch's global random state alone."""
    return torch.Generator().manual_seed(seed)


def _unequal(drawn: Tensor, mask: Tensor, padding: int, ranks: int) -> Tensor:
    """Return the targets with padding where the mask is False; change one if all ranks have equally many tokens."""
    if ranks > 1:
        counts = {int(mask[first:end].sum()) for first, end in itertools.pairwise(unequal_cuts(len(mask), ranks))}
        mask[-1, -1] ^= len(counts) == 1
    return drawn.where(mask, padding)


def _pad(shape: tuple[int, int], vocab_size: int, padding: int, seed: int) -> Tensor:
    """Return random classes, none of them the padding (unless it is the only class)."""
    drawn = torch.randint(vocab_size, shape, generator=_random(seed))
    if 0 <= padding < vocab_size:
        drawn = drawn.where(drawn != padding, (padding + 1) % vocab_size)
    return drawn
