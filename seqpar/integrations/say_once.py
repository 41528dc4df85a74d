"""Say once in a trainer's log that this library computes its loss, and at what cost."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from seqpar.core.chunks import rows_per_chunk

_said: set[str] = set()
"""The trainers whose log already has the line."""


def say_once(
    trainer: str, log: Callable[[str], object], weight: Tensor, chunk_tokens: int | None = None, scores: bool = False
) -> None:
    """Log that the loss is ours, its matrix products and the tokens per chunk, once per process and trainer.

    Args:
        log: the trainer's own function, such as `logger.info`.
        weight: the projection onto the vocabulary, (V, D).
        chunk_tokens: the user's setting; None means what the library chooses.
        scores: whether scores, whose loss is known only in backward, are computed instead of a loss.
    """
    if trainer in _said:
        return
    _said.add(trainer)
    rows = chunk_tokens or rows_per_chunk(weight.size(0), weight.dtype, weight.device.type)
    products = 2 + (1 + scores) * weight.requires_grad
    what = "scores" if scores else "loss"
    log(f"seqpar computes the {what} in {trainer}: {products} products, at most {rows:,} tokens a chunk")
