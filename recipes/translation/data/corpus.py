"""The data of a training run, as subword ids in batches, and how long a sentence may be with learned positions."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models import TransformerConfig
from models.presets import ARCHITECTURES, Sizes
from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.corpora import Corpora, CorpusSplit
from recipes.translation.data.drawn_batches import DrawnBatches, drawn_batches
from recipes.translation.data.mistakes import check_meant
from recipes.translation.data.prepare import prepare
from recipes.translation.data.sentence_pairs import say_to_stderr
from recipes.translation.data.token_store import ENDS, IDS, Store
from recipes.translation.data.training_text import LAYOUT, write_ids
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.model_text import ModelText, check_known
from recipes.translation.text.pair import Pair
from recipes.translation.text.subwords import Subwords, Symbols


@dataclass(frozen=True)
class ValidationSet:
    """Validation data of one language pair."""

    held_out: CorpusSplit
    batches: TokenBatches
    pairs: Sequence[Pair]
    """With sources as `translate` takes them: with the corpus's tags in front."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation data."""

    source: Subwords
    target: Subwords
    train: TokenBatches | DrawnBatches
    valid: Sequence[ValidationSet]
    """One set for each language pair."""
    fingerprint: str
    """SHA-256 of all ids, and of sample draws if subwords are sampled; a resumed run compares it."""
    read: Sequence[str] = ()
    """What was read, a line for each corpus."""


def load_corpus(
    config: RunConfig,
    ranks: Ranks = ALONE,
    subwords_of: Callable[[Corpora], tuple[Subwords, Subwords]] = prepare,
    insist: bool = True,
) -> Corpus:
    """Read the pairs, make or read the subwords on rank 0 for all ranks (`subwords_of`), and make the batches.

    One process on each machine writes the training text and its ids if they do not exist yet; all processes map the
    result. Without `insist`, data that looks like a mistake is refused (`check_meant`).
    """
    # On every rank: data.path and data.cache may differ between machines
    corpora = ranks.run_on_all(lambda: Corpora(config))
    ranks.run_on_main(lambda: _check(corpora, insist))
    corpora.text_key = ranks.run_on_main(lambda: corpora.text_key)

    def on_each_machine(make: Callable[[], object]) -> None:
        ranks.run_on_all(lambda: None if ranks.local_rank else make())

    on_each_machine(lambda: corpora.text)
    source, target = ranks.run_on_main(lambda: _subwords(corpora, subwords_of))
    on_each_machine(lambda: stored_ids(corpora, source, target))
    return ranks.run_on_all(lambda: _open_corpus(corpora, source, target))


def _check(corpora: Corpora, insist: bool) -> None:
    """Check that all data and the tokenisers for BLEU are available."""
    config = corpora.config
    if not insist:
        check_meant(corpora)
    corpora.check()
    tokenizers = [each.tokenizer for each in corpora.valid if config.training.validate_bleu]
    for tokenize in dict.fromkeys(tokenizers):
        if tokenize != "13a":
            print(f"[data] BLEU by sacreBLEU's tokeniser {tokenize} (data.tokenize {config.data.tokenize})", flush=True)


def _subwords(
    corpora: Corpora, subwords_of: Callable[[Corpora], tuple[Subwords, Subwords]]
) -> tuple[Subwords, Subwords]:
    corpora.note_held_out()
    source, target = subwords_of(corpora)
    check_known(ModelText.of(corpora.config).tags, corpora.config.subwords.symbols, source, target)
    return source, target


def stored_ids(corpora: Corpora, source: Subwords, target: Subwords) -> Store:
    """Return the ids of the training pairs; write their files if there are none, and check them."""
    folder = ids_folder(corpora, source, target)
    start = time.monotonic()
    what = "reused"
    if not folder.exists():
        threads = corpora.config.training.threads or os.cpu_count() or 1
        write_ids(folder, corpora.text, [corpus.tags for corpus in corpora.training], (source, target), threads)
        what = f"written in {time.monotonic() - start:.1f} s"
    store = Store(folder).check({"source": len(source), "target": len(target)})
    size = f"{sum(store.corpora):,} training pairs, {store.size / 1e6:,.1f} MB of ids"
    print(f"[data] {size} in {folder} {what}", flush=True)
    for line in store.notices:
        say_to_stderr(line)
    return store


