"""Sequence models in plain torch, to be read, edited and trained; they are not part of the installed library."""

from models.attention import Attention, padding_mask, subsequent_mask
from models.cache import DecoderCache
from models.decoding import Hypothesis, beam_search, default_limit, evaluating, greedy, length_normaliser
from models.presets import PRESETS, RecurrentConfig, TransformerConfig
from models.recurrent import make_recurrent
from models.transformer import (
    EncoderDecoder,
    Generator,
    make_transformer,
    sinusoidal_positions,
)

__all__ = [
    "PRESETS",
    "Attention",
    "DecoderCache",
    "EncoderDecoder",
    "Generator",
    "Hypothesis",
    "RecurrentConfig",
    "TransformerConfig",
    "beam_search",
    "default_limit",
    "evaluating",
    "greedy",
    "length_normaliser",
    "make_recurrent",
    "make_transformer",
    "padding_mask",
    "sinusoidal_positions",
    "subsequent_mask",
]
