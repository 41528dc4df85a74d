"""The commands that evaluate models, and the one that draws the report of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import (
    DECODING,
    add,
    add_decoding_options,
    as_option,
    check_typed,
    parser_of,
    path,
    require,
    runs_of,
)
from recipes.translation.commands.searching import loaded_ensemble
from recipes.translation.processes.status_line import print_text
from recipes.translation.run_folder.outputs import check_output_file, results_folder
from recipes.translation.settings.config import LayoutConfig
from recipes.translation.settings.options import OneLineParser

if TYPE_CHECKING:
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.translator import Translator
    from recipes.translation.scores.evaluate import Evaluation


def evaluate(argv: Sequence[str]) -> int:
    """Score a model on its test set or on other files, or a file of translations against a file of references.

    Prints sacreBLEU's BLEU, chrF and TER with their signatures, BLEU of the lower-cased text, and the percentage of
    exact matches, each with its 95 % confidence interval; for text that is already tokenised also BLEU as
    multi-bleu.perl -lc computes it. Writes translations and scores to the run's folder. See docs/evaluation.md.

    example:
    python -m recipes.translation evaluate --run runs/demo
    python -m recipes.translation evaluate --run runs/demo --sources news.en --references news.de
    python -m recipes.translation evaluate --hypotheses translations.txt --references references.txt
    """
    parser = parser_of(evaluate)
    add(parser, "--processes", "--run", "--checkpoint")
    add_decoding_options(parser)
    add(parser, "--ensemble")
    parser.add_argument("--split", choices=("valid", "test"), help="which data of the run to use (default: test)")
    add(parser, "--tokenize")
    parser.add_argument(
        "--hypotheses", metavar="FILE", type=path, help="translations, one per line, to score without a model"
    )
    parser.add_argument(
        "--sources", metavar="FILE", type=path, help="sentences to translate, one per line, in place of the run's data"
    )
    parser.add_argument("--references", metavar="FILE", type=path, help="reference translations, one per line")
    parser.add_argument(
        "--metric-command",
        metavar="COMMAND",
        help="also score with this program, such as COMET's: the command may name files, {sources} "
        "{translations} {references}; otherwise the program reads a line of JSON for each sentence. "
        "It writes a number for each",
    )
    options = parser.parse(argv)
    _check_files(parser, options)

    from recipes.translation.scores.scores import check_metrics

    check_metrics(options.tokenize, options.metric_command)
    check_typed(options)

    from recipes.translation.processes.ranks import join_ranks
    from recipes.translation.scores.evaluate import scores_table

    with join_ranks(LayoutConfig().timeout) as ranks:
        found = _evaluations(options, ranks)
        print(scores_table(found))
        if ranks.is_main and not options.hypotheses:
            written = [path for evaluation in found for path in evaluation.write(results_folder(Path(options.run)))]
            print("[evaluate] written:", *written)
    return 0


def _evaluations(options: argparse.Namespace, ranks: Ranks) -> list[Evaluation]:
    """Translate and score what the options name: one test set, or the test sets of several corpora."""
    from recipes.translation.scores.evaluate import add_command_scores, evaluate_files

    if options.hypotheses:
        sources = Path(options.sources) if options.sources else None
        files = Path(options.hypotheses), Path(options.references), sources
        found = [evaluate_files(*files, options.tokenize or "auto")]
    else:
        with loaded_ensemble(options, ranks) as (translator, searching):
            found = _evaluate_model(options, translator, searching)
    if options.metric_command:
        found = ranks.run_on_main(lambda: add_command_scores(options.metric_command, found))
    return found


def _evaluate_model(options: argparse.Namespace, translator: Translator, ranks: Ranks) -> list[Evaluation]:
    """Translate and score the files that the options name, or else the run's own data."""
    from recipes.translation.data.corpora import Corpora
    from recipes.translation.scores.evaluate import check_name, evaluate_each, evaluate_pairs, read_pairs

    if options.sources:
        sources = Path(options.sources)
        references = Path(options.references)
        lowercase = translator.config.subwords.lowercase
        pairs = ranks.run_on_main(lambda: read_pairs(sources, references, lowercase))
        folder = results_folder(Path(options.run))
        read = (options.sources, options.references)
        ranks.run_on_main(lambda: check_name(folder, sources, pairs, translator, read))
        one = evaluate_pairs(translator, sources.name, pairs, options.tokenize, ranks, "evaluate")
        found = [replace(one, files=(sources, references))]
    else:
        sets = Corpora(translator.config).held_out(options.split or "test")
        found = evaluate_each(translator, sets, options.tokenize, ranks, "evaluate")
    if options.ensemble:  # so that results of --run without the ensemble are kept
        found = [replace(evaluation, name=f"{evaluation.name}.ensemble") for evaluation in found]
    return found


