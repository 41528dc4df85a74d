"""Sequence models in plain torch, to be read, edited and trained; they are not part of the installed library."""

from models.attention import Attention, padding_mask, subsequent_mask
from models.cache import DecoderCache
from models.constrained_search import constrained_beam_search
from models.constraints import Phrase
from models.decoder_only import make_decoder_only
from models.decoding import beam_search, greedy
from models.decoding_rules import DeadEndError, ForcedPrefixes, MinimumLength, NoRepeatedNgrams
from models.embedding import sinusoidal_positions
from models.ensemble import evaluating
from models.hypotheses import Hypothesis, default_limit, length_normaliser
from models.presets import PRESETS, DecoderOnlyConfig, TransformerConfig
from models.sampling import sample
from models.transformer import (
    EncoderDecoder,
    Generator,
    make_transformer,
)

__all__ = [
    "PRESETS",
    "Attention",
    "DeadEndError",
    "DecoderCache",
    "DecoderOnlyConfig",
    "EncoderDecoder",
    "ForcedPrefixes",
    "Generator",
    "Hypothesis",
    "MinimumLength",
    "NoRepeatedNgrams",
    "Phrase",
    "TransformerConfig",
    "beam_search",
    "constrained_beam_search",
    "default_limit",
    "evaluating",
    "greedy",
    "length_normaliser",
    "make_decoder_only",
    "make_transformer",
    "padding_mask",
    "sample",
    "sinusoidal_positions",
    "subsequent_mask",
]