def _open_corpus(corpora: Corpora, source: Subwords, target: Subwords) -> Corpus:
    settings = corpora.config.training
    store = Store(ids_folder(corpora, source, target))
    digest = hashlib.sha256(json.dumps(store.digests).encode())
    mixture = corpora.mixture(store.corpora)
    if mixture is not None:
        # The boundaries between corpora determine how often a pair is drawn
        digest.update(repr(store.corpora).encode())
    train = TokenBatches(
        store.flat("source", IDS),
        store.flat("target", IDS),
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        max_length=settings.max_length,
        mixture=mixture,
        symbols=source.symbols,
    )
    if not len(train):
        raise DataError(f"no train pair is within training.max_length {settings.max_length}")
    batches = drawn_batches(corpora, train, source, target)
    if isinstance(batches, DrawnBatches):
        digest.update(repr(batches.probe()).encode())
    valid = [validation_set(each, source, target) for each in corpora.valid]
    for each in valid:
        for side in (each.batches.sources, each.batches.targets):
            digest.update(side.values.astype("<u4").tobytes() + side.ends.astype(ENDS).tobytes())
    said = _describe_corpora(corpora, store.corpora, train, valid)
    return Corpus(source, target, batches, valid, digest.hexdigest(), said)


def _describe_corpora(
    corpora: Corpora, sizes: Sequence[int], train: TokenBatches, valid: Sequence[ValidationSet]
) -> list[str]:
    """Return a line for each corpus: its files, languages and pairs and, if there are others, its share of an epoch."""
    counts = list(sizes)
    if train.mixture is not None:
        counts = train.mixture.counts(train.pairs_short_enough)
    found = []
    start = 0
    for corpus, size, count in zip(corpora.training, sizes, counts, strict=True):
        source, target = (side.start(start + size) - side.start(start) for side in (train.sources, train.targets))
        start += size
        share = f", {count / max(sum(counts), 1):.1%} of an epoch" if len(sizes) > 1 else ""
        found.append(f"{corpus.setting}: {corpus}: {size:,} pairs, {source:,} and {target:,} subwords{share}")
    return [*found, *(f"{each.held_out.setting}: {each.held_out}: {len(each.pairs):,} pairs" for each in valid)]


def validation_set(held_out: CorpusSplit, source: Subwords, target: Subwords) -> ValidationSet:
    settings, text = held_out.config.training, ModelText.of(held_out.config)
    pairs = held_out.tagged_pairs(held_out.pairs)
    # Validation keeps every pair, or its scores would be those of easier sentences
    batches = TokenBatches(
        source.encode([text.source(pair.source) for pair in pairs]),
        target.encode([pair.target for pair in pairs]),
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        symbols=source.symbols,
    )
    if not len(batches):
        raise DataError(f"there is no pair to validate on; see {held_out.setting}")
    return ValidationSet(held_out, batches, pairs)


def ids_folder(corpora: Corpora, source: Subwords, target: Subwords) -> Path:
    """Return the folder of the training pairs' ids, whose name is a hash of everything they are made from."""
    tags = [corpus.tags for corpus in corpora.training]
    made_from = [LAYOUT, corpora.text_key, tags, source.digest, target.digest]
    return corpora.cache / f"ids-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}"


def most_subwords(sizes: Sizes, symbols: Symbols) -> int | None:
    """Return the most subwords a sentence may have besides its symbols; None if positions are not learned."""
    if not isinstance(sizes, TransformerConfig) or ARCHITECTURES[sizes.architecture].positions != "learned":
        return None
    return sizes.max_positions - max(len(symbols.source([])), len(symbols.target([])) - 1)


def check_length(name: str, given: int, most: int | None) -> None:
    """Raise ConfigError for a setting, the most subwords of a sentence, above what a model has (`most_subwords`)."""
    if most is not None and given > most:
        raise ConfigError(
            f"{name} is {given}, but the model has learned positions for {most} subwords besides start and end "
            f"symbols: set it to {most} or less"
        )


def check_positions(lengths: Mapping[str, int], sizes: Sizes, corpus: Corpus) -> None:
    """Raise ConfigError or DataError if a sentence could have more tokens than the model has learned positions.

    `lengths` are the most subwords of a sentence, keyed by the settings that allow them.
    """
    most = most_subwords(sizes, corpus.source.symbols)
    for name, given in lengths.items():
        check_length(name, given, most)
    if most is None:
        return
    for valid in corpus.valid:
        for side, found in (("source", valid.batches.source_lengths), ("target", valid.batches.target_lengths)):
            if found.max() > most:
                raise DataError(
                    f"{valid.held_out.setting}: the {side} of pair {int(found.argmax()) + 1:,} has "
                    f"{int(found.max()):,} subwords, but the model has learned positions for {most:,}: split the "
                    "sentence, or leave it out"
                )
