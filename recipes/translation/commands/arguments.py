"""What several commands share: options, and how they are read."""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.atomic_folder import model_folder, read_consistently, through_pointer, whole_folder
from recipes.translation.files.json_fields import field_in
from recipes.translation.run_folder.outputs import check_run
from recipes.translation.settings.config import SCHEMA, DecodingConfig, RunConfig, load_config, moved_to
from recipes.translation.settings.options import ALSO, OneLineParser, add_setting, overrides
from recipes.translation.settings.paths import expand_path

if TYPE_CHECKING:
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.checkpoint import SavedModel
    from recipes.translation.run_folder.translator import Translator
    from recipes.translation.translating.ctranslate2_engine import ExportedTranslator

N = TypeVar("N", int, float)
PROGRAM = "python -m recipes.translation"


Command = Callable[[Sequence[str]], int]
"""Takes the words on the command line, and returns the exit status."""


def description_of(run: Command) -> tuple[str, str]:
    """Return a command's description, from its docstring, and its examples, one per line."""
    description, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\n\nexample:\n")
    return description, examples


def name_of(run: Command) -> str:
    return run.__name__.rstrip("_")  # `import` is a Python keyword


def parser_of(run: Command) -> OneLineParser:
    return OneLineParser(f"{PROGRAM} {name_of(run)}", *description_of(run))


def number(kind: Callable[[str], N], fits: Callable[[N], bool], what: str) -> Callable[[str], N]:
    """Return the function that reads an option's number; `what` says in words which numbers fit."""

    def read(word: str) -> N:
        with suppress(ValueError):
            if fits(found := kind(word)):
                return found
        raise argparse.ArgumentTypeError(f"{word!r} is not {what}")

    return read


count = number(int, lambda found: found > 0, "a whole number from 1 up")


def path(word: str) -> str:
    if "\0" in word:
        raise argparse.ArgumentTypeError(f"{word!r} is not a path: it contains a NUL")
    if not word:
        raise argparse.ArgumentTypeError("it is empty, perhaps because a shell variable is not set: give a path")
    try:
        return expand_path(word)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


SHARED: dict[str, dict[str, Any]] = {
    "--config": {
        "metavar": "FILE",
        "type": path,
        "help": "YAML file with settings, which options override (default: the settings of --run, if it is a run)",
    },
    "--processes": {  # only for its help: `main` has already taken it from the command line
        "metavar": "N",
        "help": "start this many processes on this machine, as torchrun does; auto starts one for each GPU or, without "
        "one, for each core, at most 4 (default: 1)",
    },
    "--run": {"metavar": "FOLDER", "type": path, "default": "runs/demo", "help": "the run (default: runs/demo)"},
    "--checkpoint": {
        "choices": ("best", "last", "averaged"),
        "help": "the model with the best validation, the newest one, or the one that the command average made "
        "(default: best)",
    },
    "--ensemble": {
        "metavar": "FOLDER",
        "type": path,
        "action": "append",
        "help": "another run that translates together with --run; can be given several times",
    },
    "--tokenize": {
        "metavar": "NAME",
        "help": "sacreBLEU's tokeniser: 13a, intl, char, zh, ...; none for text that is already tokenised (default: "
        "the setting data.tokenize, which follows the target language; without a run, the script of the files)",
    },
}
"""Options that several commands have."""


def add(options: argparse._ActionsContainer, *names: str) -> None:
    """Add some of the shared options."""
    for name in names:
        also = [spelling for setting, spelling in ALSO.items() if name == f"--{setting}"]
        options.add_argument(name, *also, **SHARED[name])


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add positional names of one or several runs, which may also be given by --run, as for other commands."""
    parser.add_argument("runs", nargs="*", metavar="RUN", type=path, help="a run's folder, or several")
    add(parser, "--run")


def runs_of(parser: OneLineParser, options: argparse.Namespace) -> list[str]:
    """Return the runs that are named, at least one."""
    if options.runs and options.run != parser.get_default("run"):
        parser.error("name the runs with --run or without, not both")
    return options.runs or [options.run]


DECODING = tuple(field.name for field in fields(DecodingConfig))
"""The decoding settings, each of which is an option of the commands that translate."""


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each decoding setting; the values remain text, as in `add_config_options`."""
    for name in DECODING:
        default = f"the run's own decoding.{name}, {getattr(DecodingConfig(), name)} unless it was set"
        add_setting(parser, [as_option(name)], name, SCHEMA.settings[f"decoding.{name}"], default)


