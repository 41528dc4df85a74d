"""The files of a split: which ones the settings name, and whether these are what the format needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.config import DataConfig, named_format
from recipes.translation.settings.paths import expand_path
from recipes.translation.text.pair import Split


def check_named(data: DataConfig, split: Split) -> None:
    """Raise DataError unless the settings fit together, and name as many files for a split as its format needs.

    The files must exist; they are not read. Without this check, settings that contradict the format would give an
    unrelated error, or none.
    """
    for setting, names in (("train", data.train), ("valid", data.valid), ("test", data.test), ("path", (data.path,))):
        if data.format == "builtin" and any(names):
            raise DataError(
                f"data.format is builtin, the built-in corpus, but data.{setting} is {' '.join(names)}: "
                f"set data.format (text for two files, tsv, jsonl, tmx, parquet or hub), or leave data.{setting} out"
            )
        if setting == "path" or data.format == "hub":  # these are not file names
            continue
        for name in names:
            if named_format(name) not in (None, data.format):
                raise DataError(
                    f"data.format is {data.format}, but data.{setting} names {name}: set data.format "
                    f"{named_format(name)}, or rename the file"
                )
    # With one column for both sides a model would learn to copy
    if data.format in ("tsv", "jsonl", "tmx", "parquet", "hub") and data.source == data.target:
        raise DataError(
            f"data.source and data.target are both {data.source}, and in format {data.format} they name the columns: "
            "give the two columns different names"
        )
    if data.format == "hub":
        names_of(data, split)
    elif data.format != "builtin":
        paths_of(data, split)


def names_of(data: DataConfig, split: Split) -> tuple[str, ...]:
    """Return the setting `data.<split>`; raise DataError unless it has as many names as the format needs."""
    names: tuple[str, ...] = getattr(data, split)
    needed = 1
    what = "one file"
    if data.format == "text":
        needed = 2
        what = "two files, source and target"
    elif data.format == "hub":
        what = "one split name"
    if len(names) != needed:
        way = ""
        if split == "valid" and not names:
            way = "; without such data, hold a few hundred pairs back from the training data"
        elif split == "test" and not names:
            way = "; without a test set, evaluate --split valid scores the validation data"
        raise DataError(
            f"data.{split} takes {what}, for format {data.format}; got {', '.join(names) or 'nothing'}{way}"
        )
    return names


def paths_of(data: DataConfig, split: Split) -> list[Path]:
    """Return the files of a split; raise DataError for one that does not exist."""
    folder = Path(expand_path(data.path, "data.path"))
    paths = [folder / expand_path(name, f"data.{split}") for name in names_of(data, split)]
    for path in paths:
        if not path.is_file():
            raise DataError(f"there is no file {path}; set data.{split}, and data.path for the folder it is in")
    return paths


@contextmanager
def naming_corpus(corpus: str) -> Iterator[None]:
    """Within the block, add the corpus's name, if it has one, to errors."""
    try:
        yield
    except (DataError, ConfigError) as error:
        if not corpus:
            raise
        raise type(error)(f"corpora.{corpus}: {error}") from error
