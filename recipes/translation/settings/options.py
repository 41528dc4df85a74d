"""Command-line options generated from the configuration's dataclasses, and errors of one line.

Every field of `RunConfig` becomes an option under its dotted name (`--training.steps`), with the field's own
docstring and default as its help, so that the command line cannot drift from the configuration.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any, NoReturn

from recipes.translation.settings.config import RunConfig

ALSO = {"run": "--folder"}
"""Other spellings: torchrun takes --run for an abbreviation of its own --run-path, and says that it is ambiguous."""
METAVARS = {"int": "N", "float": "X", "bool": "true|false"}


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
    top = parser.add_argument_group("the run")
    for field, default, meaning in settings(RunConfig):
        if is_dataclass(default):
            group = parser.add_argument_group(field.name, (inspect.getdoc(default) or "").partition("\n")[0])
            for inner, inner_default, inner_meaning in settings(type(default)):
                _add(group, f"{field.name}.{inner.name}", inner, inner_default, inner_meaning)
        else:
            _add(top, field.name, field, default, meaning)


def overrides(options: argparse.Namespace) -> dict[str, str | list[str]]:
    """What was given on the command line, by dotted name, as `load_config` takes it."""
    names = set(setting_names())
    given: dict[str, str | list[str]] = {}
    for name, value in vars(options).items():
        if name in names and value is not None:
            given[name] = value if isinstance(value, str) else _as_yaml(value)
    return given


def setting_names() -> list[str]:
    """The dotted name of every setting."""
    names = []
    for field, default, _ in settings(RunConfig):
        inner = [f"{field.name}.{each.name}" for each in fields(default)] if is_dataclass(default) else [field.name]
        names.extend(inner)
    return names


def settings(section: type[Any]) -> Iterator[tuple[Field[Any], object, str]]:
    """Each field of a configuration dataclass with its default and the docstring that stands below it."""
    defaults = section()
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for statement, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            meanings[statement.target.id] = " ".join(str(text).split())
    for field in fields(section):
        yield field, getattr(defaults, field.name), meanings[field.name]


def _add(group: argparse._ArgumentGroup, name: str, field: Field[Any], default: object, meaning: str) -> None:
    kind = str(field.type)
    several = "tuple" in kind
    group.add_argument(
        *filter(None, (f"--{name}", ALSO.get(name))),
        nargs="+" if several else None,
        dest=name,
        metavar="VALUE" if several else METAVARS.get(kind.partition(" ")[0], "TEXT"),
        help=f"{meaning} (default: {_shown(default)})".replace("%", "%%"),
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