def as_option(name: str) -> str:
    return "--" + name.replace("_", "-")


def run_config(options: argparse.Namespace) -> RunConfig:
    """Read the settings; without --config, an existing run's own settings replace the defaults.

    A run without a checkpoint to resume from starts over; if no data is given, it also keeps its own settings.
    """
    config = _chosen_settings(options)
    check_folder(config.run)
    return config


def _chosen_settings(options: argparse.Namespace) -> RunConfig:
    given: dict[str, object] = {**overrides(options)}
    path = config_file(options)
    if path is None:
        run = str(given.get("run", RunConfig().run))
        last = Path(run) / "last"
        if whole_folder(last):
            # A training in progress may replace the model at any moment
            return read_consistently(last, lambda: resumed_config(last, run, given))
        if any((Path(run) / name).exists() for name in ("resources.jsonl", "subwords")):
            given = {**unsaved_settings(Path(run), given), **given, "run": run}
    return load_config(path, given)


def config_file(options: argparse.Namespace) -> Path | None:
    """Return the file that --config names, which may be in a run's `best`."""
    if options.config is None:
        return None
    return through_pointer(Path(options.config))


def unsaved_settings(run: Path, given: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of a run that started but ended before its first checkpoint; none if data is given.

    Raises ConfigError for a run that was only prepared, from data other than that of the default settings.
    """
    from recipes.translation.data.corpora import Corpora
    from recipes.translation.data.prepare import of_other_data
    from recipes.translation.report.records import begun_settings
    from recipes.translation.run_folder.resume import MAY_CHANGE

    if any(name.startswith(("data.", "corpora")) for name in given.keys() - MAY_CHANGE):
        return {}
    if begun := begun_settings(run):
        note = f"[train] {run} has no checkpoint yet: it starts over, with the settings of its last start"
        if os.environ.get("RANK", "0") == "0":
            print(note, flush=True)
        return begun
    if of_other_data(run / "subwords", Corpora(load_config(None, given))):
        raise ConfigError(
            f"{run} has no checkpoint yet, and its subwords were made from data other than the built-in corpus, which "
            "is the default: give the settings of the run again, with --config or as options"
        )
    return {}


def resumed_config(last: Path, run: str, given: dict[str, object]) -> RunConfig:
    """Read the settings of a run, which may have been moved to the folder `run`, overridden by those given."""
    path = (whole_folder(last) or last) / "config.yaml"
    config = load_config(path, {**given, "run": run})
    saved = load_config(path)
    if config.corpora != saved.corpora:
        return config
    return replace(config, corpora=moved_to(saved, run).corpora)


def check_folder(run: str) -> None:
    """Raise ConfigError unless the folder that the settings name can hold a run."""
    if not run:
        raise ConfigError("run is empty, perhaps because a shell variable is not set: name the folder of the run")
    check_run(Path(run))


READ = ("file", "sources", "references", "hypotheses", "prefixes", "constraints")
"""Options that name files to read."""


def check_typed(options: argparse.Namespace) -> None:
    """Raise an error for decoding settings, files and runs that are wrong as typed, before torch is imported."""
    # Each by itself: whether they fit together depends on the run's own decoding settings
    for name, value in decoding_overrides(options).items():
        SCHEMA.read_overrides({name: value}, as_option(name.removeprefix("decoding.")))
    for file in (getattr(options, name, None) for name in READ):
        if file and not os.path.exists(file):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
    if getattr(options, "engine", "torch") == "torch" and not getattr(options, "hypotheses", None):
        checkpoint_folder(options.run, options.checkpoint)
        note_outdated_average(options.run, options.checkpoint)


def decoding_overrides(options: argparse.Namespace) -> dict[str, object]:
    """Return the decoding settings that are given on the command line."""
    given = {}
    for name in DECODING:
        if getattr(options, name, None) is not None:  # not every command has them
            given[f"decoding.{name}"] = getattr(options, name)
    return given


def require(package: str) -> None:
    """Raise ConfigError unless a package is installed."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: pip install {package}")


