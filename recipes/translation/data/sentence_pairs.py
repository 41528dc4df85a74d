"""Sentence pairs from the built-in corpus, from files, or from the Hugging Face hub.

Parquet files are read with pyarrow and the hub with Hugging Face `datasets`, which are imported only when needed. Code
that comes with a data set is never run, and only hub data is read over the network.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from recipes.translation.data.builtin_corpus import each_pair as builtin_pairs
from recipes.translation.data.cleaning import EMPTY, Cleaning
from recipes.translation.data.split_files import check_named, names_of, paths_of
from recipes.translation.data.tmx import tmx_pairs
from recipes.translation.errors import DataError
from recipes.translation.files.json_fields import parse_json
from recipes.translation.files.lines import Hashes, each_line, hash_file
from recipes.translation.settings.config import DataConfig, SubwordConfig
from recipes.translation.settings.data import CleaningConfig
from recipes.translation.settings.paths import expand_path
from recipes.translation.settings.schema import shorten
from recipes.translation.text.pair import Pair, Split

BUILTIN_SEED = 1
BUILTIN_HELD_OUT = 1_000
"""Number of pairs in each of the built-in corpus's valid and test splits; at most a tenth of the training pairs."""


NO_RULES = CleaningConfig()
"""Cleaning that removes only pairs with an empty side."""


def load_pairs(
    data: DataConfig, split: Split, lowercase: bool = False, cleaning: CleaningConfig = NO_RULES
) -> list[Pair]:
    """Read the pairs of a split, as (source language, target language), in the order of the data.

    `cleaning` applies only to `train`, see `each_training_pair`. `valid` and `test` contain all pairs, so that there is
    a translated line for each line of the reference.
    """
    if split == "train":
        return list(each_training_pair(data, SubwordConfig(lowercase=lowercase), cleaning, split))
    return list(lowercase_pairs(_read_split(data, split), lowercase))


def say_to_stderr(line: str) -> None:
    """Print what was noticed in the data."""
    print(line, file=sys.stderr)


def each_training_pair(
    data: DataConfig,
    subwords: SubwordConfig,
    cleaning: CleaningConfig,
    name: str,
    hashes: Hashes | None = None,
    say: Callable[[str], None] = say_to_stderr,
) -> Iterator[Pair]:
    """Yield the training pairs one by one, without those that the rules remove or that have an empty side.

    `say` receives the number of pairs that each rule removes, under `name`. The data is never in memory as a whole.
    `hashes` receives those of files of lines; a file whose hash it already has must not have changed.
    """
    rules = Cleaning(cleaning, data.source, data.target, subwords.symbols)
    yield from lowercase_pairs(rules.clean(_read_split(data, "train", hashes)), subwords.lowercase)
    dropped = sum(rules.removed.values())
    if dropped or cleaning != NO_RULES:
        say(f"[data] {name}: {rules}")
    if rules.markup:
        say(
            f"[data] {name}: {rules.markup:,} of {rules.read:,} pairs have tags or character entities, such as "
            f"{shorten(rules.example)}, and are learned as they are: convert the files (docs/data.md), or set "
            "cleaning.markup true"
        )
    if dropped == rules.read:
        if rules.removed[EMPTY] == dropped:
            raise DataError(f"data.train has no pair with text on both sides ({dropped:,} pairs read)")
        raise DataError(f"the cleaning rules leave no pair of data.train: {rules}")


def _read_split(data: DataConfig, split: Split, hashes: Hashes | None = None) -> Iterable[Pair]:
    check_named(data, split)
    if data.format in ("builtin", "parquet", "hub"):
        return {"builtin": _builtin, "parquet": _parquet, "hub": _hub}[data.format](data, split)
    return {"text": _text, "tsv": _tsv, "jsonl": _jsonl, "tmx": _tmx}[data.format](data, split, hashes)


def lowercase_pairs(pairs: Iterable[Pair], lowercase: bool) -> Iterable[Pair]:
    """Return the pairs, in lower case if `lowercase` is true."""
    if not lowercase:
        return pairs
    return (Pair(source.lower(), target.lower()) for source, target in pairs)


def fingerprint(data: DataConfig, split: Split, hashes: Hashes | None = None) -> str:
    """Compute the SHA-256 of the contents of a split's files, or of the pairs themselves for data on the hub.

    Files in `hashes` are not opened again. The result is empty for the built-in corpus, which the settings determine.
    """
    if data.format == "builtin":
        return ""
    digest = hashlib.sha256()
    if data.format == "hub":
        for pair in _read_split(data, split):
            digest.update(json.dumps(pair).encode())
    else:
        known = {} if hashes is None else hashes
        paths = paths_of(data, split)
        unknown = [path for path in paths if path not in known]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            known.update(zip(unknown, pool.map(_hash_file, unknown), strict=True))
        for path in paths:
            # The size separates the files: a line that moves from one to the next must change the digest
            size, of_file = known[path]
            digest.update(f"{size} bytes:".encode() + of_file)
    return digest.hexdigest()


