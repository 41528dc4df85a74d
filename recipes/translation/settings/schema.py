"""Reading of settings from YAML and the command line, by the types in a tree of dataclasses, with one-line errors.

Values are converted from YAML's syntax nodes, not from Python objects: a node has a line number, the language code `no`
stays text where text is expected, and `1e-3`, which is text in YAML 1.1, is a number where a number is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from recipes.translation.errors import ConfigError
from recipes.translation.settings.paths import LITERAL, expand_path

T = TypeVar("T")
COMMAND_LINE = "command line"
YAML_TAG = "tag:yaml.org,2002:"
SCALARS = ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
"""The tags that YAML may give to an unquoted word; each of them is text where text is expected."""


LARGEST = 2**31 - 1
"""The largest number of a setting without its own upper limit: some libraries have 32-bit sizes and counts."""

GONE = {"data.streaming": "false", "training.r_drop": "0.0", "noise": "0.0", "layout.sequence": "1"}
"""Settings and sections that models saved by earlier versions have, and the value that is equivalent to leaving them
out."""


class _UnfitError(ValueError):
    """A value has the right type but is invalid; the message gives the reason."""


class Range(NamedTuple):
    """The numbers that a setting may be; `below` itself is excluded."""

    at_least: float
    below: float = math.inf

    def __str__(self) -> str:
        if self.below < math.inf:
            return f"from {self.at_least:g} to below {self.below:,g}"
        return f"from {self.at_least:g} up"


def setting(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    below: float = math.inf,
    choices: tuple[str, ...] = (),
    path: bool = False,
) -> T:
    """Make a field of a configuration dataclass: its default, its help text, and the values that it may have.

    Texts to choose from are a `Literal` in the annotation or, if they come from a table, `choices`. The ~ and ${NAME}
    in a `path` are replaced when it is read; the names of data files keep theirs until the files are opened.
    """
    limits = None if at_least is None else Range(at_least, below)
    metadata = {"help": help, "choices": choices, "range": limits, "path": path}
    return dataclasses.field(default=default, metadata=metadata)


class SettingType(NamedTuple):
    """A field of a configuration dataclass, as its annotation and `setting` describe it."""

    kinds: tuple[Any, ...]
    """The types that a value may have: str, int, float, bool, NoneType, or a tuple of one of these; or only a Mapping
    from names to dataclasses."""
    help: str
    choices: tuple[str, ...]
    """The texts that a value may be; empty if it may be any."""
    range: Range | None
    path: bool
    default: Any

    @classmethod
    def of(cls, field: dataclasses.Field[Any], kind: Any) -> SettingType:
        """Read a field and its annotation."""
        alternatives = (kind,)
        if get_origin(kind) in (Union, types.UnionType):
            alternatives = get_args(kind)
        kinds: list[Any] = []
        choices: tuple[str, ...] = field.metadata.get("choices", ())
        for alternative in alternatives:
            inner = get_args(alternative)[0] if _is_list(alternative) else alternative
            if get_origin(inner) is Literal:
                choices = get_args(inner)
                alternative = str if inner is alternative else tuple[str, ...]
            kinds.append(alternative)
        known = field.metadata
        return cls(tuple(kinds), known["help"], choices, known.get("range"), known.get("path", False), field.default)


class Setting(NamedTuple):
    """A value, and where it was given: `file:line` or the command line."""

    value: Any
    location: str


class Schema:
    """The settings of a dataclass and of the dataclasses in its fields, by dotted keys that start with `section`."""

    def __init__(self, root: type[Any], section: str = "") -> None:
        self.settings: dict[str, SettingType] = {}
        self.sections: dict[str, list[str]] = {}
        self._add(section, root)

    def _add(self, section: str, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        self.sections[section] = list(hints)
        for field in dataclasses.fields(kind):
            if dataclasses.is_dataclass(hints[field.name]):
                self._add(field.name, hints[field.name])
            else:
                key = f"{section}.{field.name}".removeprefix(".")
                self.settings[key] = SettingType.of(field, hints[field.name])

    def read_file(self, path: Path) -> dict[str, Setting]:
        """Read all settings in a YAML file."""
        return self._read_section(_compose_file(path), "", path)

    def read_overrides(self, overrides: Mapping[str, object], location: str = COMMAND_LINE) -> dict[str, Setting]:
        """Read settings by dotted key, from text as on the command line or from values; errors name the location."""
        given = {}
        for key, value in overrides.items():
            self._check_known(key, location)
            if key in self.sections:
                example = f"{key}.{self.sections[key][0]}"
                raise ConfigError(f"{key} ({location}) is a section; name one of its settings, such as {example}")
            try:
                node = _as_node(self._without_none(key, value), self.settings[key].kinds)
            except (_UnfitError, yaml.YAMLError) as error:
                reason = f": {error}" if isinstance(error, _UnfitError) else ""
                raise ConfigError(self._refusal(key, location, shorten(repr(value))) + reason) from None
            given[key] = Setting(self._value(key, node, location), location)
        return given

    def _without_none(self, key: str, value: object) -> object:
        """Return a value as typed, but the empty value for `none` if that is what the help calls the default."""
        setting = self.settings[key]
        if value not in ("none", ["none"], ("none",)) or "none" in setting.choices:
            return value
        if types.NoneType in setting.kinds:
            return "null"
        return setting.default if setting.default in ("", ()) else value

    def _read_section(self, node: yaml.Node, section: str, path: Path) -> dict[str, Setting]:
        """Read the settings of a section; the file itself is section ""."""
        what = "a configuration file has sections, as in training: {steps: 100}"
        if section:
            what = f"{section} is a section, as in {section}: {{{self.sections[section][0]}: ...}}"
        given: dict[str, Setting] = {}
        line = node.start_mark.line + 1 if node.start_mark else 1
        for key, value, location in _entries(node, section, path, f"{path}:{line}: {what}"):
            if key in GONE:
                _check_gone(key, value, location)
                continue
            self._check_known(key, location)
            found = {}
            if key in self.sections:
                found = self._read_section(value, key, path)
            else:
                found[key] = Setting(self._value_of_file(key, value, location), location)
            for name in given.keys() & found:
                raise _twice(name, given[name].location, found[name].location)
            given |= found
        return given

    def _check_known(self, key: str, location: str) -> None:
        known = [*self.settings, *filter(None, self.sections)]
        if key in known:
            return
        if near := nearest(key, known):
            hint = f"did you mean {near[0]}?"
        else:
            section = key.rpartition(".")[0]
            hint = f"known: {', '.join(self.sections.get(section) or next(iter(self.sections.values())))}"
        raise ConfigError(f"unknown setting {key} ({location}); {hint}")

    def _value_of_file(self, key: str, node: yaml.Node, location: str) -> Any:
        """Read a value, and expand it if it is a path; paths from the command line and saved ones already are."""
        if not self.settings[key].path:
            return self._value(key, node, location)
        if node.tag == LITERAL:
            return self._value(key, yaml.ScalarNode(f"{YAML_TAG}str", node.value), location)
        value = self._value(key, node, location)
        return expand_path(value, key) if value else value

    def _value(self, key: str, node: yaml.Node, location: str) -> Any:
        alternatives = self.settings[key].kinds
        if get_origin(alternatives[0]) is Mapping:
            return self._named_sections(key, node, location)
        if len(alternatives) == 1 and _is_list(alternatives[0]) and isinstance(node, yaml.ScalarNode):
            node = yaml.SequenceNode(f"{YAML_TAG}seq", [node])  # one file needs no brackets
        reason = ""
        # In the order of the annotation: for `str | tuple[str, ...]`, one word is the text rather than a list of one
        for kind in alternatives:
            try:
                value = _convert(node, kind)
                if value is None or self._allows(key, value):
                    return value
            except _UnfitError as error:
                reason = f": {error}"
            except ValueError:
                continue
        got = _describe_node(node)
        if self.settings[key].choices and _is_list(alternatives[0]) and isinstance(node, yaml.SequenceNode):
            wrong = [each for each in node.value if _describe_node(each).strip("'") not in self.settings[key].choices]
            got = ", ".join(_describe_node(each) for each in wrong)
        raise ConfigError(self._refusal(key, location, got) + reason)

    def _named_sections(self, key: str, node: yaml.Node, location: str) -> dict[str, Any]:
        """Read sections whose names the user chooses."""
        path = Path(location.rpartition(":")[0] or location)
        kind = get_args(self.settings[key].kinds[0])[1]
        found: dict[str, Any] = {}
        for section, inner, where in _entries(node, key, path, self._expectation(key, location)):
            values = Schema(kind, section)._read_section(inner, section, path)
            try:
                name = _text(section.removeprefix(f"{key}."))
            except _UnfitError as error:
                raise ConfigError(f"{section!a} ({where}) cannot be a name: {error}") from None
            found[name] = kind(**{setting.rpartition(".")[2]: given.value for setting, given in values.items()})
        return found

    def _allows(self, key: str, value: object) -> bool:
        setting = self.settings[key]
        each = value if isinstance(value, tuple) else (value,)
        if setting.choices:
            return set(each) <= set(setting.choices)
        if setting.range is None:  # a text; every number has a range
            return True
        # Above 2^31 some libraries fail with an error of their own, or wrap around
        if isinstance(value, int) and value > LARGEST and setting.range.below == math.inf:
            raise _UnfitError(f"it is above {LARGEST:,}")
        return all(setting.range.at_least <= one < setting.range.below for one in each)

    def _refusal(self, key: str, location: str, got: str) -> str:
        message = f"{self._expectation(key, location)}; got {got}"
        if near := difflib.get_close_matches(got.strip("'\""), self.settings[key].choices, n=1):
            message += f": did you mean {near[0]}?"
        return message

    def _expectation(self, key: str, location: str) -> str:
        setting = self.settings[key]
        limits = f" {setting.range}" if setting.range else ""
        expected = " or ".join(_words(kind, limits) for kind in setting.kinds)
        if setting.choices:
            expected = "one of " + ", ".join(setting.choices)
            if _is_list(setting.kinds[0]):
                expected = f"a list, each {expected}"
        return f"{_label(key, location)} expects {expected}"


def _label(key: str, location: str) -> str:
    """Return what a setting is called where it was given; a command's option has a name of its own."""
    return location if location.startswith("--") else f"{key} ({location})"