def checkpoint_folder(run: str, checkpoint: str | None) -> Path:
    """Return the folder of the model that --run and --checkpoint name; raise CheckpointError if there is none.

    Raises ConfigError for a --run that is the folder of a model other than the one that --checkpoint chooses.
    """
    named = Path(run)
    if checkpoint and whole_folder(named) and named.resolve().name != checkpoint:
        raise ConfigError(
            f"{named} is the folder of a single model, so --checkpoint {checkpoint} has nothing to choose from: name "
            "the run it is in, or leave --checkpoint out"
        )
    folder = model_folder(named, checkpoint or "best")
    if whole_folder(folder) is None and not folder.exists():
        way = "train one"
        if checkpoint == "averaged":
            way = f"make it with {PROGRAM} average"
        raise CheckpointError(f"there is no trained model in {folder}; {way}, or name another folder with --run")
    return folder


def saved_model(run: str, options: argparse.Namespace) -> SavedModel:
    """Open the model of a run, with the decoding options given."""
    from recipes.translation.run_folder.checkpoint import load_saved

    return load_saved(checkpoint_folder(run, options.checkpoint), decoding_overrides(options))


def load(run: str, options: argparse.Namespace) -> Translator:
    """Read the model of a run into this process only, on its GPU, if any, with the decoding options given."""
    import torch

    from recipes.translation.run_folder.checkpoint import load_translator

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_translator(checkpoint_folder(run, options.checkpoint), device, decoding_overrides(options))


def models_of_runs(
    runs: Sequence[str], options: argparse.Namespace, ranks: Ranks
) -> AbstractContextManager[tuple[list[Translator], Ranks]]:
    """Within the block, give the models of some runs, with the decoding options given, as `loaded_models` does."""
    from recipes.translation.training.loaded_models import loaded_models

    return loaded_models([partial(saved_model, run, options) for run in runs], ranks)


def exported_folder(run: str) -> Path:
    """Return the folder of an export for CTranslate2: the one that is named, or the one in a run."""
    if (Path(run) / "model.bin").is_file():
        return Path(run)
    return Path(run) / "ctranslate2"


def load_exported(run: str, options: argparse.Namespace) -> ExportedTranslator:
    """Read the export for CTranslate2, with the decoding options given."""
    require("ctranslate2")

    from recipes.translation.translating import ctranslate2_engine

    folder = exported_folder(run)
    if not folder.exists():
        way = f"{PROGRAM} export --run {shlex.quote(run)} --to ctranslate2"
        raise ConfigError(f"there is no {folder}; write it with {way}")
    return ctranslate2_engine.load(folder, overrides=decoding_overrides(options))


def outdated_export(run: str) -> str:
    """Return a note if a run's export was made from a model that the run no longer has; empty otherwise."""
    from recipes.translation.run_folder.made_from import model_with, origin_digest, weights_digest

    named = Path(run)
    folder = exported_folder(run)
    weights = origin_digest(folder)
    if folder == named or not weights or not whole_folder(model_folder(run)):
        return ""
    if model_with(named, weights) or weights_digest(named) == weights:  # a run, or a model's own folder
        return ""
    return f"{folder} was made from an earlier model than {model_folder(run)}: export it again"


def note_outdated_average(run: str, checkpoint: str | None) -> None:
    """Print a note if --checkpoint averaged is given, but the run has been trained since its models were averaged."""
    averaged = whole_folder(Path(run) / "averaged")
    last = whole_folder(Path(run) / "last")
    if checkpoint != "averaged" or averaged is None or last is None:
        return
    of = field_in(averaged / "model.json", "averaged_steps") or [0]
    step = field_in(last / "model.json", "step") or 0
    if step > of[-1]:
        note = f"{averaged} averages models up to step {of[-1]:,}, but {last} is from step {step:,}: average again"
        print(f"[averaged] {note}", file=sys.stderr)
