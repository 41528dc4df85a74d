"""Text as a model reads and writes it: with placeholders, in lower case, under a language tag, and back again."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.translation.data.corpora import tags_of, with_language_tag
from recipes.translation.data.placeholders import masked, masked_translation, restored
from recipes.translation.settings.config import RunConfig


def source_text(config: RunConfig, sentence: str) -> str:
    """Return a sentence as the model reads it."""
    text, _ = masked(sentence, config.subwords.placeholders)
    if config.subwords.lowercase:
        text = _lower(config, text)
    return with_language_tag(config, text)


def target_text(config: RunConfig, translation: str, sentence: str) -> str:
    """Return a translation of the sentence, or a part of one, as the model would have written it."""
    text = masked_translation(translation, sentence, config.subwords.placeholders)
    if config.subwords.lowercase:
        text = text.lower()
    return text


def finished(texts: Sequence[str], sentences: Sequence[str], config: RunConfig) -> list[str]:
    """Return the translations of the sentences, each as one line, with what its placeholders stand for."""
    found = []
    for text, sentence in zip(texts, sentences, strict=True):
        _, originals = masked(sentence, config.subwords.placeholders)
        found.append(restored(_one_line(text), originals))
    return found


def _lower(config: RunConfig, text: str) -> str:
    """Return the text in lower case, but for a tag in front, which may have capitals (<2zh-Hant>)."""
    tag, blank, rest = text.partition(" ")
    if tag in tags_of(config):
        return tag + blank + rest.lower()
    return text.lower()


def _one_line(text: str) -> str:
    """Replace line breaks by blanks: a model that spells its output in bytes can produce any of Unicode's."""
    return " ".join(text.splitlines())
