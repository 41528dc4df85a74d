"""Distillation: a student learns from a teacher's translations of the training sentences, and from its predictions.

The first is sequence-level, the second word-level distillation (Kim and Rush 2016). The student's training sentences
are the teacher's, as corpora of their own, so that from then on it is a run like any other: it is resumed, evaluated
and exported by the same commands.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from recipes.translation.data.corpora import TrainingCorpus, check_training_data, corpora_of, language_tags, tags_of
from recipes.translation.data.sentence_pairs import each_training_pair
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.lock import sole_writer
from recipes.translation.run_folder.resume import check_others_stay
from recipes.translation.run_folder.teacher import teacher_folder, teacher_subwords
from recipes.translation.settings.config import CorpusConfig, RunConfig
from recipes.translation.train import train
from recipes.translation.training.summary import Summary, command
from recipes.translation.training.teacher_translations import write_translations

FOLDER = "translations"
"""Where a student's folder has the teacher's translations."""


class Sentences(NamedTuple):
    """The sentences of a training corpus, in the order of its files."""

    corpus: TrainingCorpus
    tag: str
    """The language tag in front of each; empty without."""
    sources: list[str]


def distil(config: RunConfig, originals: float, fresh: bool, ranks: Ranks) -> Summary:
    """Translate the training sentences by `config.training.teacher`, and train a student on the translations.

    Args:
        config: the student's settings, with the original training data.
        originals: the weight of the original pairs beside the translations; with 0 there are none of them.
        fresh: start the training over; translations are kept where they are made of the same.
        ranks: the processes, each of which calls this.
    """
    # Before the work of translating
    ranks.run_on_main(lambda: check_others_stay(config))
    ranks.run_on_main(lambda: teacher_subwords(config))
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    lock: AbstractContextManager[None] = nullcontext()
    if ranks.is_main:
        lock = sole_writer(Path(config.run))
    with ExitStack() as held:
        # On all ranks: where the folder is locked already, rank 0 raises, and the others must not wait for it
        ranks.run_on_all(lambda: held.enter_context(lock))
        names = translations_of(config, ranks)
    student = student_of(config, names, originals)
    return train(student, fresh=fresh, ranks=ranks)


def translations_of(config: RunConfig, ranks: Ranks) -> list[tuple[str, ...]]:
    """Translate the sentences of every training corpus by the teacher; return the names of its two files."""
    teacher = ranks.run_on_main(lambda: load_translator(teacher_folder(config.training.teacher)))
    if torch.cuda.is_available():
        teacher.model.to(torch.device("cuda", ranks.local_rank % torch.cuda.device_count()))
    found = ranks.run_on_main(lambda: sentences_of(config, teacher.config))
    folder = Path(config.run) / FOLDER
    names = []
    for number, (_, tag, sources) in enumerate(found, start=1):
        paths = write_translations(teacher, sources, folder, str(number), tag=tag, ranks=ranks)
        names.append(tuple(path.name for path in paths))
    return names


def sentences_of(config: RunConfig, teacher: RunConfig) -> list[Sentences]:
    """Read the sources of every training corpus, cleaned, each as often as it occurs.

    Raises ConfigError for a corpus whose language is none of those that the teacher translates into by its tags.
    """
    check_training_data(config)
    found = []
    for corpus in corpora_of(config):
        name = corpus.name or "train"
        pairs = each_training_pair(corpus.data, config.subwords.lowercase, config.cleaning, name)
        tag = ""
        if teacher.data.language_tags:
            (tag,) = language_tags(teacher, corpus.data.target)
            if tag not in tags_of(teacher):
                raise ConfigError(
                    f"the target language of {name} is {corpus.data.target}, and the teacher has no tag {tag}: it has "
                    f"{', '.join(tags_of(teacher))}"
                )
        found.append(Sentences(corpus, tag, [pair.source for pair in pairs]))
    if not any(sources for _, _, sources in found):
        raise DataError("there is no training sentence to translate; see data.train")
    return found


def student_of(config: RunConfig, names: list[tuple[str, ...]], originals: float) -> RunConfig:
    """Return the settings with which the student is trained: the translations in place of the training data.

    Args:
        config: with the original training data.
        names: the two files of each training corpus.
        originals: the weight of the original pairs, as a factor of each corpus's own.
    """
    corpora = {}
    for corpus, files in zip(corpora_of(config), names, strict=True):
        prefix = f"{corpus.name}." if corpus.name else ""
        corpora[f"{prefix}translations"] = CorpusConfig(
            train=files,
            format="text",
            path=str(Path(config.run) / FOLDER),
            source=corpus.data.source,
            target=corpus.data.target,
            weight=corpus.weight,
        )
        if originals:
            original = config.corpora.get(corpus.name) or CorpusConfig(config.data.train, format=config.data.format)
            weight = corpus.weight * originals
            corpora[f"{prefix}originals"] = dataclasses.replace(original, weight=weight, valid=(), test=())
    # Under their own names and without the teacher's translations, which are no references
    for name, corpus_config in config.corpora.items():
        if corpus_config.valid or corpus_config.test:
            corpora[name] = dataclasses.replace(corpus_config, train=(), weight=1.0)
    data = dataclasses.replace(config.data, train=())
    if data.format == "builtin" and all(corpus.data.format != "builtin" for corpus in corpora_of(config)):
        # The default of a run with corpora, by which it would be judged without test data of its own
        data = dataclasses.replace(data, format="text")
    return dataclasses.replace(config, data=data, corpora=corpora)


def originals_of(student: RunConfig) -> float:
    """Return the weight of the original pairs beside the translations, by a student's saved settings."""
    for name, corpus in student.corpora.items():
        translations = student.corpora.get(f"{name.removesuffix('originals')}translations")
        # A corpus of the teacher's data may have such a name, and no weight
        if name.endswith("originals") and translations and translations.weight:
            return corpus.weight / translations.weight
    return 0.0


def next_commands(run: str) -> str:
    """Return the commands that follow: the student's scores, its export, and its translations."""
    return "\n".join(
        [
            "[distil] its scores, its export with int8 weights, and its translations:\n",
            f"  {command('evaluate', '--run', run)}",
            f"  {command('export', '--run', run, '--to', 'ctranslate2', '--quantization', 'int8')}",
            f"  {command('translate', '--run', run, '--engine', 'ctranslate2')}\n",
        ]
    )
