"""The data of a training run, as subword ids in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.bleu_tokenizers import check_tokenizer, tokenizer_for
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import DataError, Pair, check_held_out, load_pairs
from recipes.translation.data.subwords import Subwords
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.settings.config import RunConfig


@dataclass(frozen=True)
class Corpus:
    """Training and validation data."""

    source: Subwords
    target: Subwords
    train: TokenBatches
    valid: TokenBatches
    valid_pairs: Sequence[Pair]
    tokenize: str
    """sacreBLEU's tokeniser for validation."""
    fingerprint: str
    """SHA-256 of all ids, which a resumed run compares."""


def load_corpus(config: RunConfig, ranks: Ranks = ALONE) -> Corpus:
    """Read the pairs, make or read the subwords on rank 0 for all ranks, and make the batches."""
    source, target = ranks.run_on_main(lambda: _prepared(config))
    return ranks.run_on_all(lambda: _read(config, source, target))


def _prepared(config: RunConfig) -> tuple[Subwords, Subwords]:
    """Return the subwords, after a check that validation data and its tokeniser are available."""
    tokenize = _tokenizer(config, check_held_out(config.data))
    if config.training.validate_bleu:
        check_tokenizer(tokenize)
    if tokenize != "13a":
        print(f"[data] BLEU by sacreBLEU's tokeniser {tokenize} (data.tokenize {config.data.tokenize})", flush=True)
    return prepare(config)


def _tokenizer(config: RunConfig, valid: Sequence[Pair]) -> str:
    return tokenizer_for(config.data.tokenize, config.data.target, [pair.target for pair in valid])


def _read(config: RunConfig, source: Subwords, target: Subwords) -> Corpus:
    settings = config.training
    digest = hashlib.sha256()
    batches = {}
    for split in ("train", "valid"):
        pairs = load_pairs(config.data, split, config.subwords.lowercase, config.cleaning)
        sources = source.encode([pair.source for pair in pairs])
        targets = target.encode([pair.target for pair in pairs])
        digest.update(repr((sources, targets)).encode())
        limit = None
        if split == "train":  # validation has every pair, or its scores would be of easier sentences
            limit = settings.max_length
        batches[split] = TokenBatches(
            sources, targets, batch_tokens=settings.batch_tokens, seed=settings.seed, max_length=limit
        )
        if not len(batches[split]):
            raise DataError(f"no {split} pair is within training.max_length {settings.max_length}")
    tokenize = _tokenizer(config, pairs)
    return Corpus(source, target, batches["train"], batches["valid"], pairs, tokenize, digest.hexdigest())
