"""A student's training data: the sentences that its teacher translates, and the translations, as corpora.

They are in text files, whose writing is continued where it was interrupted:

<folder>/<name>.source.txt   the sentences, one a line
<folder>/<name>.target.txt   their translations, in blocks of BLOCK lines
<folder>/<name>.json         everything they are made from, written before the first translation
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.translation.data.corpora import Corpora
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.files.json_fields import field_in
from recipes.translation.files.lines import read_lines
from recipes.translation.files.writing import add_to, adding_to, make_folder, replace_file, writing_to
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.processes.status_line import StatusLine, duration
from recipes.translation.run_folder.checkpoint import load_saved, saved_config
from recipes.translation.run_folder.made_from import lines_digest, noted_digest
from recipes.translation.run_folder.other_model import teacher_folder
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import CorpusConfig, RunConfig
from recipes.translation.text.model_text import ModelText, tag_of
from recipes.translation.training.loaded_models import loaded_models
from recipes.translation.translating.translate import best

FOLDER = "translations"
"""The teacher's translations, in a student's folder."""
BLOCK = 1_000
"""Sentences that are translated between two writes, and lost at most if there is an interruption."""


def sentences_of(corpora: Corpora, teacher: ModelText) -> list[tuple[str, list[str]]]:
    """Read the cleaned source sentences of every training corpus, including repeated ones, with its language tag.

    The tag is empty if the teacher has no tags.

    Raises ConfigError for a corpus whose target language is not among the teacher's tags.
    """
    corpora.check_training()
    found = []
    for corpus, pairs in corpora.each_corpus():
        tag = ""
        if teacher.own:
            tag = tag_of(corpus.data.target)
            if tag not in teacher.tags:
                raise ConfigError(
                    f"the target language of {corpus.name or 'train'} is {corpus.data.target}, but the teacher has no "
                    f"tag {tag}: it has {', '.join(teacher.tags)}"
                )
        found.append((tag, [pair.source for pair in pairs]))
    if not any(sources for _, sources in found):
        raise DataError("there are no training sentences to translate: see data.train")
    return found


def student_settings(config: RunConfig, ranks: Ranks) -> RunConfig:
    """Translate the training sentences with the teacher; return the settings for training the student."""
    corpora = ranks.run_on_all(lambda: Corpora(config))
    return student_of(corpora, translations_of(corpora, ranks))


def translations_of(corpora: Corpora, ranks: Ranks) -> list[tuple[str, ...]]:
    """Translate the sentences of every training corpus with the teacher; return the names of each one's two files."""
    teacher_run = teacher_folder(corpora.config.training.teacher)
    folder = Path(corpora.config.run) / FOLDER
    names = []
    with loaded_models([lambda: load_saved(teacher_run)], ranks) as ((teacher,), searching):
        found = ranks.run_on_main(lambda: sentences_of(corpora, teacher.text))
        for number, (tag, sources) in enumerate(found, start=1):
            paths = write_translations(teacher, sources, folder, str(number), tag=tag, ranks=searching)
            names.append(tuple(path.name for path in paths))
    return names


def check_same_sentences(corpora: Corpora) -> None:
    """Raise ConfigError if the student's translations are not of the training data's sentences."""
    run = corpora.config.run
    folder = Path(run) / FOLDER
    teacher = ModelText.of(saved_config(teacher_folder(corpora.config.training.teacher)))
    for number, (_, sources) in enumerate(sentences_of(corpora, teacher), start=1):
        lines = [" ".join(sentence.splitlines()) for sentence in sources]
        if noted_digest(folder / f"{number}.json", "sources") != lines_digest(lines):
            raise ConfigError(
                f"the sentences of the training data differ from {folder / f'{number}.source.txt'}, which {run} was "
                "trained on: leave the data out to continue with that file, choose another --run, or start over with "
                "--fresh"
            )


def student_of(originals: Corpora, names: list[tuple[str, ...]]) -> RunConfig:
    """Return the settings for training the student, with the translations in place of the training data.

    Args:
        originals: the corpora with the original training data.
        names: the two files of each training corpus.
    """
    config, originally = originals.config, originals.training
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
    # Validation and test sets keep their names, and their references rather than the teacher's translations
    for name, corpus_config in config.corpora.items():
        if corpus_config.valid or corpus_config.test:
            corpora[name] = dataclasses.replace(corpus_config, train=(), weight=1.0)
    data = dataclasses.replace(config.data, train=())
    if data.format == "builtin" and all(corpus.data.format != "builtin" for corpus in originally):
        # The built-in corpus is only the default here, and would be the test set of a run without test data of its own
        data = dataclasses.replace(data, format="text")
    return dataclasses.replace(config, data=data, corpora=corpora)


