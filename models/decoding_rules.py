"""Rules of decoding: which tokens a translation must, or must not, continue with.

A rule sets the logits of the tokens it forbids to -inf, given the prefixes so far. The softmax's sum is taken before:
a forbidden token's probability is not redistributed to the others, and log-probabilities remain those of the model.
A translation must satisfy all rules of a search.

Shapes: R prefixes, T time so far with the start symbol, W n-grams of a prefix, P forced tokens, B sentences, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from models.ensemble import Batch


class Task(NamedTuple):
    """What a rule is checked against before a search begins."""

    limits: list[int]
    """The largest number of steps of each sentence."""
    vocab: int
    pad: int
    bos: int
    eos: int

    @classmethod
    def of(cls, batch: Batch, eos: int) -> Task:
        """Return the task of translating a batch."""
        model = batch.models[0]
        return cls(batch.limits, model.generator.out_features, model.pad, batch.bos, eos)

    def forbidden(self, rules: Sequence[Rule]) -> Forbidden:
        """Check the rules; return what no step may choose: padding, the start symbol and what the rules forbid."""
        for rule in rules:
            rule.check(self)
        return Forbidden(sorted({self.pad, self.bos} - {self.eos}), rules)


class Rule(Protocol):
    """What a search needs from a rule."""

    def check(self, task: Task) -> None:
        """Raise ValueError if no translation can satisfy the rule."""

    def forbid(self, logits_RV: Tensor, prefixes_RT: Tensor, sentences_R: Tensor) -> None:
        """Set the logits of the tokens that a prefix must not continue with to -inf, in place.

        The prefixes contain the start symbol. `sentences_R` is the row of `src` that each prefix translates.
        """


class DeadEndError(ValueError):
    """After each prefix of a sentence that the search has kept, every token is forbidden or has a bias of -inf."""

    def __init__(self, sentence: int) -> None:
        super().__init__(
            f"the rules leave src[{sentence}] without a translation: at some step they, or an output bias of -inf, "
            "forbid every token; loosen one"
        )
        self.sentence = sentence


@dataclass(frozen=True)
class MinimumLength:
    """Forbid the end symbol until a translation has `tokens` tokens, not counting start and end symbols."""

    tokens: int
    eos: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"the minimum length is {self.tokens}, below 0: 0 sets no minimum")

    def check(self, task: Task) -> None:
        """Raise ValueError if a sentence has too few steps for that many tokens and the end symbol."""
        if self.eos != task.eos:
            raise ValueError(f"the rule's end symbol is {self.eos}, the search's {task.eos}: give both the same")
        for sentence, limit in enumerate(task.limits):
            if limit <= self.tokens:
                raise ValueError(
                    f"the minimum length is {self.tokens}, but src[{sentence}] has {limit} steps, the last of them "
                    "for the end symbol: raise max_length"
                )

    def forbid(self, logits_RV: Tensor, prefixes_RT: Tensor, sentences_R: Tensor) -> None:
        """Forbid the end symbol while the prefixes are too short."""
        if prefixes_RT.size(1) - 1 < self.tokens:
            logits_RV[:, self.eos] = -math.inf


@dataclass(frozen=True)
class NoRepeatedNgrams:
    """Forbid a token that would complete a sequence of `size` tokens that the translation already contains."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of n-grams is {self.size}, below 1: 1 lets no token occur twice")

    def check(self, task: Task) -> None:
        """Accept every task: a translation that ends repeats nothing."""

    def forbid(self, logits_RV: Tensor, prefixes_RT: Tensor, sentences_R: Tensor) -> None:
        """Forbid what followed each earlier occurrence of the last `size` - 1 tokens."""
        tokens_RT = prefixes_RT[:, 1:]
        if tokens_RT.size(1) < self.size:
            return
        ngrams_RWN = tokens_RT.unfold(1, self.size, 1)
        last_R1N = tokens_RT[:, None, tokens_RT.size(1) - self.size + 1 :]
        row_M, ngram_M = (ngrams_RWN[:, :, :-1] == last_R1N).all(-1).nonzero(as_tuple=True)
        logits_RV[row_M, ngrams_RWN[row_M, ngram_M, -1]] = -math.inf


class ForcedPrefixes:
    """Make each sentence's translation begin with given tokens: a list of ids for each row of `src`, possibly empty."""

    def __init__(self, prefixes: Sequence[Sequence[int]]) -> None:
        self.prefixes = [list(prefix) for prefix in prefixes]
        longest = max(map(len, self.prefixes), default=0)
        padded = [[*prefix, *[-1] * (longest - len(prefix))] for prefix in self.prefixes]
        self._tokens_BP = torch.tensor(padded, dtype=torch.long).reshape(len(padded), longest)

    def check(self, task: Task) -> None:
        """Raise ValueError unless each sentence has a prefix of ordinary tokens that leaves it at least one step."""
        if len(self.prefixes) != len(task.limits):
            raise ValueError(
                f"{len(self.prefixes)} prefixes were given for {len(task.limits)} sentences: give one for each, "
                "[] for none"
            )
        for sentence, (prefix, limit) in enumerate(zip(self.prefixes, task.limits, strict=True)):
            check_tokens_of(f"the prefix of src[{sentence}]", prefix, task)
            if len(prefix) >= limit:
                raise ValueError(
                    f"the prefix of src[{sentence}] has {len(prefix)} tokens, but the sentence has {limit} steps, the "
                    "last of them for the end symbol: raise max_length"
                )

    def forbid(self, logits_RV: Tensor, prefixes_RT: Tensor, sentences_R: Tensor) -> None:
        """Forbid all tokens but the given one in each sentence whose prefix is not complete."""
        step = prefixes_RT.size(1) - 1
        if step >= self._tokens_BP.size(1):
            return
        forced_R = self._tokens_BP[:, step].to(logits_RV.device)[sentences_R]
        rows_M = (forced_R >= 0).nonzero()[:, 0]
        tokens_M = forced_R[rows_M]
        kept_M = logits_RV[rows_M, tokens_M]
        logits_RV[rows_M] = -math.inf
        logits_RV[rows_M, tokens_M] = kept_M


def check_tokens_of(what: str, tokens: Sequence[int], task: Task) -> None:
    """Raise ValueError for a token outside the vocabulary, and for padding and the start and end symbols."""
    for token in tokens:
        if not 0 <= token < task.vocab:
            raise ValueError(f"{what} contains token {token}, outside the vocabulary of {task.vocab}")
        if token in (task.pad, task.bos, task.eos):
            raise ValueError(f"{what} contains token {token}, which is padding, start or end symbol: leave it out")


class Forbidden(NamedTuple):
    """What a step of a search must not choose: some symbols always, other tokens by rules."""

    symbols: list[int]
    rules: Sequence[Rule] = ()

    def mask(self, logits_RV: Tensor, prefixes_RT: Tensor, sentences: Sequence[int]) -> None:
        """Set the logits of all forbidden tokens to -inf, in place.

        `sentences` may have one entry for several consecutive prefixes.
        """
        logits_RV[:, self.symbols] = -math.inf
        if not self.rules:
            return
        sentences_R = torch.tensor(sentences, device=logits_RV.device, dtype=torch.long)
        sentences_R = sentences_R.repeat_interleave(len(prefixes_RT) // max(1, len(sentences)))
        for rule in self.rules:
            rule.forbid(logits_RV, prefixes_RT, sentences_R)
