"""One model, or several that translate together, and their state for the sentences of a batch.

The next token's probability in an ensemble is the mean of its probabilities in the models. A single model is an
ensemble of one.

Shapes: B sentences still decoding, K live beams, R = B x K rows, S source time, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from models.attention import padding_mask
from models.cache import DecoderCache
from models.hypotheses import default_limit
from models.transformer import EncoderDecoder, check_tokens

Models = EncoderDecoder | Sequence[EncoderDecoder]
"""A model, or the models of an ensemble, which have the same vocabularies and are on the same device."""


Start = int | Sequence[int]
"""The start symbol, or the tokens that every translation starts with, such as an end symbol and a language tag."""


def tokens_of(start: Start) -> list[int]:
    """Return the tokens of a start; raise ValueError for none."""
    if isinstance(start, int):
        return [start]
    if not start:
        raise ValueError("bos has no tokens: give the start symbol")
    return list(start)


SPLIT = "split_over_ranks"
"""The attribute that `models.sharding` sets on a model of which this rank has only a part: its vocabulary shard."""


def members(model: Models) -> list[EncoderDecoder]:
    """Return the models of an ensemble; raise ValueError for none, and for models that do not belong together.

    A model that is split over ranks is refused outside `models.sharding.whole_outputs`: its generator may have only
    some of the rows.
    """
    models = list(model) if isinstance(model, Sequence) else [model]
    if not models:
        raise ValueError("the ensemble has no models: give at least one")
    if any(hasattr(one, SPLIT) for one in models):
        raise ValueError(
            "the model is split over ranks: search within models.sharding.whole_outputs(model), where all ranks that "
            "split the vocabulary translate the same sentences"
        )
    first = facts_of(models[0])
    for number, other in enumerate(models[1:], start=1):
        for (name, here), there in zip(first.items(), facts_of(other).values(), strict=True):
            if here != there:
                raise ValueError(
                    f"model {number} of the ensemble has {name} {there}, model 0 has {here}: "
                    "an ensemble's models share their vocabularies and their device"
                )
    return models


def facts_of(model: EncoderDecoder) -> dict[str, object]:
    """Return what the models of an ensemble must have in common."""
    return {
        "source vocabulary": model.src_embed.lookup.num_embeddings,
        "target vocabulary": model.generator.out_features,
        "padding id": model.pad,
        "device": model.generator.weight.device,
    }


@contextmanager
def evaluating(model: Models) -> Iterator[None]:
    """Within the block, set eval mode and disable gradients; restore every module's mode afterwards.

    The searches do this themselves. A model in training mode may be in only one thread's block at a time.
    """
    # Recorded before anything changes, because Ctrl-C may arrive in between
    modes = [(module, module.training) for one in members(model) for module in one.modules()]
    try:
        for one in members(model):
            one.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def logits_of(models: Sequence[EncoderDecoder], hiddens: Sequence[Tensor]) -> Tensor:
    """Compute the logits of the next token in float32 or wider: (R, D) of each model -> (R, V).

    For several models the result is log (1/M sum_m softmax(logits_m)), the logarithm of their mean probability.
    """
    if len(models) == 1:
        return wide_logits(models[0], hiddens[0])
    total_RV = wide_logits(models[0], hiddens[0]).log_softmax(-1)
    for model, hidden_RD in zip(models[1:], hiddens[1:], strict=True):
        total_RV = total_RV.logaddexp(wide_logits(model, hidden_RD).log_softmax(-1))
    return total_RV - math.log(len(models))


def check_finite(values_R: Tensor, sentences: Sequence[int]) -> None:
    """Raise FloatingPointError for a row whose largest logit or sum is nan or inf; sentences have equally many rows.

    Any token may have such a value, and a search would compare it with the others as if it were meaningful.
    """
    spoiled_R = ~(values_R < math.inf)  # -inf is what forbidden tokens have
    if bool(spoiled_R.any()):
        row = int(spoiled_R.nonzero()[0])
        raise FloatingPointError(
            f"src[{sentences[row * len(sentences) // len(values_R)]}]: the model's logits are nan or inf: its weights "
            "are damaged, or its numbers too large for their dtype; look at model.state_dict(), or try float32"
        )


def wide_logits(model: EncoderDecoder, hidden_RD: Tensor) -> Tensor:
    """Compute one model's logits in float32 or wider."""
    logits_RV: Tensor = model.generator(hidden_RD)
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))


