"""The data of a training run, as subword ids in batches."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.corpora import Corpora, CorpusSplit
from recipes.translation.data.drawn_batches import DrawnBatches, drawn_batches
from recipes.translation.data.mistakes import check_meant
from recipes.translation.data.model_text import OtherForm, check_known, source_text
from recipes.translation.data.prepare import prepare
from recipes.translation.data.token_store import LAYOUT, TokenStore, check_store, write_store
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.paths import expanded
from recipes.translation.text.pair import Pair
from recipes.translation.text.subwords import Subwords


@dataclass(frozen=True)
class ValidationSet:
    """Validation data of one pair of languages."""

    held_out: CorpusSplit
    batches: TokenBatches
    pairs: Sequence[Pair]
    """Their sources as `translate` takes them: under the tags of a corpus."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation data."""

    source: Subwords
    target: Subwords
    train: TokenBatches | DrawnBatches
    valid: Sequence[ValidationSet]
    """One, or that of several pairs of languages."""
    fingerprint: str
    """SHA-256 of all ids, without noise, and of draws where subwords are sampled, which a resumed run compares."""


def load_corpus(
    config: RunConfig,
    ranks: Ranks = ALONE,
    subwords_of: Callable[[Corpora], tuple[Subwords, Subwords]] = prepare,
    insist: bool = True,
) -> Corpus:
    """Read the pairs, make or read the subwords on rank 0 for all ranks (`subwords_of`), and make the batches.

    With `data.cache` one process of each machine tokenises the training pairs, and all of them map the result. Without
    `insist`, data that looks like a mistake is refused (`check_meant`).
    """
    # On every rank: data.path and data.cache may differ between machines
    corpora = ranks.run_on_all(lambda: Corpora(config))
    source, target = ranks.run_on_main(lambda: _prepared(corpora, subwords_of, insist))
    store = None
    if config.data.cache:
        store = _stored(corpora, source, target, ranks)
    return ranks.run_on_all(lambda: _read(corpora, source, target, store))


def _stored(corpora: Corpora, source: Subwords, target: Subwords, ranks: Ranks) -> Path:
    """Tokenise the training pairs into their folder of `data.cache`, unless it has them already; return the folder."""
    key = ranks.run_on_main(lambda: store_key(corpora, source, target))
    folder = Path(expanded(corpora.config.data.cache, "data.cache"), key)

    def prepare_on_each_machine() -> None:
        if ranks.local_rank > 0:
            return
        start = time.monotonic()
        if check_store(folder):
            print(f"[data] tokenised pairs of {folder} reused", flush=True)
            return
        form = OtherForm(target)
        each_corpus = (
            ((corpus.source(pair), pair) for pair in form.passing(pairs)) for corpus, pairs in corpora.each_corpus()
        )
        write_store(folder, each_corpus, source, target, corpora.config.training.threads or os.cpu_count() or 1)
        form.note("data", LEARNED)
        print(f"[data] tokenised pairs written to {folder} in {time.monotonic() - start:.1f} s", flush=True)

    ranks.run_on_all(prepare_on_each_machine)
    return folder


def _prepared(
    corpora: Corpora, subwords_of: Callable[[Corpora], tuple[Subwords, Subwords]], insist: bool
) -> tuple[Subwords, Subwords]:
    """Return the subwords, after a check that all data and the tokenisers of BLEU are available."""
    config = corpora.config
    if not insist:
        check_meant(corpora)
    corpora.check()
    tokenizers = [each.tokenizer for each in corpora.valid if config.training.validate_bleu]
    for tokenize in dict.fromkeys(tokenizers):
        if tokenize != "13a":
            print(f"[data] BLEU by sacreBLEU's tokeniser {tokenize} (data.tokenize {config.data.tokenize})", flush=True)
    corpora.read()  # before the subwords, which may be made from it
    source, target = subwords_of(corpora)
    check_known(config, source, target)
    if not config.data.cache:
        note_form(corpora, target)
    return source, target


LEARNED = "target sentences are learned"


def note_form(corpora: Corpora, target: Subwords) -> None:
    """Say how many target sentences the model learns in another form than they have."""
    form = OtherForm(target)
    for _, pairs in corpora.each_corpus():
        for pair in pairs:
            form.add(pair.target)
    form.note("data", LEARNED)


def _read(corpora: Corpora, source: Subwords, target: Subwords, store: Path | None) -> Corpus:
    ids: _Tokenised | TokenStore
    if store is None:
        ids = _tokenised(corpora, source, target)
        corpora.forget()
        digest = hashlib.sha256(repr((ids.sources, ids.targets)).encode())
    else:
        ids = TokenStore.open(store)
        digest = hashlib.sha256(ids.sha256.encode())
    settings = corpora.config.training
    mixture = corpora.mixture(ids.corpora)
    if mixture is not None:
        # Where one corpus ends and the next begins decides how often a pair is drawn
        digest.update(repr(ids.corpora).encode())
    train = TokenBatches(
        ids.sources,
        ids.targets,
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        max_length=settings.max_length,
        mixture=mixture,
        symbols=source.symbols,
    )
    if not len(train):
        raise DataError(f"no train pair is within training.max_length {settings.max_length}")
    batches = drawn_batches(corpora.config, train, source, target)
    if isinstance(batches, DrawnBatches) and batches.sampled:
        digest.update(repr(batches.probe()).encode())
    valid = [_validation_set(each, source, target) for each in corpora.valid]
    for each in valid:
        digest.update(repr((each.batches.sources, each.batches.targets)).encode())
    return Corpus(source, target, batches, valid, digest.hexdigest())


def _validation_set(held_out: CorpusSplit, source: Subwords, target: Subwords) -> ValidationSet:
    config = held_out.config
    pairs = held_out.spoken(held_out.pairs)
    # Validation has every pair, or its scores would be of easier sentences
    batches = TokenBatches(
        source.encode([source_text(config, pair.source) for pair in pairs]),
        target.encode([pair.target for pair in pairs]),
        batch_tokens=config.training.batch_tokens,
        seed=config.training.seed,
        symbols=source.symbols,
    )
    if not len(batches):
        raise DataError(f"there is no pair to validate on; see {held_out.setting}")
    return ValidationSet(held_out, batches, pairs)


class _Tokenised(NamedTuple):
    """The training pairs as ids in memory, and the number of pairs of each corpus."""

    sources: list[list[int]]
    targets: list[list[int]]
    corpora: list[int]


def _tokenised(corpora: Corpora, source: Subwords, target: Subwords) -> _Tokenised:
    found = _Tokenised([], [], [])
    for corpus, each_pair in corpora.each_corpus():
        pairs = list(each_pair)
        found.sources.extend(source.encode([corpus.source(pair) for pair in pairs]))
        found.targets.extend(target.encode([pair.target for pair in pairs]))
        found.corpora.append(len(pairs))
    return found


def store_key(corpora: Corpora, source: Subwords, target: Subwords) -> str:
    """Return the name of the tokenised training pairs in `data.cache`: a hash of all that they are made from."""
    config = corpora.config
    made_from = {
        "data": corpora.identity,
        "tags": [corpus.tags for corpus in corpora.training],
        "cleaning": asdict(config.cleaning),
        "lowercase": config.subwords.lowercase,
        "subwords": [source.digest, target.digest],
    }
    return hashlib.sha256(json.dumps([LAYOUT, made_from]).encode()).hexdigest()[:32]