def write_translations(
    teacher: Translator, sources: Sequence[str], folder: Path, name: str, *, tag: str = "", ranks: Ranks = ALONE
) -> tuple[Path, Path]:
    """Translate `sources` with the teacher's own decoding settings; return the files of sources and translations.

    `tag` is put in front of each sentence for the teacher, but not in the file. Existing translations are kept if they
    were made from the same inputs: these sentences, this teacher and its settings. Otherwise they are replaced.

    Every rank must call this with the same arguments; each translates some of the sentences, and rank 0 writes.
    """
    lines = [" ".join(sentence.splitlines()) for sentence in sources]
    made_from = origin(teacher, lines, tag)
    paths = [folder / f"{name}.{what}" for what in ("source.txt", "target.txt", "json")]
    source, target, _ = paths
    done = ranks.run_on_main(lambda: resume_translations(paths, lines, made_from))
    if done == len(lines):
        print(f"[distil] {target}: {done:,} translations reused", flush=True)
        return source, target
    if done:
        print(f"[distil] {target}: continuing after {done:,} translations", flush=True)
    began = time.monotonic()
    with StatusLine(sys.stdout) as status:
        for first in range(done, len(lines), BLOCK):
            block = [f"{tag} {line}".lstrip() for line in lines[first : first + BLOCK]]
            found = best(teacher, block, ranks)
            # What the teacher has read to its end, and ended; a corpus has no pair with an empty side
            lengths = map(len, teacher.source.encode(list(map(teacher.text.source, block))))
            whole = [one.finished and size <= teacher.text.longest for one, size in zip(found, lengths, strict=True)]
            kept = (one.text if is_whole else "" for one, is_whole in zip(found, whole, strict=True))
            written = "".join(f"{text}\n" for text in kept).encode()
            ranks.run_on_main(lambda written=written: add_to(target, written))  # type: ignore[misc]
            finished = first + len(block)
            rate = (finished - done) / max(time.monotonic() - began, 1e-9)
            status.show(
                f"[distil] {finished:,}/{len(lines):,} sentences   {rate:,.1f} sentences/s   "
                f"{duration((len(lines) - finished) / rate)} left"
            )
    taken = duration(time.monotonic() - began)
    print(f"[distil] {target}: {len(lines) - done:,} sentences translated in {taken}", flush=True)
    if left_out := ranks.run_on_main(lambda: sum(not line for line in read_lines(target))):
        print(
            f"[distil] {left_out:,} of {len(lines):,} translations are unfinished (decoding.max_ratio, max_length) or "
            "empty: their pairs are left out",
            flush=True,
        )
    return source, target


def origin(teacher: Translator, lines: Sequence[str], tag: str) -> dict[str, Any]:
    """Return everything that determines the translations, as JSON."""
    return {
        "sources": lines_digest(lines),
        "tag": tag,
        "tags": list(teacher.text.tags),
        "weights": list(teacher.digests),
        "subwords": [teacher.source.digest, teacher.target.digest],
        "lowercase": teacher.config.subwords.lowercase,
        "decoding": dataclasses.asdict(teacher.config.decoding),
        "longest": teacher.config.training.max_length,
    }


def resume_translations(paths: Sequence[Path], lines: Sequence[str], made_from: dict[str, Any]) -> int:
    """Remove the translations that cannot be kept; return how many remain: all lines, or whole blocks of them."""
    source, target, record = paths
    make_folder(source.parent)
    if field_in(record) != made_from:
        record.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        replace_file(source, "".join(f"{line}\n" for line in lines).encode())
        replace_file(record, (json.dumps(made_from, indent=2) + "\n").encode())
    with writing_to(target), adding_to(target) as file:
        file.seek(0)
        # What follows the last newline is not a whole line
        written = file.read().split(b"\n")[:-1]
        kept = min(len(written), len(lines))
        if kept < len(lines):
            kept -= kept % BLOCK
        file.truncate(sum(len(line) + 1 for line in written[:kept]))
    return kept
