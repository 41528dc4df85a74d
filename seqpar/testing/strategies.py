"""Hypothesis strategies: small, bounded cases of a chunked, multi-device loss, odd and tiny sizes included.

@given(cases())                          # all of it at once
def test_my_loss(case): ...

@given(st.data())                        # or its parts, for a model of your own
def test_my_model(data):
    shape = data.draw(shapes())
    target = data.draw(targets(shape, vocab_size=11, padding=0))
    assert_same_loss(generator, data.draw(criteria(11, padding=0)), hidden, target,
                     devices=data.draw(device_lists()), **data.draw(chunkings(*shape)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import seqpar

MOST_BATCH, MOST_TIME, MOST_DEVICES = 7, 9, 9
SHARES = [0.0, 0.3, 0.8, 1.0]
"""Of tokens that are padding."""
SEEDS = st.integers(0, 2**16)


class Chunking(TypedDict):
    """How an engine cuts its rows: by one of the two, or as it chooses."""

    chunk_tokens: int | None
    chunk_size: int | None


def shapes(most_batch: int = MOST_BATCH, most_time: int = MOST_TIME) -> st.SearchStrategy[tuple[int, int]]:
    """(batch, time) of the tokens, from (1, 1) on."""
    return st.tuples(st.integers(1, most_batch), st.integers(1, most_time))


def lengths(batch: int, time: int) -> st.SearchStrategy[list[int]]:
    """How many tokens each sentence has, 0 and `time` included."""
    return st.lists(st.integers(0, time), min_size=batch, max_size=batch)


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, int]) -> Tensor:
    """(batch, time) bool, True where there is a token: padding behind each sentence, or scattered, or everywhere."""
    batch, time = shape
    if draw(st.booleans()):
        return torch.arange(time) < torch.tensor(draw(lengths(batch, time))).unsqueeze(1)
    return torch.rand(shape, generator=_random(draw(SEEDS))) >= draw(st.sampled_from(SHARES))


@st.composite
def targets(draw: st.DrawFn, shape: tuple[int, int], vocab_size: int, padding: int = -100) -> Tensor:
    """(batch, time) int64 in [0, vocab_size), `padding` where a drawn mask has none; other tokens are never it."""
    return _padded(shape, vocab_size, padding, draw(SEEDS)).where(draw(masks(shape)), padding)


def device_lists(device: str = "cpu", most: int = MOST_DEVICES) -> st.SearchStrategy[list[str] | None]:
    """The device, repeated up to `most` times, more often than there are rows included; or None, no device list."""
    return st.integers(0, most).map(lambda count: [device] * count or None)


@st.composite
def chunkings(draw: st.DrawFn, batch: int, time: int) -> Chunking:
    """Chunks by tokens, by time steps, or neither; from 1 to beyond the whole."""
    cut = draw(st.sampled_from(["none", "tokens", "time"]))
    return {
        "chunk_tokens": draw(st.integers(1, batch * time + 2)) if cut == "tokens" else None,
        "chunk_size": draw(st.integers(1, time + 2)) if cut == "time" else None,
    }


@st.composite
def vocabulary_splits(draw: st.DrawFn, vocab_size: int, world: int, least: Literal[0, 1] = 0) -> list[int]:
    """How many classes each of `world` ranks has: uneven ones and, with `least` 0, empty ones included."""
    cut = st.integers(least, vocab_size - least)
    cuts = sorted(draw(st.lists(cut, min_size=world - 1, max_size=world - 1, unique=bool(least))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, vocab_size], strict=True)]


@st.composite
def criteria(draw: st.DrawFn, vocab_size: int, padding: int = -100) -> nn.Module:
    """A summing criterion that ignores `padding`: cross-entropy, a smoothing convention, or torch's, weighted or not.

    "harvard" is among them where the padding is a class and others are left to share eps out; "fairseq" likewise.
    """
    conventions: list[Literal["torch", "fairseq", "harvard"]] = ["torch"]
    conventions += ["fairseq"] if vocab_size > 1 else []
    conventions += ["harvard"] if vocab_size > 2 and 0 <= padding < vocab_size else []
    eps = draw(st.sampled_from([0.0, 0.1, 0.9]))
    kind = draw(st.sampled_from(["cross-entropy", "torch's", "torch's, weighted", *conventions]))
    if kind == "cross-entropy":
        return seqpar.CrossEntropy(ignore_index=padding)
    for convention in conventions:
        if kind == convention:
            return seqpar.LabelSmoothing(eps, convention, ignore_index=padding)
    weight = torch.linspace(0.5, 2, vocab_size, dtype=torch.float64) if kind == "torch's, weighted" else None
    return nn.CrossEntropyLoss(weight, ignore_index=padding, label_smoothing=eps, reduction="sum")


@dataclass(frozen=True)
class Case:
    """One loss to compute: sizes, targets with padding, a device list and a way to cut chunks."""

    batch: int
    time: int
    width: int
    vocab_size: int
    padding: int
    """The ignored target."""
    padding_share: float
    devices: int
    """How many times the device is listed; 0 is no device list."""
    chunk_tokens: int | None
    chunk_size: int | None
    upstream: float
    """What the summed loss is multiplied by before backward."""
    seed: int

    def targets(self) -> Tensor:
        """(batch, time) targets in [0, vocab_size), `padding_share` of them ignored."""
        shape = (self.batch, self.time)
        drawn = _padded(shape, self.vocab_size, self.padding, self.seed)
        return drawn.where(torch.rand(shape, generator=_random(self.seed + 2)) >= self.padding_share, self.padding)

    def hidden(self) -> Tensor:
        """(batch, time, width) float64 hidden states, a leaf."""
        random = _random(self.seed + 1)
        return torch.randn(self.batch, self.time, self.width, dtype=torch.float64, generator=random)

    def device_list(self, device: str = "cpu") -> list[str] | None:
        """The device, repeated; None where the case has no device list."""
        return [device] * self.devices or None


@st.composite
def cases(draw: st.DrawFn, max_devices: int = MOST_DEVICES, padding_is_a_class: bool = False) -> Case:
    """Cases of at most 7 x 9 tokens, 2..13 classes (3.. where the padding is one of them) and `max_devices`."""
    batch, time = draw(shapes())
    vocab_size = draw(st.integers(3 if padding_is_a_class else 2, 13))
    inside = padding_is_a_class or draw(st.booleans())
    return Case(
        batch=batch,
        time=time,
        width=draw(st.integers(1, 6)),
        vocab_size=vocab_size,
        padding=draw(st.integers(0, vocab_size - 1)) if inside else -100,
        padding_share=draw(st.sampled_from(SHARES)),
        devices=len(draw(device_lists(most=max_devices)) or []),
        upstream=draw(st.sampled_from([1.0, 1 / 7, -3.0, 0.0, 1e4])),
        seed=draw(SEEDS),
        **draw(chunkings(batch, time)),
    )


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _padded(shape: tuple[int, int], vocab_size: int, padding: int, seed: int) -> Tensor:
    """Random classes, none of them the padding."""
    drawn = torch.randint(vocab_size, shape, generator=_random(seed))
    inside = vocab_size > 1 and 0 <= padding < vocab_size
    return drawn.where(drawn != padding, (padding + 1) % vocab_size) if inside else drawn
