"""A student's training data: the sentences that its teacher translates, and the translations as its corpora."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from recipes.translation.data.corpora import Corpora
from recipes.translation.data.model_text import language_tags, tags_of
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import CorpusConfig, RunConfig

FOLDER = "translations"
"""Where a student's folder has the teacher's translations."""


def sentences_of(config: RunConfig, teacher: RunConfig) -> list[tuple[str, list[str]]]:
    """Read the sources of every training corpus, cleaned, each as often as it occurs, with the language tag of each.

    The tag is empty where the teacher has none.

    Raises ConfigError for a corpus whose language is none of those that the teacher translates into by its tags.
    """
    corpora = Corpora(config)
    corpora.check_training()
    found = []
    for corpus, pairs in corpora.each_corpus():
        tag = ""
        if teacher.data.language_tags:
            (tag,) = language_tags(teacher, corpus.data.target)
            if tag not in tags_of(teacher):
                raise ConfigError(
                    f"the target language of {corpus.name or 'train'} is {corpus.data.target}, and the teacher has no "
                    f"tag {tag}: it has {', '.join(tags_of(teacher))}"
                )
        found.append((tag, [pair.source for pair in pairs]))
    if not any(sources for _, sources in found):
        raise DataError("there is no training sentence to translate; see data.train")
    return found


def student_of(config: RunConfig, names: list[tuple[str, ...]]) -> RunConfig:
    """Return the settings with which the student is trained: the translations in place of the training data.

    Args:
        config: with the original training data.
        names: the two files of each training corpus.
    """
    originally = Corpora(config).training
    corpora = {}
    for corpus, files in zip(originally, names, strict=True):
        prefix = f"{corpus.name}." if corpus.name else ""
        corpora[f"{prefix}translations"] = CorpusConfig(
            train=files,
            format="text",
            path=str(Path(config.run) / FOLDER),
            source=corpus.data.source,
            target=corpus.data.target,
            weight=corpus.weight,
        )
    # Under their own names and without the teacher's translations, which are not references
    for name, corpus_config in config.corpora.items():
        if corpus_config.valid or corpus_config.test:
            corpora[name] = dataclasses.replace(corpus_config, train=(), weight=1.0)
    data = dataclasses.replace(config.data, train=())
    if data.format == "builtin" and all(corpus.data.format != "builtin" for corpus in originally):
        # The default of a run with corpora, by which it would be judged without test data of its own
        data = dataclasses.replace(data, format="text")
    return dataclasses.replace(config, data=data, corpora=corpora)
