"""Hypothesis strategies: small, bounded cases of a chunked, multi-device loss, odd and tiny sizes included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


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
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.time)
        targets = torch.randint(self.vocab_size, shape, generator=generator)
        if 0 <= self.padding < self.vocab_size:
            targets = targets.where(targets != self.padding, (self.padding + 1) % self.vocab_size)
        return targets.where(torch.rand(shape, generator=generator) >= self.padding_share, self.padding)

    def hidden(self) -> Tensor:
        """(batch, time, width) float64 hidden states, a leaf."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.batch, self.time, self.width, dtype=torch.float64, generator=generator)

    def device_list(self, device: str = "cpu") -> list[str] | None:
        """The device, repeated; None where the case has no device list."""
        return [device] * self.devices or None


@st.composite
def cases(draw: st.DrawFn, max_devices: int = 9, padding_is_a_class: bool = False) -> Case:
    """Cases of at most 7 x 9 tokens, 2..13 classes (3.. where the padding is one of them) and `max_devices`."""
    batch, time = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    vocab_size = draw(st.integers(3 if padding_is_a_class else 2, 13))
    inside = padding_is_a_class or draw(st.booleans())
    cut = draw(st.sampled_from(["none", "tokens", "time"]))
    return Case(
        batch=batch,
        time=time,
        width=draw(st.integers(1, 6)),
        vocab_size=vocab_size,
        padding=draw(st.integers(0, vocab_size - 1)) if inside else -100,
        padding_share=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        devices=draw(st.integers(0, max_devices)),
        chunk_tokens=draw(st.integers(1, batch * time + 2)) if cut == "tokens" else None,
        chunk_size=draw(st.integers(1, time + 2)) if cut == "time" else None,
        upstream=draw(st.sampled_from([1.0, 1 / 7, -3.0, 0.0, 1e4])),
        seed=draw(st.integers(0, 2**16)),
    )
