"""Text as a model reads and writes it: with placeholders, in lower case, under a language tag, and back again."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.translation.data.tags import tags_of, with_language_tag
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.placeholders import masked, masked_translation, restored


def source_text(config: RunConfig, sentence: str) -> str:
    """Return a sentence as the model reads it."""
    tags, rest = _tags_and_rest(config, sentence)
    text, _ = masked(rest, config.subwords.placeholders)
    if config.subwords.lowercase:
        text = text.lower()
    return with_language_tag(config, tags + text)


def target_text(config: RunConfig, translation: str, sentence: str) -> str:
    """Return a translation of the sentence, or a part of one, as the model would have written it."""
    _, rest = _tags_and_rest(config, sentence)
    text = masked_translation(translation, rest, config.subwords.placeholders)
    if config.subwords.lowercase:
        text = text.lower()
    return text


def finished(texts: Sequence[str], sentences: Sequence[str], config: RunConfig) -> list[str]:
    """Return the translations of the sentences, each as one line, with what its placeholders stand for."""
    found = []
    for text, sentence in zip(texts, sentences, strict=True):
        _, rest = _tags_and_rest(config, sentence)
        _, originals = masked(rest, config.subwords.placeholders)
        found.append(restored(_one_line(text), originals))
    return found


def _tags_and_rest(config: RunConfig, sentence: str) -> tuple[str, str]:
    """Split a sentence after the tags at its beginning, which have no placeholders (<2de>) and may have capitals."""
    known = tags_of(config)
    rest = sentence
    while rest.split(maxsplit=1)[:1] and rest.split(maxsplit=1)[0] in known:
        tag = rest.split(maxsplit=1)[0]
        rest = rest[rest.index(tag) + len(tag) :]
    return sentence[: len(sentence) - len(rest)], rest


def _one_line(text: str) -> str:
    """Replace line breaks by blanks: a model that spells its output in bytes can produce any of Unicode's."""
    return " ".join(text.splitlines())
