"""The commands that make a model: demo, prepare, train, average, distil."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import add, check_folder, config_file, count, parser_of, path, run_config
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.files.atomic_folder import through_pointer, whole_folder
from recipes.translation.processes.status_line import print_text
from recipes.translation.run_folder.outputs import check_run
from recipes.translation.settings.config import LayoutConfig, ModelConfig, RunConfig, load_config
from recipes.translation.settings.metrics import METRICS
from recipes.translation.settings.options import add_config_options, overrides

if TYPE_CHECKING:
    from recipes.translation.data.corpora import Corpora
    from recipes.translation.training.summary import Summary

DEMO_CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"


def demo(argv: Sequence[str]) -> int:
    """Train, evaluate and try out a small English-German model on the built-in corpus (minutes on 2 CPU cores).

    Needs no download and no GPU; if there are GPUs, it trains on all of them.

    example:
    python -m recipes.translation demo
    python -m recipes.translation demo --run runs/short --training.steps 100
    """
    parser = parser_of(demo)
    add(parser, "--processes")
    add_config_options(parser, DEMO_CONFIG)
    config = load_config(DEMO_CONFIG, overrides(parser.parse(argv)))
    check_folder(config.run)

    from recipes.translation.demo import demo as run_demo
    from recipes.translation.processes.ranks import join_ranks

    with join_ranks(config.layout.timeout) as ranks:
        return exit_status(run_demo(config, ranks))


def prepare(argv: Sequence[str]) -> int:
    """Make the subword models of a run and the ids of its training pairs, as the first step of train.

    example:
    python -m recipes.translation prepare --config recipes/translation/configs/demo.yaml --run runs/mine
    """
    parser = parser_of(prepare)
    add(parser, "--config")
    add_config_options(parser)
    config = run_config(parser.parse(argv))

    from recipes.translation.data.corpora import Corpora
    from recipes.translation.data.corpus import stored_ids
    from recipes.translation.processes.ranks import join_ranks
    from recipes.translation.run_folder.lock import sole_writer
    from recipes.translation.run_folder.other_model import run_subwords

    def make() -> tuple[int, int]:
        with sole_writer(Path(config.run)):
            corpora = Corpora(config)
            source, target = run_subwords(corpora)
            stored_ids(corpora, source, target)
        return len(source), len(target)

    with join_ranks(config.layout.timeout) as ranks:
        source, target = ranks.run_on_main(make)
        where = config.training.start_from or config.training.teacher or Path(config.run) / "subwords"
        print(f"[prepare] {source:,} source and {target:,} target subwords in {where}")
    return 0


def train(argv: Sequence[str]) -> int:
    """Train a model, or resume a run that was stopped.

    A run is a folder (--run; under torchrun --folder). If it contains an unfinished run, training resumes where it
    stopped, with the settings of that run. Ctrl-C finishes the current step, saves, and prints the command to resume.

    example:
    python -m recipes.translation train --run runs/mine --data.train train.en train.de --data.valid dev.en dev.de
    python -m recipes.translation train --config recipes/translation/configs/own_data.yaml --training.steps 500
    python -m recipes.translation train --run runs/mine --dry-run
    python -m recipes.translation train --run runs/mine
    """
    parser = parser_of(train)
    add(parser, "--config")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--fresh", action="store_true", help="start over: remove what an earlier run left in --run")
    start.add_argument(
        "--dry-run",
        action="store_true",
        help="do everything that comes before the first update, and say what training will cost in memory and hours",
    )
    parser.add_argument(
        "--insist",
        action="store_true",
        help="train where the data (the same file twice, names of other languages) or a new number of steps looks like "
        "a mistake",
    )
    add(parser, "--processes")
    add_config_options(parser)
    options = parser.parse(argv)
    config = run_config(options)
    resumed = not options.fresh and whole_folder(Path(config.run) / "last") is not None
    from recipes.translation.data.corpora import Corpora

    if "RANK" not in os.environ:  # several processes report such errors together, later
        check_data(Corpora(config), insist=options.insist or resumed)

    from recipes.translation.processes.ranks import join_ranks
    from recipes.translation.train import train as train_model

    with join_ranks(config.layout.timeout) as ranks:
        summary = train_model(config, fresh=options.fresh, insist=options.insist, dry_run=options.dry_run, ranks=ranks)
        print_text(str(summary))
        if summary.best and not (summary.stopped_by or summary.advice):
            print(next_steps(Corpora(config)))
    return exit_status(summary)


def check_data(corpora: Corpora, insist: bool) -> None:
    """Raise an error for data that is missing, or looks like a mistake, before torch is imported."""
    from recipes.translation.data.mistakes import check_meant
    from recipes.translation.data.split_files import check_named, naming_corpus

    corpora.check_training()
    for each in corpora.valid:
        with naming_corpus(each.name):
            check_named(each.data, "valid")
    if not insist:
        check_meant(corpora)


PURPOSES = {
    "translate": "type sentences, or add --file FILE",
    "evaluate": "scores with confidence intervals",
    "report": "a page with curves, scores and translations",
    "serve": "a page that translates, and an endpoint for programs",
}


def next_steps(corpora: Corpora) -> str:
    """Return a line for each command to continue with, ready to be pasted."""
    from recipes.translation.training.loaded_models import was_in_parts
    from recipes.translation.training.summary import command

    run, layout = corpora.config.run, corpora.config.layout
    lines = ["[train] next:"]
    for name, purpose in PURPOSES.items():
        words: list[object] = [name, "--run", run]
        if name in ("translate", "evaluate") and was_in_parts(layout):
            # One process may not have room for the model
            words += ["--processes", layout.shard * layout.vocab]
        if name == "evaluate" and not corpora.has("test"):
            words += ["--split", "valid"]
        lines.append(f"  {command(*words)}  # {purpose}")
    return "\n".join(lines)


def exit_status(summary: Summary) -> int:
    """Return the exit status after a training."""
    if summary.stopped_by:
        return 128 + summary.stopped_by
    return 0


def average(argv: Sequence[str]) -> int:
    """Average the weights of a run's last models, which often translates better than any of them.

    Training keeps these models where --training.keep_checkpoints is set. The average is written to the run's folder
    `averaged`; evaluate and translate use it with --checkpoint averaged.

    example:
    python -m recipes.translation average --run runs/mine
    python -m recipes.translation average --run runs/mine --last 5
    """
    parser = parser_of(average)
    add(parser, "--run")
    parser.add_argument("--last", metavar="K", type=count, help="average the last K of the kept models (default: all)")
    options = parser.parse(argv)
    check_run(Path(options.run))

    from recipes.translation.processes.ranks import join_ranks
    from recipes.translation.run_folder.average import average as average_models

    with join_ranks(LayoutConfig().timeout) as ranks:
        made = ranks.run_on_main(lambda: average_models(Path(options.run), options.last))
        steps = ", ".join(f"{step:,}" for step in made)
        print(f"[average] {Path(options.run) / 'averaged'} is the average of {len(made)} models, from steps {steps}")
        print(f"[average] {ranks.run_on_main(lambda: compare_with_best(Path(options.run)))}")
    return 0


def compare_with_best(run: Path) -> str:
    """Return how the average does on the validation data, and whether `best` does better."""
    from recipes.translation.run_folder.checkpoint import load_facts, saved_config
    from recipes.translation.training.validation import Validation, validate_folder

    if not whole_folder(run / "best"):
        return "there is no best model to compare it with"
    by = saved_config(run / "averaged").training.best_by
    best = Validation.from_dict(load_facts(run / "best"))
    try:
        averaged = validate_folder(run / "averaged")
    except (DataError, ConfigError) as error:
        return f"it is not compared with best, as the validation data cannot be read: {error}"
    smaller = METRICS[by].smaller_is_better
    values = (averaged[by], best[by])
    verdict = ""
    if None not in values and values[0] != values[1]:
        better = (values[0] < values[1]) == smaller  # type: ignore[operator]
        verdict = "; it is better" if better else "; it is worse: use best, or average fewer models with --last"
    return f"validation: {averaged}; best, of step {best.step:,}: {best}{verdict}"


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
