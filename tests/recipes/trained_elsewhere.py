"""Subwords that sentencepiece's own trainer makes, with options that ours does not have."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import sentencepiece

from recipes.translation.text.subwords import BOS, EOS, PAD, UNK

OUR_IDS = {"pad_id": PAD, "unk_id": UNK, "bos_id": BOS, "eos_id": EOS}


def trained_elsewhere(sentences: Iterable[str], **options: Any) -> bytes:
    """The file of a model of these sentences."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, num_threads=1, minloglevel=2, **options
    )
    return model.getvalue()
