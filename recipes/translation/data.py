"""Sentence pairs from the built-in corpus, from files, or from the Hugging Face hub.

Files are read by Hugging Face `datasets`, imported only where it is needed. No code that comes with a data set
is ever run, and nothing but hub data touches the network.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.translation.builtin_corpus import Pair, Split
from recipes.translation.builtin_corpus import pairs as builtin_pairs
from recipes.translation.config import DataConfig

__all__ = ["DataError", "Pair", "Pairs", "load_pairs"]

BUILTIN_SEED = 1
BUILTIN_HELD_OUT = 1_000
"""Pairs in each of the built-in corpus's valid and test splits."""


class DataError(ValueError):
    """Data that is missing or not what the settings say it is; the message is one line."""


class Pairs(list[Pair]):
    """Sentence pairs in the order of the data; `dropped` counts those left out for an empty side."""

    dropped: int = 0


def load_pairs(data: DataConfig, split: Split, lowercase: bool = False) -> Pairs:
    """The pairs of a split, as (source language, target language).

    Pairs with an empty side are dropped from `train`, counted, and reported on stderr; `valid` and `test` keep
    every pair, so that a translation has a line for each line of its reference.
    """
    read = {"builtin": _builtin, "text": _text, "tsv": _tsv, "hub": _hub}.get(data.format, _table)
    found = read(data, split)
    if lowercase:
        found = [Pair(source.lower(), target.lower()) for source, target in found]
    if split != "train":
        return Pairs(found)
    kept = Pairs(pair for pair in found if pair.source.strip() and pair.target.strip())
    kept.dropped = len(found) - len(kept)
    if kept.dropped:
        print(f"[data] train: {kept.dropped:,} of {len(found):,} pairs dropped: an empty side", file=sys.stderr)
    if not kept:
        raise DataError(f"data.train holds no pair with text on both sides ({len(found):,} pairs read)")
    return kept


def _builtin(data: DataConfig, split: Split) -> list[Pair]:
    if (data.source, data.target) not in (("en", "de"), ("de", "en")):
        raise DataError(f"the built-in corpus is en and de; data.source is {data.source}, data.target {data.target}")
    count = data.builtin_pairs if split == "train" else BUILTIN_HELD_OUT
    drawn = builtin_pairs(count, BUILTIN_SEED, split)
    return drawn if data.source == "en" else [Pair(target, source) for source, target in drawn]


def _text(data: DataConfig, split: Split) -> list[Pair]:
    """Two files, line by line: the n-th line of one translates the n-th line of the other."""
    paths = _paths(data, split, expected=2)
    sides = [[str(row["text"]) for row in _rows("text", path)] for path in paths]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{paths[0]} has {len(sides[0]):,} lines, {paths[1]} has {len(sides[1]):,}: the two must be aligned "
            "line by line (a lone carriage return ends a line, too)"
        )
    return [Pair(*lines) for lines in zip(*sides, strict=True)]


def _tsv(data: DataConfig, split: Split) -> list[Pair]:
    """One file of lines; the first one names the columns, which tabs part. A cell is text as it stands."""
    (path,) = _paths(data, split, expected=1)
    header, *lines = [str(row["text"]).split("\t") for row in _rows("text", path)]
    places = [_place(header, language, setting, str(path)) for setting, language in _languages(data)]
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(header):
            raise DataError(f"{path}:{number} has {len(cells)} columns, the header {len(header)}")
    return [Pair(cells[places[0]], cells[places[1]]) for cells in lines]


def _table(data: DataConfig, split: Split) -> list[Pair]:
    """One jsonl or parquet file."""
    (path,) = _paths(data, split, expected=1)
    return _columns(_rows(data.format, path), data, str(path))


def _hub(data: DataConfig, split: Split) -> list[Pair]:
    """A split of a data set on the hub, in its cache afterwards."""
    import datasets

    (name,) = _given(data, split, expected=1)
    repository, _, subset = _expanded(data.path).partition(":")
    if not repository:
        raise DataError("data.path is empty; for format hub it is the data set's name, such as wmt/wmt14:de-en")
    where = f"{data.path} (split {name}) on the Hugging Face hub"
    with _quiet(), _explained(where):
        rows = datasets.load_dataset(repository, subset or None, split=name)
    return _columns(rows, data, where)


def _given(data: DataConfig, split: Split, expected: int) -> tuple[str, ...]:
    """The setting `data.<split>`, which must name as many things as the format takes."""
    names: tuple[str, ...] = getattr(data, split)
    if len(names) != expected:
        what = {"text": "two files, source and target", "hub": "one split name"}.get(data.format, "one file")
        raise DataError(f"data.{split} takes {what}, for format {data.format}; got {', '.join(names) or 'nothing'}")
    return names


def _paths(data: DataConfig, split: Split, expected: int) -> list[Path]:
    names = _given(data, split, expected)
    paths = [Path(_expanded(data.path)) / name for name in names]
    for path in paths:
        if not path.is_file():
            raise DataError(f"there is no file {path}; set data.{split}, and data.path for the folder it is in")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; data.{split} needs sentences")
    return paths


def _expanded(path: str) -> str:
    """`path` with each ${NAME} replaced from the environment."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise DataError(
                f"data.path is {path}, but the environment variable {match[1]} is not set: "
                f"set it, or name the folder with --data.path"
            )
        return os.environ[match[1]]

    return os.path.expanduser(re.sub(r"\$\{(\w+)\}", value, path))


def _rows(format: str, path: Path) -> Any:
    """The rows of a file, in memory; the copy that `datasets` makes on disk is removed again."""
    import datasets

    with tempfile.TemporaryDirectory() as folder, _quiet(), _explained(str(path)):
        options: dict[str, Any] = {"cache_dir": folder, "keep_in_memory": True}
        if format == "text":
            return datasets.Dataset.from_text(str(path), **options)
        if format == "jsonl":
            return datasets.Dataset.from_json(str(path), **options)
        return datasets.Dataset.from_parquet(str(path), **options)


def _columns(rows: Any, data: DataConfig, where: str) -> list[Pair]:
    """The two languages of each row: columns of their own, or keys under `translation`."""
    names: Sequence[str] = rows.column_names
    if "translation" in names and data.source not in names:
        records = [record or {} for record in rows["translation"]]
        names = sorted({name for record in records for name in record})
        column = {name: [record.get(name) for record in records] for name in names}
    else:
        column = {name: list(rows[name]) for name in {data.source, data.target} & set(names)}
    for setting, language in _languages(data):
        _place(names, language, setting, where)
        for number, text in enumerate(column[language], start=1):
            if not isinstance(text, str):
                raise DataError(f"{where}, row {number:,}: {language!r} is not text but {type(text).__name__}")
    return [Pair(*map(str, pair)) for pair in zip(column[data.source], column[data.target], strict=True)]


def _languages(data: DataConfig) -> list[tuple[str, str]]:
    return [("data.source", data.source), ("data.target", data.target)]


def _place(names: Sequence[str], language: str, setting: str, where: str) -> int:
    if language not in names:
        raise DataError(f"{where} has no {language!r} ({setting}); it has {', '.join(map(repr, names))}")
    return names.index(language)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of `datasets`."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn whatever `datasets` raises into one line: the root cause, and what was being read."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise DataError(f"{where} cannot be read: {reason}") from error
