"""Paths as a user may write them, in settings files and on the command line."""

from __future__ import annotations

import os
import re

from recipes.translation.errors import ConfigError

VARIABLE = re.compile(r"\$\{(\w+)\}|(?<![^/])\$(\w+)(?![^/])")
"""${NAME} anywhere, and $NAME as a folder's whole name: a $ inside a name may be intended."""

LITERAL = "!literal"
"""The YAML tag of a path that must be read literally, because a reader would otherwise replace a part of it."""


def is_expanded(path: str) -> bool:
    """Return whether `expand_path` would replace a part of the path, or refuse it."""
    return bool(path.startswith("~") or VARIABLE.search(path))


def expand_path(path: str, setting: str = "") -> str:
    """Replace each ${NAME} in `path` from the environment, and a leading ~ with the home folder.

    Raises ConfigError, naming the setting, if there is one, for a variable that is not set and for the home of an
    unknown user.
    """
    what, way = (setting, f", or give --{setting}") if setting else ("it", "")

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(f"{what} is {path}, but the environment variable {name} is not set: set it{way}")
        return os.environ[name]

    found = os.path.expanduser(VARIABLE.sub(value, path))
    if re.match(r"~\w*(/|$)", found):
        raise ConfigError(
            f"{what} is {path}, but there is no home folder for {found.partition('/')[0]}: write ./{path} for a "
            "file of that name"
        )
    return found
