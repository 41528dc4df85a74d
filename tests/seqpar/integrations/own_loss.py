"""Whether a model's chunked loss is the model's own, by every way to ask for it.

outcome(model, batch, way) -> "exact", "refused: ..." or what is wrong
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from tests.seqpar.integrations.tiny_models import relative_error, taken, without_labels

WAYS = ("labels", "tuple", "function")
REFUSALS = (TypeError, ValueError, RuntimeError)


def seeded() -> None:
    """What is drawn in a forward (masks over time, skipped layers) is drawn again."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def asked(model: Any, batch: dict[str, Tensor], way: str, applied: Any) -> Tensor:
    if way == "labels":
        return model(**batch).loss
    if way == "tuple":
        return model(**batch, return_dict=False)[0]
    inputs, labels = without_labels(model, batch)
    return compute_loss_func(applied)(model(**inputs), labels)


def outcome(model: Any, batch: dict[str, Tensor], way: str) -> str:
    """In float32: losses within 1e-5 of each other, gradients within 1e-3 of the largest entry of each."""
    seeded()
    loss, expected = taken(model, model(**batch).loss)
    try:
        with apply_seqpar_loss(model, chunk_tokens=5) as applied:
            seeded()
            ours, found = taken(model, asked(model, batch, way, applied))
    except REFUSALS as error:
        model.zero_grad()
        message = str(error)
        if type(model).__name__ in message and "apply_seqpar_loss" in message and "\n" not in message:
            return f"refused: {message}"
        return f"{type(error).__name__} that is no refusal: {message}"
    if found.keys() != expected.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())}"
    error = relative_error(found, expected)
    if error < 1e-3 and abs(ours - loss) <= 1e-5 * max(1.0, abs(loss)):
        return "exact"
    return f"a loss of {ours} for {loss}, gradients off by {error}"
