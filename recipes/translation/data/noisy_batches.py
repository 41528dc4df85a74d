"""Batches of sentence pairs whose sources have noise, drawn anew in every epoch."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.translation.data.batches import Batch, Ids, TokenBatches, padded_batch
from recipes.translation.data.noise import noisy
from recipes.translation.data.subwords import Subwords
from recipes.translation.settings.config import ConfigError
from recipes.translation.settings.noise import NoiseConfig


class NoisyBatches:
    """The batches of `plain`, with noise in the source sentences.

    The noise is a function of (seed, epoch, pair), so that a run resumes in the middle of an epoch and every process
    draws the same. It is drawn when a batch is made, so nothing grows with the corpus; the batches are cut by the
    lengths without noise, and typing errors, which take more subwords, may bring a batch some percent above
    `batch_tokens`. A source of more than `max_length` subwords stays without noise.

    An index counts the pairs of all epochs, `epoch * pairs + pair`, so that `batch` knows which epoch is meant.

    Args:
        plain: the batches without noise.
        source: the subwords of sources.
        settings: the probabilities.
        max_length: of a source, in subwords.
        kept: tags and symbols, in which there is no noise.

    Raises:
        ConfigError: probabilities of errors in a letter that add up to more than 1.
    """

    def __init__(
        self,
        plain: TokenBatches,
        source: Subwords,
        settings: NoiseConfig,
        *,
        max_length: int,
        kept: Sequence[str],
    ) -> None:
        total = settings.swap + settings.drop + settings.double
        if total > 1:
            raise ConfigError(
                f"noise.swap {settings.swap:g}, noise.drop {settings.drop:g} and noise.double {settings.double:g} add "
                f"up to {total:g}: a letter has one of these errors at most, so make it 1 or less"
            )
        self.plain = plain
        self.source = source
        self.settings = settings
        self.max_length = max_length
        self.kept = kept

    def __len__(self) -> int:
        return len(self.plain)

    @property
    def dropped(self) -> int:
        """Return the number of pairs that are left out of every epoch, as longer than `max_length`."""
        return self.plain.dropped

    def epoch(self, number: int) -> list[list[int]]:
        """Return the batches of an epoch (0, 1, ...), each a list of indices."""
        first = number * len(self.plain.sources)
        return [[first + pair for pair in batch] for batch in self.plain.epoch(number)]

    def count(self, number: int) -> int:
        """Return the number of batches of an epoch."""
        return self.plain.count(number)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make the tensors of the pairs with these indices, in this order."""
        drawn = [divmod(index, len(self.plain.sources)) for index in indices]
        # Their text need not be kept: it comes back from the subwords as those who made them have read it
        clean = self.source.decode([list(self.plain.sources[pair]) for _, pair in drawn])
        texts = [
            noisy(text, self.settings, f"{self.plain.seed} {epoch} {pair}", self.kept)
            for text, (epoch, pair) in zip(clean, drawn, strict=True)
        ]
        sources: list[Ids] = []
        for ids, (_, pair) in zip(self.source.encode(texts), drawn, strict=True):
            if not 0 < len(ids) <= self.max_length:
                sources.append(self.plain.sources[pair])
            else:
                sources.append(ids)
        return padded_batch(sources, [self.plain.targets[pair] for _, pair in drawn])