def compare(argv: Sequence[str]) -> int:
    """Compare runs or files of translations with the first of them, on one test set, by paired significance tests.

    Prints BLEU, chrF and TER of each with 95 % confidence intervals, the difference from the first, and the p-values of
    paired bootstrap resampling and of paired approximate randomisation. A run must have been evaluated before.

    example:
    python -m recipes.translation compare runs/baseline runs/larger
    python -m recipes.translation compare --references news.de baseline.txt larger.txt
    """
    parser = parser_of(compare)
    parser.add_argument(
        "systems", nargs="*", metavar="SYSTEM", type=path, help="a run or a file of translations; the baseline first"
    )
    parser.add_argument(
        "--references",
        metavar="FILE",
        type=path,
        help="reference translations, one per line (default: those of the runs' data)",
    )
    parser.add_argument("--split", choices=("valid", "test"), help="which data of the runs to use (default: test)")
    add(parser, "--tokenize")
    options = parser.parse(argv)
    if len(options.systems) < 2:
        parser.error(f"name at least two systems, the baseline first; got {len(options.systems)}")
    if options.split and all(Path(system).is_file() for system in options.systems):
        parser.error("--split selects data of a run, but only files were given; leave it out")

    from recipes.translation.processes.ranks import join_ranks
    from recipes.translation.scores.compare import compare as compare_systems

    references = None
    if options.references:
        references = Path(options.references)
    with join_ranks(LayoutConfig().timeout) as ranks:
        table = ranks.run_on_main(
            lambda: str(compare_systems(options.systems, references, options.split or "test", options.tokenize))
        )
        print_text(table)
    return 0


def _check_files(parser: OneLineParser, options: argparse.Namespace) -> None:
    """Refuse files that do not go together."""
    of_model = ("run", "checkpoint", "ensemble", *DECODING)
    given = [name for name in of_model if getattr(options, name) != parser.get_default(name)]
    if options.hypotheses and given:
        parser.error(
            f"{as_option(given[0])} is for a model, but --hypotheses names finished translations: leave it out"
        )
    for name in ("hypotheses", "sources"):
        if getattr(options, name) and not options.references:
            parser.error(f"--{name} and --references go together")
    if options.metric_command and options.hypotheses and not options.sources:
        parser.error("--metric-command needs the sentences that were translated: name them with --sources")
    if options.references and not (options.hypotheses or options.sources):
        parser.error("--references go together with --hypotheses, or with --sources for a model to translate")
    if options.split and options.references:
        parser.error("--split chooses data of the run, but --references names a file: give one of them")


def report(argv: Sequence[str]) -> int:
    """Draw the report of a run, as one HTML file that needs nothing else.

    It has the curves of training, samples, the worst sentences, scores, settings and the machine. Training draws it,
    too, after validations and at its end. See docs/report.md; the command compare sets runs side by side.

    example:
    python -m recipes.translation report runs/demo
    python -m recipes.translation report runs/demo --output demo.html
    """
    parser = parser_of(report)
    parser.add_argument("runs", nargs="*", metavar="RUN", type=path, help="the run's folder")
    add(parser, "--run")
    parser.add_argument("--output", metavar="FILE", type=path, help="where to write (default: report.html in the run)")
    options = parser.parse(argv)
    named, *others = runs_of(parser, options)
    if others:
        parser.error(f"name one run; got {1 + len(others)}; the command compare shows the scores of several")
    run = Path(named)
    output = run / "report.html"
    if options.output:
        check_output_file(Path(options.output), "--output", own=output)
        output = Path(options.output)
    require("matplotlib")

    from recipes.translation.report.draw import write_report

    size = write_report(run, output)
    print(f"[report] {output}: {size / 1e3:.0f} kB")
    return 0
