"""The command that translates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, cast

from recipes.translation.commands.arguments import (
    add,
    add_decoding_options,
    check_typed,
    load_exported,
    outdated_export,
    parser_of,
    path,
)
from recipes.translation.commands.searching import add_search_options, clashing, loaded_ensemble, search_options
from recipes.translation.errors import ConfigError
from recipes.translation.files.lines import is_plain, lines_of, read_lines
from recipes.translation.processes.status_line import print_text
from recipes.translation.run_folder.outputs import check_output_file, write_output
from recipes.translation.settings.config import DataConfig, LayoutConfig, RunConfig

if TYPE_CHECKING:
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.translator import Translator
    from recipes.translation.translating.translate import SearchOptions, Translation


def translate(argv: Sequence[str]) -> int:
    """Translate sentences given on the command line, in a file, through a pipe, or typed one by one.

    With --n-best, --sample or --scores a line has the sentence's number, with --scores also the translation's score and
    log-probability, and then the translation, separated by tabs; with --mbr or --metric-command only the
    translation chosen among these.
    docs/decoding.md explains the options.

    example:
    python -m recipes.translation translate --run runs/demo "The train to Vienna leaves at half past seven."
    python -m recipes.translation translate --run runs/demo --file sentences.txt > translations.txt
    python -m recipes.translation translate --run runs/demo --file sentences.txt --n-best 4 --scores > translations.tsv
    python -m recipes.translation translate --run runs/demo --file sentences.txt --sample 32 --mbr chrf > chosen.txt
    python -m recipes.translation translate --run runs/demo
    """
    parser = parser_of(translate)
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="a sentence, in quotes; any number of them")
    parser.add_argument("--file", metavar="FILE", type=path, help="a text file, one sentence per line")
    parser.add_argument(
        "--engine",
        choices=("torch", "ctranslate2"),
        default="torch",
        help="ctranslate2 is for a model written by export --to ctranslate2: --run is its folder, or the run that has "
        "one (default: torch)",
    )
    add(parser, "--processes", "--run", "--checkpoint")
    add_decoding_options(parser)
    add_search_options(parser)
    options = parser.parse(argv)
    if options.sentences and options.file:
        parser.error("give sentences or --file, not both")
    if clash := clashing(options):
        parser.error(clash)
    if options.alignments:
        reads = (options.file, options.prefixes, options.constraints)
        check_output_file(Path(options.alignments), "--alignments", reads=reads)
    check_typed(options)

    from recipes.translation.processes.ranks import join_ranks

    with join_ranks(LayoutConfig().timeout) as ranks, ExitStack() as held:
        sentences: list[str] = []
        if not (typing := is_typing(options, ranks)) and not is_streaming(options, ranks):
            sentences = ranks.run_on_main(lambda: options.sentences or _sentences(options.file))
        if options.engine == "ctranslate2":
            config, translated = by_ctranslate2(options, ranks)
        else:
            search = ranks.run_on_main(lambda: search_options(options))
            translator, searching = held.enter_context(loaded_ensemble(options, ranks))
            config = translator.config
            translated = partial(translation_lines, translator, search, options, searching)
        if typing:
            for sentence in typed_sentences(f"{config.data.source}> "):
                print_text("\n".join(translated([sentence], 0)), flush=True)
        for before, block in piped_lines() if is_streaming(options, ranks) else [(0, sentences)]:
            lines = translated(block, before)
            print_lines(lines)
        if options.alignments:
            write_alignments(Path(options.alignments), translator, sentences, lines, searching)
    return 0


def print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print_text(line)
    sys.stdout.flush()


def is_typing(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Return whether a person types the sentences; raise ConfigError if nobody can."""
    if options.sentences or options.file:
        return False
    # Python has no standard input if its parent closed it
    if sys.stdin is None:
        raise ConfigError("there is no standard input: give sentences, or --file")
    if not sys.stdin.isatty():
        return False
    if ranks.world > 1:
        raise ConfigError(
            "sentences can be typed into one process only: give several processes their sentences as arguments, "
            "with --file or through a pipe"
        )
    if options.prefixes or options.constraints or options.alignments:
        raise ConfigError(
            "--prefixes, --constraints and --alignments have a line for each sentence: give sentences or --file"
        )
    return True


