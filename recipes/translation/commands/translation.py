"""The command that translates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import PROGRAM, add_model_options, parser_of, path
from recipes.translation.commands.searching import add_search_options, clashing, load_ensemble, search_options
from recipes.translation.data.lines import lines_of, read_lines
from recipes.translation.search_options import SearchOptions
from recipes.translation.settings.config import ConfigError, LayoutConfig

if TYPE_CHECKING:
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.checkpoint import Translator


def translate(argv: Sequence[str]) -> int:
    """Translate sentences given on the command line, in a file, through a pipe, or typed one by one.

    With --n-best, --sample or --scores a line has the sentence's number, with --scores also the translation's score and
    log-probability, and then the translation, separated by tabs. docs/decoding.md explains the options.
    """
    parser = parser_of(
        translate,
        f'{PROGRAM} translate --run runs/demo "The train to Vienna leaves at half past seven."\n'
        f"{PROGRAM} translate --run runs/demo --file sentences.txt > translations.txt\n"
        f"{PROGRAM} translate --run runs/demo --file sentences.txt --n-best 4 --scores > translations.tsv\n"
        f"{PROGRAM} translate --run runs/demo",
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="a sentence, in quotes; any number of them")
    parser.add_argument("--file", metavar="FILE", type=path, help="a text file, one sentence a line")
    add_model_options(parser)
    add_search_options(parser)
    options = parser.parse(argv)
    if options.sentences and options.file:
        parser.error("give sentences or --file, not both")
    if clash := clashing(options):
        parser.error(clash)

    from recipes.translation.processes.ranks import joined

    typing = not options.sentences and not options.file and sys.stdin.isatty()
    with joined(LayoutConfig().timeout) as ranks:
        if typing:
            check_typing(options, ranks)
        sentences: list[str] = []
        if not typing:
            sentences = ranks.run_on_main(lambda: options.sentences or _sentences(options.file))
        search = ranks.run_on_main(lambda: search_options(options))
        translator = load_ensemble(options, ranks)
        if typing:
            for sentence in typed(f"{translator.config.data.source}> "):
                print(*printed(translator, [sentence], search, options, ranks), sep="\n", flush=True)
        for line in printed(translator, sentences, search, options, ranks):
            print(line)
    return 0


def check_typing(options: argparse.Namespace, ranks: Ranks) -> None:
    """Raise ConfigError where a person cannot type the sentences."""
    if ranks.world > 1:
        raise ConfigError("sentences can be typed to one process only; give several processes words, --file or a pipe")
    if options.prefixes or options.constraints:
        raise ConfigError("--prefixes and --constraints have a line for each sentence: give sentences or --file")


def printed(
    translator: Translator, sentences: Sequence[str], search: SearchOptions, options: argparse.Namespace, ranks: Ranks
) -> list[str]:
    """Return the lines that show the translations."""
    from recipes.translation.alternatives import alternatives, table
    from recipes.translation.translate import translate as translate_all

    decoding = translator.config.decoding
    if search == SearchOptions() and not options.n_best and not options.scores:
        return translate_all(translator, sentences, decoding, ranks)
    found = alternatives(translator, sentences, decoding, search, ranks)
    if options.n_best or options.sample or options.scores:
        return table(found, options.scores)
    return [row[0].text for row in found]


def _sentences(file: str | None) -> list[str]:
    if file:
        return read_lines(Path(file))
    return lines_of(sys.stdin.buffer.read(), "the standard input")


def typed(prompt: str) -> Iterator[str]:
    """Yield the sentences that a person types, until an empty line, Ctrl-D or Ctrl-C."""
    with suppress(ImportError):  # not every system has readline
        import readline  # noqa: F401  (arrow keys and history for input())

    print("Type a sentence and press Enter; an empty line ends.")
    while True:
        try:
            sentence = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not sentence:
            return
        yield sentence
