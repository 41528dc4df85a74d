"""Command-line options generated from the configuration's dataclasses, and one-line errors.

Every field of `RunConfig` becomes an option under its dotted name (`--training.steps`), with the field's own help text
and default, so that the command line cannot drift from the configuration.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, get_origin

from recipes.translation.settings.config import SCHEMA, load_config
from recipes.translation.settings.paths import expand_path
from recipes.translation.settings.schema import SettingType, nearest

ALSO = {"run": "--folder"}
"""Other spellings of options: torchrun refuses --run as an ambiguous abbreviation of its own options."""
SYMBOLS = "subwords.symbols"
IN_BRACKETS = re.compile(r"\[[^\[\],'\"\s]+\]")
"""A word that may be a symbol, such as [NAME]."""
METAVARS = {int: "N", float: "X", bool: "true|false"}


class StoreOnce(argparse.Action):
    """Stores the value of an option; a second value, which would replace the first, is an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the values; raise ArgumentError if the option has already been given, under any of its names."""
        given = vars(options).setdefault(GIVEN, set())
        if option and self.dest in given:
            way = "name several corpora in the section `corpora`" if self.dest in OF_CORPORA else "keep one"
            raise argparse.ArgumentError(self, f"it is given twice: {way}")
        given.add(self.dest)
        setattr(options, self.dest, values)


GIVEN = "given options"
"""The attribute of a parser's result that has the names of the given options; no option has this name."""
OF_CORPORA = ("data.train", "data.valid", "data.test")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose error messages are one line, with the nearest valid option."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [OPTIONS]",
            description=description,
            epilog="example:\n" + textwrap.indent(example, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation that is unique today may not be tomorrow
        )
        for action in (None, "store"):
            self.register("action", action, StoreOnce)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the options; a misspelt option ends the program with a suggestion."""
        options, extra = self.parse_known_args(argv)
        extra.sort(key=lambda word: not word.startswith("-"))  # a misspelt option comes before its value
        if extra:
            self.error(unknown("option", extra[0], list(self._option_string_actions)))
        return options


def unknown(what: str, word: str, valid: Sequence[str]) -> str:
    """Return a message that `word` is unknown, with the most similar of the `valid` ones."""
    name = word.partition("=")[0]
    message = f"unknown {what} {name}"
    if near := nearest(name, valid):
        message += f"; did you mean {near[0]}?"
    return message


def add_config_options(parser: argparse.ArgumentParser, file: Path | None = None) -> None:
    """Add one option for each setting of a run, grouped by section. Values remain text: see `overrides`.

    If the command has a settings `file`, the help shows its settings as the defaults.
    """
    groups = {"": parser.add_argument_group("the run")}
    defaults = load_config(file)
    for name, setting in SCHEMA.settings.items():
        section = name.rpartition(".")[0]
        if section not in groups:
            description = inspect.getdoc(getattr(defaults, section)) or ""
            groups[section] = parser.add_argument_group(section, description.partition("\n")[0])
        flags = [f"--{name}", *([ALSO[name]] if name in ALSO else [])]
        add_setting(groups[section], flags, name, setting, _format_default(name, attrgetter(name)(defaults)))


def overrides(options: argparse.Namespace) -> dict[str, str | list[str]]:
    """Return the options on the command line by dotted name, for `load_config`."""
    given = {name: value for name, value in vars(options).items() if name in SCHEMA.settings and value is not None}
    for name, value in given.items():
        # A single word may itself be a YAML list, or `auto`; but [NAME] is a symbol
        if isinstance(value, list) and len(value) == 1 and not (name == SYMBOLS and IN_BRACKETS.fullmatch(value[0])):
            given[name] = value[0]
    # Some paths are opened before all settings are read
    return {name: expand_path(value, name) if SCHEMA.settings[name].path else value for name, value in given.items()}


def add_setting(
    group: argparse._ActionsContainer, flags: Sequence[str], dest: str, setting: SettingType, default: str
) -> None:
    """Add an option for a setting. Its value remains text: see `overrides`."""
    kind = setting.kinds[0]
    metavar = "YAML" if get_origin(kind) is Mapping else METAVARS.get(kind, "TEXT")
    nargs = None
    if any(get_origin(each) is tuple for each in setting.kinds):
        nargs, metavar = "+", "VALUE"
    help_text = f"{setting.help} (default: {default})".replace("%", "%%")  # argparse expands %
    group.add_argument(*flags, nargs=nargs, dest=dest, metavar=metavar, help=help_text)


def _format_default(name: str, default: object) -> str:
    """Return the default of a setting in words."""
    if default is None:
        return "that of the preset" if name.startswith("model.") else "none"
    if isinstance(default, (tuple, Mapping)):
        return " ".join(map(str, default)) or "none"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) or "none"
