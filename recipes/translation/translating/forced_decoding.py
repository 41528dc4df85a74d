"""Forced decoding: the probability that a model gives to translations that someone else made.

Shapes: B pairs, S source time, T target time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

import seqpar
from models import EncoderDecoder, length_normaliser
from recipes.translation.data.batches import padded
from recipes.translation.data.model_text import target_text
from recipes.translation.data.positions import most_subwords
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.translator import Translator, model_sizes
from recipes.translation.text.subwords import EOS, ORDINARY, PAD, Symbols
from recipes.translation.translating.in_batches import in_batches
from recipes.translation.translating.sentences import check_unicode, source_ids


class PairScore(NamedTuple):
    """The log-probability of a translation given its source, in nats."""

    log_prob: float
    """The sum over the translation's subwords and the end symbol."""
    tokens: int
    """Subwords of the translation, and the end symbol."""
    score: float
    """`log_prob` over the length normaliser of the search: what the search would report for these subwords."""

    @property
    def per_token(self) -> float:
        """Return the mean log-probability of a token; exp of minus this is the perplexity."""
        return self.log_prob / self.tokens


def score_pairs(
    translator: Translator, sources: Sequence[str], targets: Sequence[str], ranks: Ranks = ALONE, label: str = ""
) -> list[PairScore]:
    """Compute log p(target | source) of each pair, each rank some of the pairs.

    Sources are read as `translate` reads them, and cut where it cuts them; targets are never cut. `label` is as in
    `translate`. Raises DataError for text that is not Unicode.
    """
    config = translator.config
    source_rows = source_ids(translator.source, config, sources)
    target_rows = target_ids(translator, targets)
    check_lengths(translator, target_rows)

    def score_rows(rows: list[int]) -> list[float]:
        some_sources = [source_rows[row] for row in rows]
        some_targets = [target_rows[row] for row in rows]
        return log_probabilities(translator.model, some_sources, some_targets, translator.source.symbols)

    pairs = [[*source, *target] for source, target in zip(source_rows, target_rows, strict=True)]
    everyone = in_batches(translator, pairs, score_rows, ranks, label)
    scores = []
    for row, ids in enumerate(target_rows):
        norm = length_normaliser(len(ids), config.decoding.length_penalty, config.decoding.length_norm)
        scores.append(PairScore(everyone[row], len(ids), everyone[row] / norm))
    return scores


def target_ids(translator: Translator, targets: Sequence[str]) -> list[list[int]]:
    """Return the subwords of each target, and the end symbol."""
    check_unicode(targets)
    texts = [target_text(translator.config, target) for target in targets]
    return [[*ids, EOS] for ids in translator.target.encode(texts)]


def check_lengths(translator: Translator, target_rows: Sequence[Sequence[int]]) -> None:
    """Raise DataError for a target, with its end symbol, that is longer than the positions which the model learned."""
    most = most_subwords(model_sizes(translator.config.model), translator.source.symbols)
    for number, ids in enumerate(target_rows, start=1):
        if most is not None and len(ids) > most + 1:
            raise DataError(
                f"target {number:,} has {len(ids) - 1:,} subwords, and the model has learned positions for {most:,}: "
                "split the sentence, or leave it out"
            )


@torch.no_grad()
def log_probabilities(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    symbols: Symbols = ORDINARY,
) -> list[float]:
    """Compute sum_t log p(y_t | y_<t, x) of each pair of subword ids; the end symbol of x is added here, that of y not.

    Plain equivalent for one pair, with [x, EOS] and [BOS, y_1 ... y_{T-1}] as the model's inputs:

        model.generator(model(src, tgt)).log_softmax(-1).gather(-1, y[:, None]).sum()

    The logits exist one chunk of tokens at a time.
    """
    device = model.generator.weight.device
    src_BS = padded([symbols.source(ids) for ids in sources]).to(device)
    tgt_BT = padded([[*symbols.start, *ids[:-1]] for ids in targets]).to(device)
    target_BT = padded([list(ids) for ids in targets]).to(device)
    # The step that reads the last token of the start predicts the first subword
    hidden_BTD = model(src_BS, tgt_BT)[:, len(symbols.start) - 1 :]
    scores = seqpar.token_scores(
        hidden_BTD, model.generator.weight, target_BT, bias=model.generator.bias, ignore_index=PAD
    )
    found: list[float] = scores.log_prob.double().sum(1).tolist()
    return found
