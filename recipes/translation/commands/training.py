"""The commands that make a model: demo, prepare, train, average."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import (
    add,
    check_folder,
    count,
    parser_of,
    run_config,
)
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.files.atomic_folder import whole_folder
from recipes.translation.processes.status_line import print_text
from recipes.translation.run_folder.outputs import check_run
from recipes.translation.settings.config import LayoutConfig, load_config
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
        help="do all that comes before the first update, and say what the training will cost in memory and hours",
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
        print(f"[average] {Path(options.run) / 'averaged'} is the average of {len(made)} models, of the steps {steps}")
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
