"""The command that serves translations: a page for people, and an endpoint for programs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import (
    PROGRAM,
    add_checkpoint,
    add_decoding_options,
    add_runs,
    decoding_overrides,
    export_command,
    load,
    outdated,
    parser_of,
    require,
    runs_of,
)
from recipes.translation.errors import ConfigError

if TYPE_CHECKING:
    from recipes.translation.serve.models import Model


def serve(argv: Sequence[str]) -> int:
    """Serve a page that translates as you type, and an endpoint for programs, on this machine.

    With several runs the page shows their translations side by side. POST /translate takes and returns JSON as
    LibreTranslate's clients know it. docs/serve.md explains both. Ctrl-C stops the service.
    """
    parser = parser_of(
        serve,
        f"{PROGRAM} serve runs/demo\n"
        f"{PROGRAM} serve runs/small runs/large --port 8000\n"
        f"{PROGRAM} serve runs/demo --engine torch --beam 8",
    )
    add_runs(parser)
    add_checkpoint(parser)
    parser.add_argument(
        "--engine",
        choices=("torch", "ctranslate2"),
        help="ctranslate2 is for what export --to ctranslate2 wrote (default: ctranslate2 for a run that has such a "
        "folder, torch for others)",
    )
    add_decoding_options(parser)
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=HOST_HELP)
    parser.add_argument("--port", metavar="N", type=port, default=5000, help="0 takes one that is free (default: 5000)")
    options = parser.parse(argv)
    runs = runs_of(parser, options)
    if "RANK" in os.environ:
        raise ConfigError("serve is one process, which answers all requests: start it without torchrun and --processes")
    for package in ("starlette", "uvicorn"):
        require(package)

    from recipes.translation.serve.app import application
    from recipes.translation.serve.batching import Batcher
    from recipes.translation.serve.bodies import Limits
    from recipes.translation.serve.server import address_of, bound, is_loopback
    from recipes.translation.serve.server import serve as serve_app

    taken = bound(options.host, options.port)  # before the models are read, which takes longer
    try:
        models = [model for run in runs for model in models_of(run, options)]
        limits = Limits()
        batcher = Batcher(models, limits.queued_lines)
        try:
            app = application(models, batcher, limits, is_loopback(taken))
            ready = f"[serve] {address_of(taken)} (Ctrl-C stops)"
            return serve_app(app, taken, lambda: print(ready, flush=True))
        finally:
            batcher.close(5)
    finally:
        taken.close()


HOST_HELP = "0.0.0.0 lets other machines in, without a password (default: 127.0.0.1, this machine alone)"


def port(word: str) -> int:
    if not (word.isascii() and word.isdecimal()) or int(word) > 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 0 to 65535")
    return int(word)


def models_of(run: str, options: argparse.Namespace) -> list[Model]:
    """Read the model of a run, for the engine that is asked for, or else that which the run has; say which it is."""
    from recipes.translation.commands.served_models import torch_models
    from recipes.translation.processes.ranks import ALONE

    exported = Path(run)
    if not (exported / "model.bin").is_file():
        exported /= "ctranslate2"
    engine = options.engine
    if engine is None:
        engine = "torch"
        if (exported / "model.bin").is_file():
            engine = "ctranslate2"
    if engine == "ctranslate2":
        return exported_models(run, exported, options)
    models = torch_models(run, load(argparse.Namespace(**{**vars(options), "run": run}), ALONE))
    announce(run, models)
    return models


def exported_models(run: str, exported: Path, options: argparse.Namespace) -> list[Model]:
    """Read what a run was exported to, and the run itself for alignments, where it is there."""
    require("ctranslate2")

    from recipes.translation.commands.served_models import ctranslate2_models
    from recipes.translation.export import ctranslate2_engine
    from recipes.translation.files.atomic_folder import model_folder, whole_folder
    from recipes.translation.processes.ranks import ALONE

    if not exported.exists():
        raise ConfigError(f"there is no {exported}; write it with {export_command(run)}")
    overrides = decoding_overrides(options)
    found = ctranslate2_engine.load(exported, overrides=overrides)
    translator = None
    if options.checkpoint:
        raise ConfigError(
            f"{run} translates with {exported}, and --checkpoint is for torch: leave it out, or add --engine torch"
        )
    checkpoint = model_folder(run)
    if exported != Path(run) and whole_folder(checkpoint):
        translator = load(argparse.Namespace(**{**vars(options), "run": run}), ALONE)
    models = ctranslate2_models(run, found, translator)
    announce(run, models)
    if translator and outdated(exported, Path(run)):
        again = "export it again, or add --engine torch"
        print(f"[serve] {exported} was made from an earlier model than {checkpoint}: {again}", flush=True)
    return models


def announce(run: str, models: Sequence[Model]) -> None:
    """Print which engine translates between which languages."""
    pairs = ", ".join(f"{model.source} to {model.target}" for model in models)
    print(f"[serve] {run}: {pairs}, with {models[0].engine}, beam {models[0].beam}", flush=True)
