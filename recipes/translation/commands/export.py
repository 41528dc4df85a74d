"""The command that writes a model in another program's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.translation.commands.arguments import PROGRAM, add_checkpoint, add_run, load, parser_of, path, require
from recipes.translation.settings.config import LayoutConfig

PACKAGES = {"ctranslate2": "ctranslate2", "hf": "transformers"}
"""What each format needs."""
QUANTIZATIONS = ("float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")


def export(argv: Sequence[str]) -> int:
    """Write a model in the format of another program.

    ctranslate2 is an engine for fast translation on CPUs and GPUs; with int8 weights a model has a quarter of its size.
    hf is a folder that Hugging Face transformers loads: a Marian model if the norms come after the sublayers, a Pegasus
    model if they come before. The folder has the subword models too, and needs nothing else of the run.
    """
    parser = parser_of(
        export,
        f"{PROGRAM} export --run runs/demo --to ctranslate2 --quantization int8\n"
        f"{PROGRAM} export --run runs/demo --to hf --out demo-hf",
    )
    add_run(parser)
    add_checkpoint(parser)
    parser.add_argument("--to", choices=tuple(PACKAGES), required=True, help="the format")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="the type of the weights, for ctranslate2; int8 is smallest and, on a CPU, fastest (default: float32)",
    )
    parser.add_argument("--out", metavar="FOLDER", type=path, help="where to write (default: a folder in --run)")
    options = parser.parse(argv)
    if options.quantization and options.to != "ctranslate2":
        parser.error(f"--quantization is for --to ctranslate2; {options.to} has float32 weights")
    require(PACKAGES[options.to])

    from recipes.translation.processes.ranks import joined

    folder = Path(options.out or Path(options.run) / options.to)
    with joined(LayoutConfig().timeout) as ranks:
        translator = load(options, ranks)
        if ranks.is_main:
            if options.to == "ctranslate2":
                from recipes.translation.export import ctranslate2_model

                ctranslate2_model.write(translator, folder, options.quantization)
            else:
                from recipes.translation.export import huggingface_model

                huggingface_model.write(translator, folder)
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"[export] {folder}: {size / 1e6:.1f} MB")
    return 0
