"""Encoding of sentences in groups of similar length, so that little padding is computed.

Shapes: B sentences, S source time, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.transformer import EncoderDecoder

GROUP_SIZE = 24
"""Sentences in a group."""


def encode(model: EncoderDecoder, src: Tensor) -> Tensor:
    """Compute `model.encode(src)`, except that on the CPU the memory of padding may be 0: (B, S, D)."""
    if src.device.type != "cpu" or len(src) <= GROUP_SIZE or not src.size(1):
        return model.encode(src)
    position_S = torch.arange(1, src.size(1) + 1)
    # The last real token ends a sentence; one of padding alone has length 1
    length_B = (position_S * (src != model.pad)).amax(1).clamp(min=1)
    rows = length_B.argsort().split(GROUP_SIZE)
    found = [model.encode(src[some, : int(length_B[some].max())]) for some in rows]
    memory_BSD = found[0].new_zeros(*src.shape, found[0].size(2))
    for some, memory in zip(rows, found, strict=True):
        memory_BSD[some, : memory.size(1)] = memory
    return memory_BSD
