"""The options of `translate` for the search: their values, and which of them do not go together."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import add, as_option, count, models_of_runs, number, path
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.files.lines import read_lines

if TYPE_CHECKING:
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.translator import Translator
    from recipes.translation.translating.translate import SearchOptions


def add_search_options(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("the search")
    search.add_argument("--n-best", metavar="N", type=count, help="print the N best translations of each sentence")
    search.add_argument("--scores", action="store_true", help="print each translation's score and log-probability")
    search.add_argument(
        "--prefixes",
        metavar="FILE",
        type=path,
        help="how each translation begins: a line, perhaps empty, for each sentence",
    )
    search.add_argument(
        "--constraints",
        metavar="FILE",
        type=path,
        help="words or phrases that each translation must contain, separated by tabs: a line, perhaps empty, for each "
        "sentence; --beam 10 or more is advised",
    )
    add(search, "--ensemble")
    search.add_argument(
        "--mbr",
        choices=("chrf", "bleu", "command"),
        help="of the translations of --n-best or --sample, print the one most like the others by chrF, by "
        "sentence-BLEU or by --metric-command (minimum Bayes risk)",
    )
    search.add_argument(
        "--metric-command",
        metavar="COMMAND",
        help="of the translations of --n-best or --sample, print the one that this program scores best, such as "
        "CometKiwi; it is run as evaluate runs it, but without references; with --mbr command, each of the other "
        "translations is the reference",
    )
    search.add_argument(
        "--alignments",
        metavar="FILE",
        type=path,
        help="also write which words belong together, from the attention of the last decoder layer but one: for each "
        "sentence a line of pairs source-target, counted from 0 (Pharaoh's format)",
    )
    draw = parser.add_argument_group("sampling")
    draw.add_argument(
        "--sample",
        metavar="N",
        type=count,
        help="draw N translations of each sentence instead of searching for the best",
    )
    draw.add_argument(
        "--temperature", metavar="X", type=positive, help="divides the logits before the draw (default: 1)"
    )
    draw.add_argument("--top-k", metavar="N", type=count, help="draw from the N most probable subwords (default: all)")
    draw.add_argument(
        "--top-p",
        metavar="X",
        type=share,
        help="draw from the most probable subwords whose probabilities add up to this (default: 1)",
    )
    draw.add_argument("--seed", metavar="N", type=whole, help="another seed draws other translations (default: 0)")


positive = number(float, lambda found: 0 < found < math.inf, "a number above 0")
share = number(float, lambda found: 0 < found <= 1, "a number above 0 and at most 1")
whole = number(int, lambda found: found >= 0, "a whole number from 0 up")


OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")
OF_SEARCH = ("n_best", "beam", "length_penalty", "length_norm", "constraints")
OF_TORCH = (
    "n_best",
    "scores",
    "prefixes",
    "constraints",
    "ensemble",
    "mbr",
    "metric_command",
    "alignments",
    "sample",
    "checkpoint",
)


def clashing(options: argparse.Namespace) -> str | None:
    """Return why options do not go together; None if they do."""
    if options.engine != "torch" and (names := given_options(options, OF_TORCH)):
        return f"{as_option(names[0])} is not for --engine {options.engine}: leave one of them out"
    if not options.sample and (names := given_options(options, OF_SAMPLING)):
        return f"{as_option(names[0])} has no effect on a search: add --sample N, or leave it out"
    if options.sample and (names := given_options(options, OF_SEARCH)):
        return f"{as_option(names[0])} has no effect on --sample, which does not search: leave one of them out"
    many = options.n_best or options.sample
    choosing = given_options(options, ("mbr", "metric_command"))
    if choosing and not many:
        return f"{as_option(choosing[0])} chooses among several translations: add --n-best N or --sample N"
    if choosing and options.scores:
        return (
            f"{as_option(choosing[0])} prints one translation of each sentence, without the scores of --scores: leave "
            "one of them out"
        )
    if options.mbr == "command" and options.metric_command is None:
        return "--mbr command needs the program that --metric-command names: add it"
    if options.mbr in ("chrf", "bleu") and options.metric_command is not None:
        return f"--mbr {options.mbr} does not use --metric-command: leave one of them out, or write --mbr command"
    if options.alignments and (options.scores or (many and not choosing)):
        return "--alignments is for one translation of each sentence: leave out --n-best, --sample and --scores"
    return None


def given_options(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Return which of the options are given."""
    # An option that is not given is None, and a switch is False
    return [name for name in names if getattr(options, name) not in (None, False)]


def search_options(options: argparse.Namespace) -> SearchOptions:
    """Read the options and the files that they name."""
    from recipes.translation.translating.translate import Sampling, SearchOptions

    constraints = None
    if options.constraints:
        constraints = phrases_in(read_lines(Path(options.constraints)), options.constraints)
    sampling = None
    if options.sample:
        sampling = Sampling(
            options.sample,
            temperature=options.temperature or 1.0,
            top_k=options.top_k,
            top_p=options.top_p or 1.0,
            seed=options.seed or 0,
        )
    return SearchOptions(
        n_best=options.n_best or 1,
        scores=options.scores,
        prefixes=read_lines(Path(options.prefixes)) if options.prefixes else None,
        constraints=constraints,
        sampling=sampling,
    )


def phrases_in(lines: list[str], where: str) -> list[list[str]]:
    """Split lines at tabs into phrases; an empty line has none. Raises DataError for an empty phrase."""
    found = []
    for place, line in enumerate(lines, start=1):
        phrases = [phrase.strip() for phrase in line.split("\t")] if line.strip() else []
        if "" in phrases:
            raise DataError(f"{where}: line {place:,} has nothing before, between or after its tabs: remove a tab")
        found.append(phrases)
    return found


@contextmanager
def loaded_ensemble(options: argparse.Namespace, ranks: Ranks) -> Iterator[tuple[Translator, Ranks]]:
    """Within the block, yield the model of --run with those of --ensemble, as `models_of_runs` does.

    Raises CheckpointError unless all have the same subwords, and ConfigError if one of --ensemble has positions for
    shorter sentences than that of --run reads.
    """
    runs = [options.run, *(options.ensemble or ())]
    with models_of_runs(runs, options, ranks) as ((first, *others), searching):
        for run, other in zip(runs[1:], others, strict=True):
            check_same_subwords(options.run, first, run, other)
            # Which is no less than decoding.max_length
            if other.positions is not None and other.positions < first.text.longest:
                raise ConfigError(
                    f"{run} has learned positions for {other.positions} subwords, but {options.run} reads and writes "
                    f"up to {first.text.longest}: name {run} with --run, and the other with --ensemble"
                )
        digests = (*first.digests, *(digest for other in others for digest in other.digests))
        yield replace(first, others=tuple(other.model for other in others), digests=digests), searching


def check_same_subwords(run: str, first: Translator, other_run: str, other: Translator) -> None:
    """Raise CheckpointError unless two models translate from and to the same subwords."""
    facts = {
        "source subwords": (first.source.model_bytes(), other.source.model_bytes()),
        "target subwords": (first.target.model_bytes(), other.target.model_bytes()),
        "subwords.lowercase": (first.config.subwords.lowercase, other.config.subwords.lowercase),
        "language tags": (first.text.own, other.text.own),
    }
    for name, (here, there) in facts.items():
        if here != there:
            raise CheckpointError(
                f"--ensemble {other_run} differs from {run} in its {name}: the models of an ensemble share their "
                "subwords, as runs with the same data and subword settings do"
            )
