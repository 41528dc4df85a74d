"""Say once in a trainer's log that its loss is this library's, with what it costs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from seqpar.core.chunks import rows_per_chunk

_said: set[str] = set()
"""The trainers whose log has the line."""


def say_once(
    trainer: str, log: Callable[[str], object], weight: Tensor, chunk_tokens: int | None = None, scores: bool = False
) -> None:
    """Log that the loss is ours, its matrix products and the tokens of a chunk; in each process once for a trainer.

    Args:
        log: the trainer's own, such as `logger.info`.
        weight: the projection onto the vocabulary, (V, D).
        chunk_tokens: the user's setting; None is what the library chooses.
        scores: whether it computes scores, whose loss is known only in backward, instead of a loss.
    """
    if trainer in _said:
        return
    _said.add(trainer)
    rows = chunk_tokens or rows_per_chunk(weight.size(0), weight.dtype, weight.device.type)
    products = 2 + (1 + scores) * weight.requires_grad
    what = "scores" if scores else "loss"
    log(f"seqpar computes the {what} in {trainer}: {products} products, at most {rows:,} tokens a chunk")
