"""The command line: `python -m recipes.translation <command>`.

Settings on the command line override those in the YAML file, which override the defaults. If the user makes a mistake,
the program prints one line and exits with status 2. Each command imports modules that need torch inside its function,
so that help and error messages appear at once.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Sequence

from recipes.translation.commands.arguments import PROGRAM, Command, count, description_of, name_of
from recipes.translation.commands.evaluation import compare, evaluate, report
from recipes.translation.commands.export import export, import_
from recipes.translation.commands.serving import serve
from recipes.translation.commands.training import DEMO_CONFIG, average, demo, distil, prepare, train
from recipes.translation.commands.translation import translate
from recipes.translation.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OtherRankError,
    TrainingError,
    missing_package,
)
from recipes.translation.processes.launch import automatic, launch
from recipes.translation.processes.status_line import escape
from recipes.translation.settings.options import StoreOnce, unknown

__all__ = ["COMMANDS", "DEMO_CONFIG", "main"]

RUN = (demo, prepare, train, average, distil, evaluate, compare, translate, import_, export, report, serve)
COMMANDS: dict[str, Command] = {name_of(run): run for run in RUN}
"""The commands by their names, in the order of the overview."""


PRINTING = ("translate", "compare")
"""The commands whose only result is what they print."""


def main(argv: Sequence[str]) -> int:
    """Run a command; return the exit status: 0, 2 for a user's mistake, or 128 + the number of a signal."""
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(overview(), flush=True)
            return 0
        name, *rest = argv
        if name not in COMMANDS:
            return fail(f"{unknown('command', name, list(COMMANDS))}; the commands are {', '.join(COMMANDS)}")
        return run_command(name, rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OtherRankError as error:
        if os.environ.get("RANK", "0") != "0":
            return 2  # rank 0 prints the error
        return fail(str(error))
    except UnicodeEncodeError as error:
        return fail(output_lacks(error))
    except (OSError, ConfigError, DataError, CheckpointError, TrainingError, FloatingPointError) as error:
        if isinstance(error, OSError) and error.filename:  # str(error) would start with [Errno 13]
            return fail(f"{error.filename}: {error.strerror}")
        return fail(str(error))


LONGEST = 2_000
"""The most characters of an error that are printed."""


def fail(message: str) -> int:
    """Print an error as one line, and return the exit status for it."""
    rank = os.environ.get("RANK", "0")
    line = escape(" ".join(message.split()))
    if len(line) > LONGEST:  # as another program's error may be, if it quotes a file
        line = f"{line[:LONGEST]}... ({len(line):,} characters)"
    if rank != "0":
        line = f"rank {rank}: {line}"
    # In one piece: when unbuffered, print writes the line end separately, and two processes' lines would get mixed
    print(f"error: {line}\n", end="", file=sys.stderr)
    return 2


def output_lacks(error: UnicodeEncodeError) -> str:
    """Return a one-line error for a letter that the output's encoding lacks; re-raise other encoding errors."""
    if codecs.lookup(error.encoding).name != codecs.lookup(sys.stdout.encoding).name:
        raise error
    letter = error.object[error.start]
    return f"the output's encoding, {error.encoding}, has no {letter!r}: set PYTHONIOENCODING=utf-8"


def run_command(name: str, words: Sequence[str]) -> int:
    """Run a command, in as many processes as --processes says."""
    # Python has no such stream if its parent closed it, and then loses what is printed
    if sys.stdout is None and name in PRINTING:
        raise ConfigError(f"there is no standard output, where {name} prints its results")
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    processes, rest = processes_of(words)
    if processes is not None:
        return launch(processes, [name, *rest])
    try:
        return COMMANDS[name](rest)
    except ModuleNotFoundError as error:
        if missing := missing_package(error):
            raise ConfigError(missing) from error
        raise


def processes_of(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the number that --processes gives, and the other words; None without it, and for one process.

    Raises ConfigError for a value that is not a number, and in a process that was itself launched by torchrun.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.register("action", None, StoreOnce)
    parser.add_argument("--processes", type=lambda word: automatic() if word == "auto" else count(word))
    try:
        options, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}: give a number, or auto") from None
    if options.processes and "RANK" in os.environ:
        raise ConfigError("--processes was given to a process that torchrun started: leave one of them out")
    return options.processes if options.processes != 1 else None, rest


def overview() -> str:
    """Return the list of commands, each with an example."""
    width = max(map(len, COMMANDS))
    lines = []
    for name, run in COMMANDS.items():
        description, example = (text.partition("\n")[0] for text in description_of(run))
        lines.append(f"  {name:<{width}}  {description}")
        lines.append(f"  {'':<{width}}    {example}")
    commands = "\n".join(lines)
    return (
        f"Train and use translation models.\n\nusage: {PROGRAM} COMMAND [OPTIONS]\n\ncommands:\n{commands}\n\n"
        f"Begin with: {PROGRAM} demo\nHelp on a command and its options: {PROGRAM} train --help"
    )
