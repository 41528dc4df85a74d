"""Settings of one of several corpora."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from recipes.translation.settings.schema import Help, Range


@dataclass(frozen=True)
class CorpusConfig:
    """One of several corpora; what is not set is as in the section data."""

    train: Annotated[tuple[str, ...], Help("Training file(s), as data.train.")] = ()
    valid: Annotated[tuple[str, ...], Help("Validation file(s), as data.valid.")] = ()
    test: Annotated[tuple[str, ...], Help("Test file(s), as data.test.")] = ()
    format: Annotated[
        Literal["builtin", "text", "tsv", "jsonl", "parquet", "hub"] | None,
        Help("As data.format; by default the files decide."),
    ] = None
    path: Annotated[str | None, Help("Folder of the files, or name of the hub's data set, as data.path.")] = None
    source: Annotated[str | None, Help("Source language, as data.source.")] = None
    target: Annotated[str | None, Help("Target language, as data.target.")] = None
    weight: Annotated[
        float,
        Help("The corpus's share of an epoch, relative to its size and the other corpora's weights."),
        Range(at_least=0, below=1e9),
    ] = 1.0
    tag: Annotated[
        str,
        Help(
            "A word such as <bt> in front of each source sentence, which marks the corpus, as for back-translated data."
        ),
    ] = ""