def _check_gone(key: str, node: yaml.Node, location: str) -> None:
    values = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else [node]
    if any(_describe_node(value) != repr(GONE[key]) for value in values):
        raise ConfigError(
            f"{key} ({location}) is a setting of an earlier version: leave it out of a new training; a model that has "
            "it can be exported by that version for Hugging Face, and `import` reads the export"
        )


def nearest(word: str, valid: Sequence[str]) -> list[str]:
    """Return the valid name most similar to a word or, if none is, whose last part is: training.steps for step."""
    ends = {name.rpartition(".")[2].lstrip("-"): name for name in valid}
    by_end = difflib.get_close_matches(word.rpartition(".")[2].lstrip("-"), ends, n=1)
    return difflib.get_close_matches(word, valid, n=1, cutoff=0.8) or [ends[end] for end in by_end]


def _entries(node: yaml.Node, section: str, path: Path, what: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield key, value and location of each entry in a section, each key once; `what` says what is expected."""
    if node.tag == f"{YAML_TAG}null":
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{what}; got {_describe_node(node)}")
    locations: dict[str, str] = {}
    for key_node, value in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else _describe_node(key_node)
        if section:
            key = f"{section}.{key}"
        location = f"{path}:{key_node.start_mark.line + 1}"
        if key in locations:
            raise _twice(key, locations[key], location)
        locations[key] = location
        yield key, value, location


def _compose_file(path: Path) -> yaml.Node:
    try:
        return _compose(path.read_text(encoding="utf-8"))
    except _UnfitError as error:
        raise ConfigError(f"{path} is {error}: it has sections, and settings in them") from None
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        what = getattr(error, "problem", None) or getattr(error, "context", None) or " ".join(str(error).split())
        raise ConfigError(f"{where} is not YAML: {what}") from error


def _compose(text: str) -> yaml.Node:
    """Compose the nodes of a document; an empty one is null."""
    try:
        # Not with libyaml, whose messages do not say which alias is wrong, or on which line a bracket was opened
        return yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode(f"{YAML_TAG}null", "")
    except RecursionError:
        raise _UnfitError("nested too deeply") from None


def _as_node(value: object, kinds: Sequence[Any]) -> yaml.Node:
    """Convert an override to the YAML node that it would be in a file; text stays text if the setting may be text."""
    inner = [get_args(kind)[0] for kind in kinds if _is_list(kind)]
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(f"{YAML_TAG}seq", [_as_node(each, inner) for each in value])
    if not isinstance(value, str):
        return _compose(yaml.safe_dump(value, sort_keys=False))
    # "12" and "true" stay text where text is expected; only null and [...] are read as YAML, if they are allowed
    if types.NoneType in kinds and value in ("null", "~"):
        return _compose("null")
    if str in (*kinds, *inner) and not (inner and value.startswith("[")):
        return yaml.ScalarNode(f"{YAML_TAG}str", value)
    return _compose(_text(value))


def _is_list(kind: object) -> bool:
    return get_origin(kind) is tuple


def _convert(node: yaml.Node, kind: Any) -> Any:
    """Convert a node to a value of type `kind`; raise ValueError if it is not of this type."""
    if _is_list(kind):
        inner = get_args(kind)
        if not isinstance(node, yaml.SequenceNode) or (inner[-1] is not ... and len(node.value) != len(inner)):
            raise ValueError
        return tuple(_convert(each, inner[0]) for each in node.value)
    if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(YAML_TAG) not in SCALARS:
        raise ValueError
    null = node.tag == f"{YAML_TAG}null"
    plain = not node.style  # without quotes: "12" in quotes is text
    if kind is types.NoneType and null:
        return None
    if kind is str and not null:
        return _text(node.value)
    if kind is bool and node.tag == f"{YAML_TAG}bool":
        return node.value.lower() in ("true", "yes", "on")  # the tag excludes all but these and their opposites
    if kind is int and plain and re.fullmatch(r"[-+]?[0-9][0-9_]*", node.value):
        return int(node.value)
    # By Python's rules, not YAML 1.1's, in which 1e-3 is text; nan and inf are not valid
    if kind is float and plain and math.isfinite(number := float(node.value)):
        return number
    raise ValueError


def _text(value: str) -> str:
    """Return the value if it can be a file name and UTF-8 text; otherwise raise _UnfitError."""
    if "\0" in value:
        raise _UnfitError("it contains a NUL")
    if found := re.search("[\1-\x1f\x7f-\x9f]", value):
        raise _UnfitError(f"it contains the control character {found[0]!a}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _UnfitError("it is not Unicode") from None
    return value


def _describe_node(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        if node.tag == f"{YAML_TAG}null":
            return "nothing"
        return shorten(repr(node.value))
    if isinstance(node, yaml.SequenceNode):
        return f"a list of {len(node.value)}"
    return f"a section of {len(node.value)}"


def shorten(text: str) -> str:
    """Return a text, or the start of a long one with its length."""
    if len(text) <= 80:
        return text
    return f"{text[:40]}... ({len(text):,} characters)"


def _words(kind: Any, limits: str) -> str:
    if get_origin(kind) is Mapping:
        return "sections, each under a name"
    if _is_list(kind):
        inner = get_args(kind)
        each = _words(inner[0], limits)
        if inner[-1] is ...:
            return f"a list, each {each}"
        return f"a list of {len(inner)}, each {each}"
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number", types.NoneType: "null"}
    if kind is int and (found := re.fullmatch(r"( from .* to )below ([\d,]+)", limits)):
        limits = f"{found[1]}{int(found[2].replace(',', '')) - 1:,}"
    return names[kind] + (limits if kind in (int, float) else "")


def _twice(key: str, first: str, second: str) -> ConfigError:
    return ConfigError(f"{key} is given twice ({first} and {second}); keep one")
