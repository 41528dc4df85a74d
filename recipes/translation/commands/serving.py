"""The command that serves translations: a page for people, and an endpoint for programs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import (
    add,
    add_decoding_options,
    add_runs,
    exported_folder,
    load,
    load_exported,
    note_outdated_average,
    number,
    outdated_export,
    parser_of,
    require,
    runs_of,
)
from recipes.translation.errors import ConfigError
from recipes.translation.files.atomic_folder import model_folder, whole_folder

if TYPE_CHECKING:
    from recipes.translation.serve.batching import Model


def serve(argv: Sequence[str]) -> int:
    """Serve a page that translates as you type, and an endpoint for programs, on this machine.

    With several runs the page shows their translations side by side. POST /translate takes and returns JSON as
    LibreTranslate's clients know it. docs/serve.md explains both. Ctrl-C stops the service.

    example:
    python -m recipes.translation serve runs/demo
    python -m recipes.translation serve runs/small runs/large --port 8000
    python -m recipes.translation serve runs/demo --engine torch --beam 8
    """
    parser = parser_of(serve)
    add_runs(parser)
    add(parser, "--checkpoint")
    parser.add_argument(
        "--engine",
        choices=("torch", "ctranslate2"),
        help="ctranslate2 is for what export --to ctranslate2 wrote (default: ctranslate2 for a run that has such a "
        "folder, torch for others)",
    )
    add_decoding_options(parser)
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=HOST_HELP)
    parser.add_argument("--port", metavar="N", type=port, default=5000, help="0 picks a free one (default: 5000)")
    options = parser.parse(argv)
    runs = runs_of(parser, options)
    if "RANK" in os.environ:
        raise ConfigError("serve is one process, which answers all requests: start it without torchrun and --processes")
    for package in ("starlette", "uvicorn"):
        require(package)

    from recipes.translation.serve.app import application
    from recipes.translation.serve.asked import Limits
    from recipes.translation.serve.batching import Batcher
    from recipes.translation.serve.server import address_of, listening, names_of, server_of

    limits = Limits()
    # Before the models are read, which takes longer
    with listening(options.host, options.port) as taken:
        models = [model for run in runs for model in models_of(run, options)]
        app = application(models, Batcher(models, limits.queued_lines), limits, names_of(taken))
        print(f"[serve] {address_of(taken)} (Ctrl-C stops)", flush=True)
        server_of(app, limits).run(sockets=[taken])
    return 0


HOST_HELP = "0.0.0.0 lets other machines in, without a password (default: 127.0.0.1, only this machine)"


port = number(int, lambda found: 0 <= found <= 65535, "a whole number from 0 to 65535")


def models_of(run: str, options: argparse.Namespace) -> list[Model]:
    """Read the model of a run, for the engine that is asked for or else the one that the run has; print which it is."""
    from recipes.translation.commands.served_models import served_models

    exported = exported_folder(run)
    if options.engine == "torch" or (options.engine is None and not (exported / "model.bin").is_file()):
        translator = load(run, options)
        note_outdated_average(run, options.checkpoint)
        models = served_models(run, translator, translator)
    else:
        found = load_exported(run, options)
        if options.checkpoint:
            raise ConfigError(
                f"{run} translates with {exported}, and --checkpoint is for torch: leave it out, or add --engine torch"
            )
        beside = exported != Path(run) and whole_folder(model_folder(run))
        models = served_models(run, found, load(run, options) if beside else None)
    pairs = ", ".join(f"{model.source} to {model.target}" for model in models)
    print(f"[serve] {run}: {pairs}, with {models[0].engine}, beam {models[0].beam}", flush=True)
    if models[0].engine == "ctranslate2" and (note := outdated_export(run)):
        print(f"[serve] {note}, or add --engine torch", flush=True)
    return models
