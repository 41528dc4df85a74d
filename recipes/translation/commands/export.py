"""The commands that write a model in another program's format, and that turn a published model into a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.translation.commands.arguments import (
    PROGRAM,
    add,
    checkpoint_folder,
    note_outdated_average,
    parser_of,
    path,
    require,
    saved_model,
)
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.files.atomic_folder import MANIFEST
from recipes.translation.run_folder.outputs import check_output, check_run
from recipes.translation.settings.config import LayoutConfig

if TYPE_CHECKING:
    from recipes.translation.run_folder.checkpoint import SavedModel

PACKAGES = {
    "safetensors": ["safetensors"],
    "ctranslate2": ["ctranslate2"],
    "onnx": ["onnxruntime", "onnxscript"],
    "hf": ["transformers"],
}
"""The packages that each format needs."""
QUANTIZATIONS = ("float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")


def export(argv: Sequence[str]) -> int:
    """Write a model as one folder that needs nothing else of the run, in its own format or another program's.

    safetensors is for load_translator in Python, wherever the folder is moved. ctranslate2 is an engine for fast
    translation on CPUs and GPUs; with int8 weights a model has about a third of its size. onnx is an encoder and a
    decoder step for ONNX Runtime. hf is a folder that Hugging Face transformers loads: a Marian model if the norms come
    after the sublayers, a Pegasus model if they come before. docs/export.md shows how each is used.

    example:
    python -m recipes.translation export --run runs/demo --to safetensors
    python -m recipes.translation export --run runs/demo --to ctranslate2 --quantization int8
    python -m recipes.translation export --run runs/demo --to hf --out demo-hf
    """
    parser = parser_of(export)
    add(parser, "--run", "--checkpoint")
    parser.add_argument("--to", choices=tuple(PACKAGES), required=True, help="the format")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="the type of the weights, for ctranslate2; int8 is smallest and, on a CPU, fastest (default: float32)",
    )
    parser.add_argument("--out", metavar="FOLDER", type=path, help="where to write (default: a folder in --run)")
    options = parser.parse(argv)
    if options.quantization and options.to != "ctranslate2":
        parser.error(f"--quantization is for --to ctranslate2: leave it out with --to {options.to}")
    for package in PACKAGES[options.to]:
        require(package)

    from recipes.translation.export.lost_settings import lost_settings_in
    from recipes.translation.processes.ranks import join_ranks

    folder = Path(options.out or Path(options.run) / options.to)
    checkpoint = checkpoint_folder(options.run, options.checkpoint)
    note_outdated_average(options.run, options.checkpoint)
    check_output(folder, "--out", reads=[str(checkpoint)])
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise ConfigError(f"--out: {folder} is not empty and is not an export: name another folder")
    with join_ranks(LayoutConfig().timeout) as ranks:
        ranks.run_on_main(lambda: write(folder, checkpoint, options))
        for line in ranks.run_on_main(lambda: lost_settings_in(checkpoint, options.to)):
            print(f"[export] {line}")
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"[export] {folder}: {size / 1e6:.1f} MB")
    return 0


def write(folder: Path, checkpoint: Path, options: argparse.Namespace) -> None:
    """Write the model in the format that --to names."""
    if options.to == "safetensors":
        from recipes.translation.run_folder.checkpoint import write_model

        saved = saved_model(options.run, options)
        write_model(folder, saved, saved.weights, facts_of(saved, checkpoint))
    elif options.to == "hf":
        from recipes.translation.export import huggingface_model

        huggingface_model.write(saved_model(options.run, options), folder)
    elif options.to == "ctranslate2":
        from recipes.translation.export import ctranslate2_model

        ctranslate2_model.write(saved_model(options.run, options), folder, options.quantization)
    else:
        from recipes.translation.export import onnx_model

        onnx_model.write(saved_model(options.run, options), folder)


def facts_of(saved: SavedModel, checkpoint: Path) -> dict[str, Any]:
    """Return the facts that are saved with a model; raise CheckpointError if training has replaced it since."""
    from recipes.translation.run_folder.checkpoint import load_facts
    from recipes.translation.run_folder.made_from import weights_digest

    facts = load_facts(checkpoint)
    if weights_digest(checkpoint) != saved.digest:
        raise CheckpointError(f"training replaced {checkpoint} while it was being exported: export it again")
    return facts


def import_(argv: Sequence[str]) -> int:
    """Make a run of a model that others have published: OPUS-MT, M2M-100, NLLB-200 or mBART.

    The folder is one as Hugging Face transformers saves it: config.json, model.safetensors, generation_config.json and
    all files of the tokenizer. transformers, which has to be installed, reads it. Nothing is downloaded, and no code of
    the folder is run. A model of several languages becomes a run for two of them.

    example:
    python -m recipes.translation import opus-mt-en-de --run runs/opus
    python -m recipes.translation import nllb-200-distilled-600M --run runs/nllb --source eng_Latn --target deu_Latn
    """
    parser = parser_of(import_)
    parser.add_argument("model", metavar="FOLDER", type=path, help="the folder of the published model")
    add(parser, "--run")
    parser.add_argument(
        "--source", metavar="LANGUAGE", default="", help="the language to translate from, as the model calls it"
    )
    parser.add_argument(
        "--target", metavar="LANGUAGE", default="", help="the language to translate to, as the model calls it"
    )
    options = parser.parse(argv)
    require("transformers")

    from recipes.translation.importing.published_model import import_model
    from recipes.translation.training.summary import command

    run = Path(options.run)
    check_run(run)
    imported = import_model(Path(options.model), run, options.source, options.target)
    translator = imported.translator
    if imported.ignored:
        print(
            f"[import] {imported.settings_file} sets {', '.join(imported.ignored)}, for which a run has no setting: "
            f"see the options of {PROGRAM} translate",
            file=sys.stderr,
        )
    if imported.searches_on:
        print(
            f"[import] early_stopping is not true in {imported.settings_file}: transformers searches on after "
            f"{translator.config.decoding.beam} translations have ended, and may find others; see docs/import.md",
            file=sys.stderr,
        )
    size = sum(parameter.numel() for parameter in translator.model.parameters()) / 1e6
    data = translator.config.data
    print(
        f"[import] {run / 'best'}: {data.source} to {data.target}, {size:.1f} M parameters, "
        f"{len(translator.target):,} subwords"
    )
    words = ["train", "--config", run / "best" / "config.yaml", "--run", "NEW", "--training.start_from", run]
    files = "--data.train SOURCE TARGET --data.valid SOURCE TARGET"
    print(f"[import] to train it further: {command(*words)} {files}")
    return 0
