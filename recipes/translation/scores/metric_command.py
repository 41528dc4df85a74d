"""A metric of another program: a command that reads the sentences and writes a number for each (`--metric-command`)."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from recipes.translation.errors import ConfigError
from recipes.translation.text.bleu_tokenizers import tokenizer_for

FILES = ("sources", "translations", "references")
"""What a command may name in braces, as in {sources}: the file with them, one a line."""


def check_metrics(tokenize: str | None, command: str | None) -> None:
    """Raise an error, before the work of translating, for a tokeniser or a program that cannot be had."""
    tokenizer_for(tokenize or "auto", "")
    if command is not None:
        words_of(command)


def words_of(command: str) -> list[str]:
    """Return the words of a command; raise ConfigError unless the first is a program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--metric-command: {command} cannot be divided into words: {error}") from None
    if not words:
        raise ConfigError("--metric-command is empty, perhaps because a shell variable is not set: name a program")
    if which(words[0]) is None:
        raise ConfigError(f"--metric-command: there is no program {words[0]}: install it, or give its path")
    return words


def command_scores(
    command: str, sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> list[float]:
    """Return the number that a command writes for each sentence.

    It gets the files of FILES that it names, or, if it names none, a line of JSON for each sentence on its standard
    input, with source, translation and reference. Its errors and progress are shown as they come. Raises ConfigError
    for a command that fails, or does not write one finite number for each sentence, one a line.
    """
    words = words_of(command)
    with TemporaryDirectory() as folder:
        paths = {f"{{{name}}}": Path(folder, f"{name}.txt") for name in FILES}
        for path, lines in zip(paths.values(), (sources, translations, references), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        given = ""
        if not any(name in word for name in paths for word in words):
            given = as_json(sources, translations, references)
        for name, path in paths.items():
            words = [word.replace(name, str(path)) for word in words]
        try:
            done = subprocess.run(words, input=given.encode(), stdout=subprocess.PIPE, check=False)
        except OSError as error:
            raise ConfigError(f"--metric-command: {words[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ConfigError(f"--metric-command: {command} failed with status {done.returncode}; what it said is above")
    return numbers_in(done.stdout.decode(errors="replace"), len(translations), command)


def as_json(sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> str:
    """Return a line of JSON for each sentence."""
    rows = zip(sources, translations, references, strict=True)
    names = ("source", "translation", "reference")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def numbers_in(text: str, expected: int, command: str) -> list[float]:
    """Return the numbers in the lines of a text, of which there must be so many."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) != expected:
        raise ConfigError(
            f"--metric-command: {command} has written {len(lines):,} lines for {expected:,} sentences: it must write "
            "one number for each, one a line"
        )
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(float(line))
        except ValueError:
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            raise ConfigError(f"--metric-command: line {number:,} of what {command} has written is no number: {line}")
    return found
