"""The settings of a run, read from a YAML file and the command line, which both mirror the dataclasses.

A run is described by one `RunConfig`. Its sections are read from a YAML file, overridden on the command line,
and saved, fully resolved, with the run's checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes.translation.errors import ConfigError
from recipes.translation.files.lines import without_compression
from recipes.translation.settings.checks import check_together
from recipes.translation.settings.data import CorpusConfig, DataConfig, SubwordConfig
from recipes.translation.settings.paths import LITERAL, is_expanded
from recipes.translation.settings.run import DecodingConfig, ModelConfig, RunConfig
from recipes.translation.settings.schema import COMMAND_LINE, Schema
from recipes.translation.settings.training import LayoutConfig, TrainingConfig

__all__ = [
    "ConfigError",
    "CorpusConfig",
    "DataConfig",
    "DecodingConfig",
    "LayoutConfig",
    "ModelConfig",
    "RunConfig",
    "SubwordConfig",
    "TrainingConfig",
    "load_config",
    "moved_to",
    "save_config",
]


SCHEMA = Schema(RunConfig)


def load_config(
    path: str | Path | None, overrides: Mapping[str, object] | None = None, location: str = COMMAND_LINE
) -> RunConfig:
    """Read the YAML file at `path`; `overrides` replace its settings, and defaults are used for all others.

    The key of an override is its dotted name (`training.steps`). Its text is read as in a YAML file, except that a text
    setting takes it literally. Any mistake raises ConfigError, which says which key is wrong, where it was given (file
    and line, the command line, or the `location` of the overrides), and what to do.
    """
    given = {}
    if path is not None:
        given = SCHEMA.read_file(Path(path))
    given |= SCHEMA.read_overrides(overrides or {}, location)
    joint = given.get("subwords.joint")
    tie = given.get("model.tie")
    if joint and tie and tie.value == "all" and not joint.value:
        raise ConfigError(
            f"model.tie all ({tie.location}) needs one vocabulary for both languages, but subwords.joint is false "
            f"({joint.location})"
        )
    sections: dict[str, dict[str, Any]] = {}
    for key, setting in given.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = setting.value
    # After the overrides: the names of the files may have come from the command line
    if "data.format" not in given:
        corpora = sections.get("", {}).get("corpora", {})
        sections.setdefault("data", {})["format"] = format_of(DataConfig(**sections.get("data", {})), bool(corpora))
    if "training.epochs" in given and "training.steps" not in given:
        epochs = sections["training"]["epochs"]
        sections["training"]["steps"] = 0 if epochs else TrainingConfig.steps
    config = RunConfig(**sections.pop("", {}))
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    config = dataclasses.replace(config, **changed)
    check_together(config)
    return config


FORMATS = {".tsv": "tsv", ".jsonl": "jsonl", ".tmx": "tmx", ".parquet": "parquet"}
"""The format of a file for each ending of its name."""


def named_format(name: str) -> str | None:
    """Return the format of a file by its name; None if the name does not have a known ending."""
    return FORMATS.get(Path(without_compression(name.lower())).suffix)


def format_of(data: DataConfig, corpora: bool) -> str:
    """Return the format of the data files, or builtin without files; raise ConfigError if their names do not tell.

    `corpora` says whether there are corpora, whose files may be in the folder `data.path`.
    """
    splits = {split: getattr(data, split) for split in ("train", "valid", "test") if getattr(data, split)}
    if data.path and not splits and not corpora:
        raise ConfigError(
            f"data.path is {data.path}, but no file is named: set data.train and data.valid, or leave data.path out "
            "to train on the built-in corpus"
        )
    found: dict[str, str | None] = {split: format_of_files(f"data.{split}", names) for split, names in splits.items()}
    for split, format in found.items():
        first = next(iter(found))
        if format != found[first]:
            raise ConfigError(
                f"data.{first} looks like {found[first]}, data.{split} like {format}: all data has one format; "
                "convert one of them, or set data.format"
            )
    return next(iter(found.values()), None) or "builtin"


def format_of_files(setting: str, names: tuple[str, ...]) -> str | None:
    """Return the format of the files that a setting names, None without files; raise ConfigError if it is not clear."""
    if not names:
        return None
    formats = {named_format(name) for name in names}
    if formats == {None} and len(names) == 2:
        return "text"
    (format, *others) = formats
    if format is None or others:
        section = setting.rpartition(".")[0]
        raise ConfigError(
            f"{setting} ({', '.join(names)}) does not show its format: set {section}.format (text takes two files; "
            "tsv, jsonl, tmx and parquet take one; hub takes a split name), or end the name in .tsv, .jsonl, .tmx or "
            ".parquet"
        )
    return format


class _LiteralPath(str):
    """A path that must be read back unchanged: its variables were replaced when it was given."""


class _Dumper(yaml.SafeDumper):
    """Writes these paths with their tag, and everything else as usual."""


_Dumper.add_representer(_LiteralPath, lambda dumper, path: dumper.represent_scalar(LITERAL, path))


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write all settings as YAML, from which `load_config` reads an equal configuration."""
    settings = json.loads(json.dumps(dataclasses.asdict(config)))  # turns tuples, which YAML lacks, into lists
    for key in [key for key, setting in SCHEMA.settings.items() if setting.path]:
        section, _, name = key.rpartition(".")
        holder = settings[section] if section else settings
        if holder[name] and is_expanded(holder[name]):
            holder[name] = _LiteralPath(holder[name])
    # Without allow_unicode, with which PyYAML writes U+0085 as a line break that it reads as a blank
    text = yaml.dump(settings, Dumper=_Dumper, sort_keys=False, width=1_000)
    Path(path).write_text(text, encoding="utf-8")


def moved_to(config: RunConfig, run: str) -> RunConfig:
    """Return the settings of a run whose folder is now `run`; corpora inside it, such as translations, moved along."""
    corpora = {}
    for name, corpus in config.corpora.items():
        if corpus.path and config.run and Path(config.run) in Path(corpus.path).parents:
            corpus = dataclasses.replace(corpus, path=str(Path(run) / Path(corpus.path).relative_to(config.run)))
        corpora[name] = corpus
    return dataclasses.replace(config, run=run, corpora=corpora)
