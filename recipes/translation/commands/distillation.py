"""The command that makes a small and fast model from a large one."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from recipes.translation.commands.arguments import (
    add,
    check_folder,
    config_file,
    parser_of,
    path,
    run_config,
)
from recipes.translation.commands.training import exit_status
from recipes.translation.errors import ConfigError
from recipes.translation.files.atomic_folder import through_pointer, whole_folder
from recipes.translation.settings.config import ModelConfig, RunConfig, load_config
from recipes.translation.settings.options import add_config_options, overrides

STUDENT: dict[str, object] = {
    **{f"model.{field.name}": None for field in dataclasses.fields(ModelConfig)},
    "model.preset": "student",
    "training.start_from": "",
    "training.freeze": [],
    "training.lora_rank": 0,
    "training.lora_alpha": 16,
    "layout.data": 0,
    **{f"layout.{axis}": 1 for axis in ("shard", "vocab")},
    "decoding.beam": 1,
}
"""The settings that a student does not take from its teacher."""


ORIGINAL = frozenset({"data.train", "data.format", "corpora"})
"""The settings that name the sentences for a teacher to translate; a student is trained on its own files."""


def distil(argv: Sequence[str]) -> int:
    """Train a small, fast student on a teacher's translations of the training sentences and on its predictions.

    The teacher translates by its own settings of decoding, into the student's folder; an interrupted translation goes
    on where it was, and one that is complete is reused. The student has the teacher's subwords. Without --config its
    settings are the teacher's, but with the model of the preset student, and greedy search. docs/training.md explains
    the losses; --training.teacher_weight and --training.teacher_temperature set them.

    example:
    python -m recipes.translation distil --teacher runs/teacher --run runs/student
    python -m recipes.translation distil --teacher runs/teacher/averaged --run runs/student --processes 2
    python -m recipes.translation distil --config recipes/translation/configs/multi30k_student.yaml
    """
    parser = parser_of(distil)
    add(parser, "--config")
    parser.add_argument(
        "--teacher",
        dest="training.teacher",
        metavar="FOLDER",
        type=path,
        help="the run to learn from (its best model), or a checkpoint folder; the same as --training.teacher",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start the training over; translations that still fit are kept"
    )
    add(parser, "--processes")
    add_config_options(parser)
    options = parser.parse(argv)
    given = overrides(options)
    if options.config is None and "run" not in given:
        parser.error("name the student's folder: --run FOLDER")

    from recipes.translation.data.corpora import Corpora
    from recipes.translation.distil import distil as distil_model
    from recipes.translation.processes.ranks import join_ranks
    from recipes.translation.run_folder.resume import MAY_CHANGE
    from recipes.translation.train import train
    from recipes.translation.training.student_data import check_same_sentences
    from recipes.translation.training.summary import command

    resumed = not options.fresh and options.config is None and whole_folder(Path(str(given["run"])) / "last")
    data = [name for name in given if name.startswith(("data.", "corpora")) and name not in MAY_CHANGE]
    originally = student_config(options, False) if resumed and data else None
    config = student_config(options, bool(resumed))
    with join_ranks(config.layout.timeout) as ranks:
        if originally:
            ranks.run_on_main(lambda: check_same_sentences(Corpora(originally)))
        # A resumed student's training data are already the translations
        summary = train(config, ranks=ranks) if resumed else distil_model(config, options.fresh, ranks)
        print(summary)
        if not summary.stopped_by:
            print("[distil] its scores, its export with int8 weights, and its translations:\n")
            print(f"  {command('evaluate', '--run', config.run)}")
            print(f"  {command('export', '--run', config.run, '--to', 'ctranslate2', '--quantization', 'int8')}")
            print(f"  {command('translate', '--run', config.run, '--engine', 'ctranslate2')}\n")
    return exit_status(summary)


def student_config(options: argparse.Namespace, resumed: bool) -> RunConfig:
    """Return the student's settings: those of its run, if it is resumed, those of --config, or else the teacher's."""
    from recipes.translation.run_folder.other_model import teacher_folder

    given: dict[str, object] = {**overrides(options)}
    if resumed:  # its training data are the translations
        for name in ORIGINAL & given.keys():
            setattr(options, name, None)
        return run_config(options)
    file = config_file(options)
    if file is None and (last := whole_folder(Path(str(given["run"])) / "last")):
        given.setdefault("training.teacher", load_config(last / "config.yaml").training.teacher)
    if file is None and (teacher := given.get("training.teacher")):
        file = through_pointer(teacher_folder(str(teacher)) / "config.yaml")
        given = {**STUDENT, **given}
    config = load_config(file, given)
    check_folder(config.run)
    if not config.training.teacher:
        raise ConfigError("training.teacher names no model to learn from: give --teacher FOLDER")
    return config
