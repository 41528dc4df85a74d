"""The data of a training run, as subword ids in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.bleu_tokenizers import check_tokenizer, tokenizer_for
from recipes.translation.data.corpora import check_training_data, load_corpora, mixture_of, tags_of, with_language_tag
from recipes.translation.data.noisy_batches import NoisyBatches
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import DataError, Pair, check_held_out, load_pairs
from recipes.translation.data.subwords import Subwords
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.noise import NoiseConfig


@dataclass(frozen=True)
class Corpus:
    """Training and validation data."""

    source: Subwords
    target: Subwords
    train: TokenBatches | NoisyBatches
    valid: TokenBatches
    valid_pairs: Sequence[Pair]
    tokenize: str
    """sacreBLEU's tokeniser for validation."""
    fingerprint: str
    """SHA-256 of all ids, without noise, which a resumed run compares."""


def load_corpus(config: RunConfig, ranks: Ranks = ALONE) -> Corpus:
    """Read the pairs, make or read the subwords on rank 0 for all ranks, and make the batches."""
    source, target = ranks.run_on_main(lambda: _prepared(config))
    return ranks.run_on_all(lambda: _read(config, source, target))


def _prepared(config: RunConfig) -> tuple[Subwords, Subwords]:
    """Return the subwords, after a check that validation data and its tokeniser are available."""
    check_training_data(config)
    tokenize = _tokenizer(config, check_held_out(config.data))
    if config.training.validate_bleu:
        check_tokenizer(tokenize)
    if tokenize != "13a":
        print(f"[data] BLEU by sacreBLEU's tokeniser {tokenize} (data.tokenize {config.data.tokenize})", flush=True)
    return prepare(config)


def _tokenizer(config: RunConfig, valid: Sequence[Pair]) -> str:
    return tokenizer_for(config.data.tokenize, config.data.target, [pair.target for pair in valid])


def _read(config: RunConfig, source: Subwords, target: Subwords) -> Corpus:
    train, train_ids = _training(config, source, target)
    pairs = load_pairs(config.data, "valid", config.subwords.lowercase)
    sources = source.encode([with_language_tag(config, pair.source) for pair in pairs])
    targets = target.encode([pair.target for pair in pairs])
    # Validation has every pair, or its scores would be of easier sentences
    settings = config.training
    valid = TokenBatches(sources, targets, batch_tokens=settings.batch_tokens, seed=settings.seed)
    if not len(valid):
        raise DataError("there is no pair to validate on; see data.valid")
    digest = hashlib.sha256()
    for ids in (train_ids, (sources, targets)):
        digest.update(repr(ids).encode())
    return Corpus(source, target, train, valid, pairs, _tokenizer(config, pairs), digest.hexdigest())


def _training(
    config: RunConfig, source: Subwords, target: Subwords
) -> tuple[TokenBatches | NoisyBatches, tuple[list[list[int]], list[list[int]]]]:
    """Return the batches of all training corpora, and the ids of both sides without noise."""
    settings = config.training
    corpora = load_corpora(config)
    sentences = [text for corpus, pairs in corpora for text in corpus.sources(pairs)]
    sources = source.encode(sentences)
    targets = target.encode([pair.target for _, pairs in corpora for pair in pairs])
    batches = TokenBatches(
        sources,
        targets,
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        max_length=settings.max_length,
        mixture=mixture_of(config, [len(pairs) for _, pairs in corpora]),
    )
    if not len(batches):
        raise DataError(f"no train pair is within training.max_length {settings.max_length}")
    if config.noise == NoiseConfig():
        return batches, (sources, targets)
    kept = [*tags_of(config), *config.subwords.symbols]
    noisy = NoisyBatches(batches, sentences, source, config.noise, max_length=settings.max_length, kept=kept)
    return noisy, (sources, targets)
