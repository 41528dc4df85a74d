"""Data that can be trained on, but is rarely what was meant: the same file twice, or swapped languages."""

from __future__ import annotations

import filecmp
import re
from pathlib import Path

from recipes.translation.data.corpora import Corpora, CorpusSplit
from recipes.translation.data.split_files import names_of, paths_of
from recipes.translation.errors import DataError
from recipes.translation.files.lines import without_compression
from recipes.translation.settings.config import DataConfig

WAY = "if that is intended, add --insist"


def check_meant(corpora: Corpora) -> None:
    """Raise DataError for a file that is given for two purposes, or whose name ends in a different language."""
    for each in [*corpora.training, *corpora.valid]:
        if each.data.format == "text":
            check_sides(each.setting, each.data, paths_of(each.data, each.split))
    for training in corpora.training:
        for other in corpora.all_held_out:
            for ours, theirs in zip(_sources(training), _sources(other), strict=False):
                if (how := _how_same(ours, theirs)) is not None:
                    raise DataError(
                        f"{training.setting} and {other.setting} are the same data ({ours} and {theirs}{how}), so that "
                        f"its scores would reward memorisation: hold some pairs back; {WAY}"
                    )


def check_sides(setting: str, data: DataConfig, paths: list[Path]) -> None:
    """Raise DataError for one file as both source and target, and for names that end in a different language."""
    source, target = paths
    section = setting.rpartition(".")[0]
    if (how := _how_same(source, target)) is not None:
        raise DataError(
            f"{setting} names the same sentences as source and target ({source} and {target}{how}), so that a model "
            f"would learn to copy: name the file of {data.target} second; {WAY}"
        )
    for side, path, language in (("source", source, data.source), ("target", target, data.target)):
        ending = ending_of(path)
        ours = re.split("[-_]", language)[0].lower()
        if ending and len(ours) == 2 and ending != ours:
            raise DataError(
                f"{setting} names {path} as {side}, but {section}.{side} is {language}, not {ending}: name the file of "
                f"{data.source} first, or set {section}.source and {section}.target to the files' languages; {WAY}"
            )


def ending_of(path: Path) -> str:
    """Return the two letters after a dot that a file's name ends with, usually a language; empty for other names."""
    found = re.search(r"\.([a-z]{2})$", without_compression(path.name).removesuffix(".txt"))
    return found[1] if found else ""


def _sources(corpus: CorpusSplit) -> list[Path]:
    """Return what distinguishes a split from others: its source file or, on the hub, the data set and split names."""
    if corpus.data.format == "builtin":
        return []
    if corpus.data.format == "hub":
        return [Path(corpus.data.path, *names_of(corpus.data, corpus.split))]
    return paths_of(corpus.data, corpus.split)[:1]


def _how_same(one: Path, other: Path) -> str | None:
    """Return in what way two files are the same, as words to add to their names; None if they are not."""
    if one == other:
        return ""
    if not (one.is_file() and other.is_file()):
        return None
    if one.samefile(other):
        return ", one file under two names"
    # Empty files do not count as the same; they are refused elsewhere
    if one.stat().st_size and filecmp.cmp(one, other, shallow=False):
        return ", which have the same contents"
    return None