def _hash_file(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        return hash_file(file)


def _builtin(data: DataConfig, split: Split) -> Iterator[Pair]:
    if (data.source, data.target) not in (("en", "de"), ("de", "en")):
        raise DataError(f"the built-in corpus is en and de; data.source is {data.source}, data.target {data.target}")
    count = data.builtin_pairs
    if split != "train":
        count = min(BUILTIN_HELD_OUT, math.ceil(count / 10))
    for pair in builtin_pairs(count, BUILTIN_SEED, split):
        if data.source == "en":
            yield pair
        else:
            yield Pair(pair.target, pair.source)


def _text(data: DataConfig, split: Split, hashes: Hashes | None) -> Iterator[Pair]:
    return aligned_pairs(paths_of(data, split), f"data.{split}", hashes)


def aligned_pairs(paths: Sequence[Path], purpose: str, hashes: Hashes | None = None) -> Iterator[Pair]:
    """Read two files in which the n-th line of one translates the n-th line of the other."""
    counts = [0, 0]
    for lines in zip_longest(*(_lines(path, purpose, hashes) for path in paths)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if counts[0] == counts[1]:
            yield Pair(*lines)
    if counts[0] != counts[1]:
        raise DataError(
            f"{paths[0]} has {counts[0]:,} lines, {paths[1]} has {counts[1]:,}: the two must be aligned line by line"
        )


def _tsv(data: DataConfig, split: Split, hashes: Hashes | None) -> Iterator[Pair]:
    """Read one file with columns separated by tabs and named in the first line. Quotes have no special meaning."""
    (path,) = paths_of(data, split)
    lines = _lines(path, f"data.{split}", hashes)
    header = next(lines).split("\t")
    _check_header(header, data, path)
    source, target = (header.index(language) for _, language in _languages(data))
    decided = False
    for number, line in enumerate(lines, start=2):  # line 1 is the header
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(f"{path}:{number} has {len(cells)} columns, the header {len(header)}")
        # A writer that quotes cells does so wherever there is a quote, so the first cell that shows it settles it
        for cell in () if decided else (cells[source], cells[target]):
            if '"' in cell and not SPOKEN.fullmatch(cell):
                if QUOTED.fullmatch(cell):
                    raise quoted_cell_error(f"{path}:{number}", cell)
                decided = True
        yield Pair(cells[source], cells[target])


QUOTED = re.compile('"(?:[^"]|"")*"')
"""A cell as csv writers quote it, with each quote inside doubled."""
SPOKEN = re.compile('"[^"]*"')
"""A cell that may be quoted, or be direct speech."""


def quoted_cell_error(where: str, cell: str) -> DataError:
    """Return the error for a cell that is quoted."""
    return DataError(
        f"{where} is quoted as pandas and csv do it ({shorten(cell)}), but here quotes in tsv are text: write JSON "
        "lines instead, as with frame.to_json('pairs.jsonl', orient='records', lines=True, force_ascii=False)"
    )


def _check_header(header: Sequence[str], data: DataConfig, path: Path) -> None:
    """Raise DataError unless the first line of a file names a column for each language."""
    for setting, language in _languages(data):
        if header.count(language) > 1:
            raise DataError(f"{path} has {header.count(language)} columns {language!r} ({setting}); rename all but one")
    missing = [(setting, language) for setting, language in _languages(data) if language not in header]
    if not missing:
        return
    there = ", ".join(repr(shorten(name)) for name in header[:6])
    if len(header) > 6:
        there += f", ... ({len(header)} in all)"
    if len(missing) == 2:
        if {f'"{language}"' for _, language in _languages(data)} <= set(header):
            raise quoted_cell_error(f"{path}:1", header[0])
        names = f"{data.source} and {data.target}"
        if len(header) > 2:
            names = f"a name for each of its {len(header)} columns, among them {names}"
        raise DataError(
            f"{path} names neither {data.source!r} (data.source) nor {data.target!r} (data.target) in its first line, "
            f"which is {there}: if that is a sentence pair, put a line before it with {names}, separated by tabs; if "
            "it is a header, set data.source and data.target to the names of its columns"
        )
    setting, language = missing[0]
    raise DataError(f"{path} has no {language!r} ({setting}); its header is {there}: set {setting} to one of these")


def _jsonl(data: DataConfig, split: Split, hashes: Hashes | None) -> Iterator[Pair]:
    """Read one file with a JSON object on each line that is not empty."""
    (path,) = paths_of(data, split)
    for number, line in enumerate(_lines(path, f"data.{split}", hashes), start=1):
        where = f"{path}:{number}"
        if line.strip():
            yield _pair(_parse_line(line, where), data, where)


def _tmx(data: DataConfig, split: Split, hashes: Hashes | None) -> Iterator[Pair]:
    (path,) = paths_of(data, split)
    return tmx_pairs(path, data.source, data.target, hashes)


def _parse_line(line: str, where: str) -> object:
    try:
        return parse_json(line, _without_repeats)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _without_repeats(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise ValueError for a key that occurs twice: json would keep only the last."""
    record = dict(entries)
    if len(record) < len(entries):
        ((repeated, _),) = Counter(name for name, _ in entries).most_common(1)
        raise ValueError(f"the key {shorten(repeated)!r} occurs twice in one object")
    return record


def _parquet(data: DataConfig, split: Split) -> Iterator[Pair]:
    """Read one parquet file."""
    import pyarrow.parquet

    (path,) = paths_of(data, split)
    with _explain_errors(str(path)), pyarrow.parquet.ParquetFile(path) as file:
        batches = file.iter_batches(SLICE, columns=_language_columns(file.schema_arrow.names, data))
        yield from _of_batches(batches, data, str(path))


def _hub(data: DataConfig, split: Split) -> Iterator[Pair]:
    """Read a split of a data set on the hub, without progress bars; `datasets` keeps it in its cache."""
    import datasets

    (name,) = names_of(data, split)
    repository, subset = expand_path(data.path, "data.path").partition(":")[::2]
    repository, at, revision = repository.partition("@")
    if at and not revision:
        raise DataError(f"data.path is {data.path}, without a revision after the @: name a branch, tag or commit")
    if not repository:
        raise DataError("data.path is empty; for format hub it is the data set's name, such as wmt/wmt14:de-en")
    where = f"{data.path} (split {name}) on the Hugging Face hub"
    with _explain_errors(where), ExitStack() as afterwards:
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        rows = datasets.load_dataset(repository, subset or None, split=name, revision=revision or None)
    if used := _commit_of(rows) or revision:
        print(f"[data] {where}: revision {used}", file=sys.stderr)
    rows = rows.select_columns(_language_columns(rows.column_names, data)).with_format("arrow")
    yield from _of_batches(rows.iter(SLICE), data, where)


def _commit_of(rows: Any) -> str:
    """Return the commit that `datasets` has read, from its files' addresses; empty if it has not kept them."""
    files = getattr(rows.info, "download_checksums", None) or {}
    return next((found[1] for file in files if (found := re.search(r"@([0-9a-f]{40})/", file))), "")


SLICE = 10_000
"""Number of rows of a table that are in memory at a time."""


def _language_columns(names: list[str], data: DataConfig) -> list[str]:
    """Return the columns with the languages; if there are none, all columns, so that an error can name them."""
    for columns in ([data.source, data.target], ["translation"]):
        if set(columns).issubset(names):
            return columns
    return names


def _of_batches(batches: Iterable[Any], data: DataConfig, where: str) -> Iterator[Pair]:
    """Yield the pairs of a table, given in parts."""
    records = (record for batch in batches for record in batch.to_pylist())
    for number, record in enumerate(records, start=1):
        yield _pair(record, data, f"{where}, row {number:,}")


def _pair(record: Any, data: DataConfig, where: str) -> Pair:
    """Return the two languages of a record, from its own keys or from those in its entry `translation`."""
    if isinstance(record, dict) and data.source not in record:
        record = record.get("translation", record)
    if not isinstance(record, dict):
        raise DataError(f'{where} is a {type(record).__name__}, not an object such as {{"en": ..., "de": ...}}')
    for setting, language in _languages(data):
        if language not in record:
            raise DataError(f"{where} has no {language!r} ({setting}); it has {', '.join(map(repr, record))}")
        text = record[language]
        if not isinstance(text, str):
            raise DataError(f"{where}: {language!r} is not text but {type(text).__name__}")
        if not text.isascii() and SURROGATE.search(text):
            raise DataError(f"{where}: {language!r} is not Unicode text: {text!a}")
    return Pair(record[data.source], record[data.target])


def _lines(path: Path, purpose: str, hashes: Hashes | None) -> Iterator[str]:
    empty = True
    for line in each_line(path, hashes):
        if empty and (found := DOCUMENT.match(line)):
            raise DataError(
                f"{path} is not one sentence per line but a markup document, as {found[0].strip()} shows: extract the "
                "sentences first (docs/data.md)"
            )
        empty = False
        yield line
    if empty:
        raise DataError(f"{path} is empty; {purpose} needs sentences")


DOCUMENT = re.compile(r"\s*<(\?xml|!DOCTYPE|tmx|xliff|mteval|(src|ref|tst)set|refset|html)\b[^>]*>?", re.IGNORECASE)
"""How WMT's SGML, TMX, XLIFF and other XML begin."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can contain and UTF-8 cannot."""


def _languages(data: DataConfig) -> list[tuple[str, str]]:
    return [("data.source", data.source), ("data.target", data.target)]


@contextmanager
def _explain_errors(where: str) -> Iterator[None]:
    """Convert any other error into a one-line DataError, with the root cause and what was being read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause: BaseException = error
        # `datasets` wraps errors several times; the innermost one gives the reason
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise DataError(f"{where} cannot be read: {reason}") from error
