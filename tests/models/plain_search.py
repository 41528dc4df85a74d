"""The searches once more, as plainly as can be: one sentence, no cache, lists in place of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from models import EncoderDecoder, Hypothesis
from models.hypotheses import LengthNorm
from tests.models.examples import BOS, EOS, PAD

Allowed = Callable[[list[int], int], bool]
"""Whether a prefix, without start symbol, may be followed by a token."""


def anything(prefix: list[int], token: int) -> bool:
    return True


@torch.no_grad()
def next_log_probabilities(models: Sequence[EncoderDecoder], src: list[int], prefix: list[int]) -> list[float]:
    """The logarithm of the models' mean probability of each token after a prefix."""
    ids = torch.tensor([[BOS, *prefix]])
    found = [model.generator(model(torch.tensor([src]), ids))[0, -1].softmax(-1) for model in models]
    return (sum(found) / len(found)).log().tolist()


def total_of(models: Sequence[EncoderDecoder], src: list[int], found: Hypothesis, limit: int) -> float:
    """The sum of a translation's log-probabilities, with that of its end unless it has `limit` tokens."""
    ids = [*found.tokens, EOS][:limit]
    return sum(next_log_probabilities(models, src, ids[:step])[token] for step, token in enumerate(ids))


def divisor(length: int, alpha: float, norm: LengthNorm) -> float:
    """The definition, once more."""
    return float(({"gnmt": (5 + length) / 6, "length": length}[norm]) ** alpha)


def plain_beam_search(
    models: EncoderDecoder | Sequence[EncoderDecoder],
    src: list[int],
    beam: int,
    n_best: int,
    alpha: float,
    limit: int,
    norm: LengthNorm = "gnmt",
    allowed: Allowed = anything,
) -> list[Hypothesis]:
    """The rule of `beam_search`, without stopping before `beam` have finished."""
    models = models if isinstance(models, Sequence) else [models]
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        extensions = []
        for prefix, score in live:
            for token, logp in enumerate(next_log_probabilities(models, src, prefix)):
                if token not in (PAD, BOS) and allowed(prefix, token):
                    extensions.append(([*prefix, token], score + logp))
        extensions.sort(key=lambda extension: -extension[1])
        by = divisor(length, alpha, norm)
        finished += [Hypothesis(ids[:-1], score / by, score) for ids, score in extensions[:beam] if ids[-1] == EOS]
        live = [extension for extension in extensions if extension[0][-1] != EOS][:beam]
        if len(finished) >= beam:
            live = []
            break
    rest = [Hypothesis(ids, score / by, score) for ids, score in live]
    return (sorted(finished, key=lambda h: -h.score) + rest)[:n_best]


def every_hypothesis(
    models: EncoderDecoder | Sequence[EncoderDecoder],
    src: list[int],
    limit: int,
    alpha: float,
    norm: LengthNorm = "gnmt",
    allowed: Allowed = anything,
) -> list[Hypothesis]:
    """All finished translations of up to `limit` steps; best first."""
    return best_first(every_total(models, src, limit, allowed), alpha, norm)


def best_first(totals: list[tuple[list[int], float]], alpha: float, norm: LengthNorm) -> list[Hypothesis]:
    """Translations with the sums of their log-probabilities, in the order of their scores."""
    found = [Hypothesis(ids, total / divisor(len(ids) + 1, alpha, norm), total) for ids, total in totals]
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def every_total(
    models: EncoderDecoder | Sequence[EncoderDecoder], src: list[int], limit: int, allowed: Allowed = anything
) -> list[tuple[list[int], float]]:
    """All finished translations of up to `limit` steps, with the sum of their log-probabilities."""
    models = models if isinstance(models, Sequence) else [models]
    real = [token for token in range(models[0].generator.out_features) if token not in (PAD, BOS, EOS)]
    found = []
    scored: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(limit):
        longer = []
        for prefix, score in scored:
            logp = next_log_probabilities(models, src, prefix)
            if allowed(prefix, EOS):
                found.append((prefix, score + logp[EOS]))
            longer += [([*prefix, token], score + logp[token]) for token in real if allowed(prefix, token)]
        scored = longer
    return found


def same(actual: list[list[Hypothesis]], expected: list[list[Hypothesis]], rel: float = 1e-11) -> None:
    """The same tokens in the same order, with the same scores."""
    assert [[h.tokens for h in row] for row in actual] == [[h.tokens for h in row] for row in expected]
    for got, want in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
        assert got.score == pytest.approx(want.score, rel=rel)
        assert got.log_probability == pytest.approx(want.log_probability, rel=rel)
