"""Make up the few labels that a Hugging Face model is checked with, and those that it gets in a training forward.

Shape suffixes: B batch, T time, R rows and L labels of the window, C its cells that hold a label, D hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from seqpar.core.chunks import rows_per_chunk
from seqpar.integrations.transformers_model import IGNORED

SPREAD_LABELS = 8
"""How many labels of a window are spread over the vocabulary."""

KEPT_LABELS = 4
"""How many labels per row a model gets once its settings have been checked; their loss is compared and discarded."""


def batch_shape(kwargs: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of sequences in a batch and their length, which is 0 if its arguments do not show it."""
    named = next(_token_ids(kwargs), None)
    if named is not None:
        return named.size(0), named.size(1)
    sizes = [value.size(0) for value in kwargs.values() if isinstance(value, Tensor) and value.dim() > 1]
    return (sizes or [2])[0], 0


def _token_ids(kwargs: Mapping[str, object]) -> Iterator[Tensor]:
    """Yield labels and other ids (B, T) of a batch, those closest to what is predicted first."""
    for name in ("labels", "decoder_input_ids", "input_ids"):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.dim() == 2:
            yield value


def window_rows(sequences: int) -> int:
    """Return how many rows the window of a batch has.

    A batch of one gets one row, as a model may treat it differently; but one row cannot show a mean over sequences.
    Otherwise the number differs from the batch's, so that a model that combines labels with its inputs fails the check.
    """
    if sequences == 1:
        return 1
    return 3 if sequences == 2 else 2


def made_up_labels(kwargs: Mapping[str, object], weight_VD: Tensor, vocab_size: int, special: set[int]) -> Tensor:
    """Return labels (R, L) for a check: the special ones, some spread over the vocabulary, and the batch's own.

    They are as long as the batch if that takes no more memory than a chunk of the loss, and in random order. The first
    row and the last have different lengths, and one label in the middle is ignored.
    """
    sequences, time = batch_shape(kwargs)
    rows = window_rows(sequences)
    needed = sorted({*special, *torch.linspace(0, vocab_size - 1, SPREAD_LABELS, device="cpu").long().tolist()})
    # Made-up logits, their copies, softmax and comparisons in float64 take about sixteen times their bytes
    most = rows_per_chunk(vocab_size, weight_VD.dtype, weight_VD.device.type) // (16 * rows)
    # With shifted labels nothing predicts the first column, and a third of a row is ignored
    length = max(min(time, most), 5, -(-3 * (len(needed) + 1) // (2 * rows)) + 2)
    kept_RL = torch.ones(rows, length, dtype=torch.bool, device="cpu")
    kept_RL[0, length // 2] = False
    if rows > 1:
        kept_RL[0, length - length // 3 :] = False
    kept_RL[:, 0] = False
    labels_RL = torch.full((rows, length), IGNORED, device="cpu")
    labels_RL[kept_RL] = _fill_labels(needed, kwargs, vocab_size, int(kept_RL.sum()))
    labels_RL[:, 0] = labels_RL[:, 1]
    return labels_RL


def _fill_labels(needed: list[int], kwargs: Mapping[str, object], vocab_size: int, cells: int) -> Tensor:
    """Return labels (C,): all needed ones, as many of the batch's as fit, and repetitions, in random order."""
    found = [ids.flatten() for ids in _token_ids(kwargs)]
    own = torch.cat(found).unique().tolist() if found else []
    more = [i for i in own if 0 <= i < vocab_size and i not in set(needed)]
    labels = torch.tensor(needed + more, device="cpu")[:cells]
    labels_C = labels[torch.arange(cells, device="cpu") % len(labels)]
    # So that neighbours differ irregularly, and a shift by any number of positions shows
    return labels_C[torch.randperm(cells, generator=torch.Generator().manual_seed(0), device="cpu")]
