"""Every objective keeps to `training.chunk_tokens`: the logits of no more tokens exist at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from models import EncoderDecoder
from recipes.translation.settings.training import TrainingConfig
from recipes.translation.training.objective import Objective, Teacher
from tests.models.examples import EOS, random_batch, small_transformer

CHUNK, VOCAB = 9, 41
SETTINGS = TrainingConfig(chunk_tokens=CHUNK, teacher_weight=0.5)


def made(kind: str, settings: TrainingConfig) -> Objective:
    """The objective, with what else it needs."""
    if kind == "teacher":
        return Objective(settings, Teacher(small_transformer(9, VOCAB, d_model=2, heads=2), [torch.device("cpu")]))
    return Objective(settings)


class Largest(TorchFunctionMode):
    """Note the most rows of a tensor as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.size(-1) == VOCAB:
            self.rows = max(self.rows, result.numel() // result.size(-1))
        return result


def rows_at_once(kind: str, model: EncoderDecoder, settings: TrainingConfig) -> int:
    """The most tokens whose logits exist at once in the loss of a batch and its gradient."""
    torch.manual_seed(0)
    src, tgt = random_batch(1), random_batch(2)
    one = made(kind, settings)
    found = one.passes(model)(src, tgt)
    hidden, more = found if isinstance(found, tuple) else (found, {})
    target = tgt.roll(-1, 1).where(tgt != EOS, EOS)
    loss = one.loss(model, None, None)
    # The first call asks the pair about rows of its own
    loss(hidden.detach().requires_grad_(), target, **more)
    with Largest() as largest:
        loss(hidden, target, **more).total.backward()
    return largest.rows


@pytest.mark.parametrize("kind", ["usual", "teacher"])
def test_no_objective_has_more_logits_at_once_than_it_is_told(kind: str) -> None:
    model = small_transformer(
        1, VOCAB, d_model=2, heads=2, dropout=0.1
    )  # narrower than a chunk: its weights are no logits
    # One more, of a buffer that is not filled
    assert rows_at_once(kind, model, SETTINGS) <= CHUNK + 1
    assert rows_at_once(kind, model, replace(SETTINGS, chunk_tokens=None)) > CHUNK + 1
