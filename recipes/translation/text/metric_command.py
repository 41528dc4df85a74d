"""Metrics of other programs: a command that reads sentences and writes a number for each.

`evaluate` reports its scores, and it can choose among translations and clean training data.
"""

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
from recipes.translation.text.model_text import one_line

FILES = ("sources", "translations", "references")
"""What a command may name in braces, as in {sources}: the file with these texts, one per line."""


OPTION = "--metric-command"


def words_of(command: str, named: str = OPTION) -> list[str]:
    """Split a command into words; raise ConfigError, naming the option `named`, unless the first is a program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{named}: {command} cannot be split into words: {error}") from None
    if not words:
        raise ConfigError(f"{named} is empty, perhaps because a shell variable is not set: name a program")
    if which(words[0]) is None:
        raise ConfigError(f"{named}: there is no program {words[0]}: install it, or give its path")
    return words


def names(file: str, words: Sequence[str]) -> bool:
    """Return whether a command names one of FILES."""
    return any(f"{{{file}}}" in word for word in words)


def check_without_references(command: str, named: str = OPTION) -> None:
    """Raise ConfigError for a command that cannot run, or that needs references, when there are none."""
    if names("references", words_of(command, named)):
        raise ConfigError(
            f"{named}: {command} reads {{references}}, but there are none here: name a metric that needs no references"
        )


def command_scores(
    command: str,
    sources: Sequence[str],
    translations: Sequence[str],
    references: Sequence[str] | None = None,
    named: str = OPTION,
) -> list[float]:
    """Return the number that a command writes for each sentence.

    It gets the files in FILES that it names, with a blank for a line break within a sentence, or, if it names none, a
    line of JSON for each sentence on its standard input, with source, translation and, if there are any, reference. Its
    errors and progress are shown as they come.
    Raises ConfigError, naming the option `named`, for a command that fails, or that does not write one finite number
    per line for each sentence.
    """
    words = words_of(command, named)
    if references is None:
        check_without_references(command, named)
    texts = {"source": sources, "translation": translations}
    if references is not None:
        texts["reference"] = references
    with TemporaryDirectory() as folder:
        wanted = {name: lines for name, lines in zip(FILES, texts.values(), strict=False) if names(name, words)}
        given = ""
        if not wanted:
            rows = zip(*texts.values(), strict=True)
            given = "".join(json.dumps(dict(zip(texts, row, strict=True))) + "\n" for row in rows)
        for name, lines in wanted.items():
            path = Path(folder, f"{name}.txt")
            # A line break within a sentence, of any kind that a program may recognise, would shift all scores after it
            path.write_text("".join(f"{one_line(line)}\n" for line in lines), encoding="utf-8", newline="\n")
            words = [word.replace(f"{{{name}}}", str(path)) for word in words]
        try:
            done = subprocess.run(words, input=given.encode(), stdout=subprocess.PIPE, check=False)
        except OSError as error:
            raise ConfigError(f"{named}: {words[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ConfigError(f"{named}: {command} failed with status {done.returncode}; its own output is above")
    return numbers_in(done.stdout.decode(errors="replace"), len(translations), command, named)


def numbers_in(text: str, expected: int, command: str, named: str) -> list[float]:
    """Return the numbers in a text, one per line, of which there must be `expected`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) != expected:
        raise ConfigError(
            f"{named}: {command} wrote {len(lines):,} lines for {expected:,} sentences: it must write one number "
            "for each, one per line"
        )
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(float(line))
        except ValueError:
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            raise ConfigError(f"{named}: line {number:,} of the output of {command} is not a number: {line}")
    return found