@dataclass
class Batch:
    """The sentences of a batch that are still being translated, as each model has encoded and decoded them."""

    models: list[EncoderDecoder]
    memories: list[Tensor]
    """(B, S, D), one for each model."""
    caches: list[DecoderCache]
    """One for each model."""
    mask: Tensor
    """(B, 1, 1, S), True = a real token."""
    sentences: list[int]
    """The row of each sentence in the caller's batch."""
    limits: list[int]
    """The largest number of decoding steps of each sentence."""
    bos: int
    """The token before the first one of a translation."""
    read: int
    """How many tokens of the start every model has read before `bos`."""

    @classmethod
    def encode(
        cls, models: list[EncoderDecoder], src: Tensor, max_length: int | Sequence[int] | None, start: Start
    ) -> Batch:
        """Encode the sentences, set each one's limit, and feed the models all of `start` but its last token."""
        check_tokens("src", src)
        limits = limits_of(models[0], src, max_length)
        *before, bos = tokens_of(start)
        batch = cls(
            models,
            [model.encode(src) for model in models],
            [model.decoder.empty_cache() for model in models],
            padding_mask(src, models[0].pad),
            list(range(src.size(0))),
            limits,
            bos,
            len(before),
        )
        for token in before:
            batch.next_hidden(torch.full((src.size(0),), token, device=src.device))
        return batch

    @property
    def step(self) -> int:
        """Return the number of steps decoded so far."""
        return self.caches[0].length - self.read

    def next_hidden(self, tokens_R: Tensor) -> list[Tensor]:
        """Decode each row's latest token: (R,) -> the hidden states that predict the next one, (R, D) of each model."""
        return [
            model.decode(memory, self.mask, tokens_R[:, None], cache=cache)[:, 0]
            for model, memory, cache in zip(self.models, self.memories, self.caches, strict=True)
        ]

    def keep(self, rows: list[int]) -> None:
        """Continue with these sentences only."""
        self.memories = [memory[rows] for memory in self.memories]
        self.mask = self.mask[rows]
        self.sentences = [self.sentences[row] for row in rows]
        self.limits = [self.limits[row] for row in rows]
        for cache in self.caches:
            cache.keep_sentences(torch.tensor(rows, device=self.mask.device, dtype=torch.long))

    def reorder(self, parents_BK: Tensor) -> None:
        """Let beam k of each sentence continue the history of its beam parents_BK[:, k]."""
        for cache in self.caches:
            cache.reorder(parents_BK)


def limits_of(model: EncoderDecoder, src: Tensor, max_length: int | Sequence[int] | None) -> list[int]:
    """Return the largest number of decoding steps of each sentence."""
    if max_length is None:
        # From each sentence's own length, so that the other sentences of the batch make no difference
        return [default_limit(length) for length in (src != model.pad).sum(1).tolist()]
    if not isinstance(max_length, Sequence):
        return [_limit(max_length, "max_length")] * src.size(0)
    if len(max_length) != src.size(0):
        raise ValueError(f"max_length has {len(max_length)} entries for {src.size(0)} sentences: give one for each")
    return [_limit(limit, f"max_length[{sentence}]") for sentence, limit in enumerate(max_length)]


def _limit(steps: int, name: str) -> int:
    """Return the number of steps; raise TypeError unless it is whole (a search would not end), ValueError below 1."""
    try:
        limit = index(steps)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name} is {steps!r:.60}; it must be a whole number") from None
    if limit < 1:
        raise ValueError(f"{name} is {limit}, below 1: allow at least one step")
    return limit
