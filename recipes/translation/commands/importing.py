"""The command that turns a published model into a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.translation.commands.arguments import PROGRAM, add, parser_of, path, require
from recipes.translation.run_folder.outputs import check_run


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
    parser.add_argument("--target", metavar="LANGUAGE", default="", help="the language to translate to, likewise")
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
            f"[import] {imported.settings_file} sets {', '.join(imported.ignored)}, which a run does not have: see the "
            f"options of {PROGRAM} translate",
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