def is_streaming(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Return whether lines of the standard input are translated as they arrive.

    They are not if several processes share them, or if another file has a line for each, whose number is compared.
    """
    by_line = options.prefixes or options.constraints or options.alignments
    return not (options.sentences or options.file or by_line or ranks.world > 1 or sys.stdin.isatty())


def piped_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield how many lines came before, and all lines of the standard input that have arrived since."""
    where = "the standard input"
    before = 0
    rest = bytearray()
    stdin = cast(BufferedReader, sys.stdin.buffer)
    while content := stdin.read1(BLOCK):
        rest += content
        if not before and not is_plain(bytes(rest[:8])):
            rest += stdin.read()
            break
        if b"\n" in content:
            end = rest.rindex(b"\n") + 1
            lines = lines_of(bytes(rest[:end]), where, before + 1)
            del rest[:end]
            yield before, lines
            before += len(lines)
    if rest:
        yield before, lines_of(bytes(rest), where, before + 1)


BLOCK = 1 << 24
"""The most bytes that are read at a time; usually a whole file."""


Translate = Callable[[list[str], int], list[str]]
"""Returns the lines that show the translations of sentences, given the number of sentences before them."""


def by_ctranslate2(options: argparse.Namespace, ranks: Ranks) -> tuple[RunConfig, Translate]:
    """Return an exported model's settings, and a function that translates with it, in one process with many threads."""
    if ranks.world > 1:
        raise ConfigError("--engine ctranslate2 uses threads, not several processes: start it without torchrun")
    translator = load_exported(options.run, options)

    from recipes.translation.translating import ctranslate2_engine

    if note := outdated_export(options.run):
        print(f"[translate] {note}", file=sys.stderr)
    return translator.config, partial(ctranslate2_engine.translate, translator)


def translation_lines(
    translator: Translator,
    search: SearchOptions,
    options: argparse.Namespace,
    ranks: Ranks,
    sentences: Sequence[str],
    before: int,
) -> list[str]:
    """Return the lines that show the translations."""
    from recipes.translation.translating.translate import alternatives, note_unfinished

    found = alternatives(translator, sentences, replace(search, before=before), ranks, "translate")
    if ranks.is_main:
        note_unfinished([next((one for one in row if not one.finished), row[0]) for row in found], "translate", before)
    if options.mbr or options.metric_command:
        texts = [[one.text for one in row] for row in found]
        return ranks.run_on_main(lambda: choose_translations(sentences, texts, options, translator.config.data))
    if options.n_best or options.sample or options.scores:
        return table(found, options.scores, before)
    return [row[0].text for row in found]


def choose_translations(
    sources: Sequence[str], texts: Sequence[Sequence[str]], options: argparse.Namespace, data: DataConfig
) -> list[str]:
    """Return, for each sentence, the translation that --mbr or --metric-command prefers."""
    from recipes.translation.scores import rerank

    if options.mbr == "command":
        return rerank.choose_by_mbr_of_command(sources, texts, options.metric_command)
    if options.mbr:
        return rerank.choose_by_mbr(texts, options.mbr, data)
    return rerank.choose_by_command(sources, texts, options.metric_command)


def table(found: Sequence[Sequence[Translation]], scores: bool, before: int = 0) -> list[str]:
    """Return a line for each translation: its sentence's number, the score and log-probability if wanted, its text."""
    lines = []
    for number, row in enumerate(found, start=before + 1):
        for one in row:
            columns = [str(number)]
            if scores:
                columns += [f"{one.score:.6f}", f"{one.log_probability:.6f}"]
            # A tab in the text would make one more column
            lines.append("\t".join([*columns, one.text.replace("\t", " ")]))
    return lines


def write_alignments(
    file: Path, translator: Translator, sentences: Sequence[str], translations: Sequence[str], ranks: Ranks
) -> None:
    """Write a line of links for each sentence; only rank 0 writes."""
    from recipes.translation.translating.alignments import align, pharaoh

    found = align(translator, sentences, translations, ranks)
    if ranks.is_main:
        write_output(file, "".join(f"{pharaoh(links)}\n" for links in found).encode())


def _sentences(file: str | None) -> list[str]:
    if file:
        return read_lines(Path(file))
    return lines_of(sys.stdin.buffer.read(), "the standard input")


def typed_sentences(prompt: str) -> Iterator[str]:
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
