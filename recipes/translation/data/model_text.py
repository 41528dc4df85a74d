"""Text as a model reads and writes it: in lower case, under a language tag, and back again."""

from __future__ import annotations

from recipes.translation.data.tags import tags_of, with_language_tag
from recipes.translation.settings.config import RunConfig


def source_text(config: RunConfig, sentence: str) -> str:
    """Return a sentence as the model reads it."""
    tags, rest = _tags_and_rest(config, sentence)
    if config.subwords.lowercase:
        rest = rest.lower()
    return with_language_tag(config, tags + rest)


def target_text(config: RunConfig, translation: str) -> str:
    """Return a translation, or a part of one, as the model would have written it."""
    if config.subwords.lowercase:
        return translation.lower()
    return translation


def one_line(text: str) -> str:
    """Replace line breaks by blanks: a model that spells its output in bytes can produce any of Unicode's."""
    return " ".join(text.splitlines())


def _tags_and_rest(config: RunConfig, sentence: str) -> tuple[str, str]:
    """Split a sentence after the tags at its beginning, which may have capitals."""
    known = tags_of(config)
    rest = sentence
    while rest.split(maxsplit=1)[:1] and rest.split(maxsplit=1)[0] in known:
        tag = rest.split(maxsplit=1)[0]
        rest = rest[rest.index(tag) + len(tag) :]
    return sentence[: len(sentence) - len(rest)], rest
