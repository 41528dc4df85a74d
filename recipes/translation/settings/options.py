"""Command-line options generated from the configuration's dataclasses, and errors of one line.

Every field of `RunConfig` becomes an option under its dotted name (`--training.steps`), with the field's own help text
and default, so that the command line cannot drift from the configuration.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn, get_origin

from recipes.translation.settings.config import SCHEMA, RunConfig
from recipes.translation.settings.schema import SettingType

ALSO = {"run": "--folder"}
"""Other spellings: torchrun takes --run for an abbreviation of its own --run-path, and says that it is ambiguous."""
METAVARS = {int: "N", float: "X", bool: "true|false"}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one line, naming the nearest valid option."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [OPTIONS]",
            description=description,
            epilog="example:\n" + textwrap.indent(example, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The parsed options; a misspelt one ends the program with a suggestion."""
        try:
            options, extra = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            self.error(str(error))
        extra.sort(key=lambda word: not word.startswith("-"))  # a misspelt option, before its value
        if extra:
            self.error(unknown("option", extra[0], list(self._option_string_actions)))
        return options


def unknown(what: str, word: str, valid: Sequence[str]) -> str:
    """Say that `word` is not known, and which of the `valid` ones was probably meant."""
    name = word.partition("=")[0]
    ends = {option.rpartition(".")[2].lstrip("-"): option for option in valid}  # --step for --training.steps
    by_end = difflib.get_close_matches(name.rpartition(".")[2].lstrip("-"), ends, n=1)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.8) or [ends[end] for end in by_end]
    return f"unknown {what} {name}" + (f"; did you mean {near[0]}?" if near else "")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add one option for each setting of a run, grouped by section. Their values stay text: see `overrides`."""
    groups = {"": parser.add_argument_group("the run")}
    defaults = RunConfig()
    for name, setting in SCHEMA.settings.items():
        section = name.rpartition(".")[0]
        if section not in groups:
            description = inspect.getdoc(getattr(defaults, section)) or ""
            groups[section] = parser.add_argument_group(section, description.partition("\n")[0])
        _add(groups[section], name, setting)


def overrides(options: argparse.Namespace) -> dict[str, str | list[str]]:
    """What was given on the command line, by dotted name, as `load_config` takes it."""
    given: dict[str, str | list[str]] = {}
    for name, value in vars(options).items():
        if name in SCHEMA.settings and value is not None:
            given[name] = value if isinstance(value, str) else _as_yaml(value)
    return given


def setting_names() -> list[str]:
    """Return the dotted name of every setting."""
    return list(SCHEMA.settings)


def _add(group: argparse._ArgumentGroup, name: str, setting: SettingType) -> None:
    several = any(get_origin(kind) is tuple for kind in setting.kinds)
    flags = [f"--{name}"]
    if name in ALSO:
        flags.append(ALSO[name])
    group.add_argument(
        *flags,
        nargs="+" if several else None,
        dest=name,
        metavar="VALUE" if several else METAVARS.get(setting.kinds[0], "TEXT"),
        help=f"{setting.help} (default: {_shown(setting.default)})".replace("%", "%%"),  # argparse expands %
    )


def _as_yaml(words: list[str]) -> str | list[str]:
    """One word may be a list already, or `auto`; numbers must not become text."""
    if len(words) == 1:
        return words[0]
    return f"[{', '.join(words)}]" if all(re.fullmatch(r"[-+.\deE]+", word) for word in words) else words


def _shown(default: object) -> str:
    if default is None:
        return "as the preset has it"
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default) or "none"


def fail(message: str) -> int:
    """Print a user's mistake as one line; the exit status that goes with it."""
    rank = os.environ.get("RANK", "0")
    print("error: " + " ".join([*([] if rank == "0" else [f"rank {rank}:"]), *message.split()]), file=sys.stderr)
    return 2
