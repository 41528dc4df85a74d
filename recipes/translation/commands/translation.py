"""The command that translates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.commands.arguments import PROGRAM, add_model_options, count, load, parser_of, path
from recipes.translation.data.lines import lines_of, read_lines
from recipes.translation.settings.config import ConfigError, LayoutConfig

if TYPE_CHECKING:
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.checkpoint import Translator


def translate(argv: Sequence[str]) -> int:
    """Translate sentences given on the command line, in a file, through a pipe, or typed one by one."""
    parser = parser_of(
        translate,
        f'{PROGRAM} translate --run runs/demo "The train to Vienna leaves at half past seven."\n'
        f"{PROGRAM} translate --run runs/demo --file sentences.txt > translations.txt\n"
        f"{PROGRAM} translate --run runs/demo --file sentences.txt --mbr chrf --candidates 16 > translations.txt\n"
        f"{PROGRAM} translate --run runs/demo",
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="a sentence, in quotes; any number of them")
    parser.add_argument("--file", metavar="FILE", type=path, help="a text file, one sentence a line")
    add_model_options(parser)
    add_mbr(parser)
    parser.add_argument(
        "--alignments",
        metavar="FILE",
        type=path,
        help="also write which words belong together, from the attention of the last decoder layer but one: for each "
        "sentence a line of pairs source-target, counted from 0 (Pharaoh's format)",
    )
    options = parser.parse(argv)
    if options.sentences and options.file:
        parser.error("give sentences or --file, not both")
    if options.candidates and not options.mbr:
        parser.error("--candidates are what --mbr chooses from; add --mbr chrf or --mbr bleu")

    from recipes.translation.processes.ranks import joined

    typing = not options.sentences and not options.file and sys.stdin.isatty()
    with joined(LayoutConfig().timeout) as ranks:
        if typing and ranks.world > 1:
            raise ConfigError(
                "sentences can be typed to one process only; give several processes words, --file or a pipe"
            )
        if typing and options.alignments:
            raise ConfigError("--alignments are for words, --file or a pipe, not for sentences that are typed")
        sentences: list[str] = []
        if not typing:
            sentences = ranks.run_on_main(lambda: options.sentences or _sentences(options.file))
        translator = load(options, ranks)
        if typing:
            for sentence in typed(f"{translator.config.data.source}> "):
                print(*_translated(options, translator, [sentence], ranks), flush=True)
        translations = _translated(options, translator, sentences, ranks)
        for translation in translations:
            print(translation)
        if options.alignments:
            _write_alignments(Path(options.alignments), translator, sentences, translations, ranks)
    return 0


DEFAULT_CANDIDATES = 16


def add_mbr(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mbr",
        choices=("chrf", "bleu"),
        help="choose among the best translations of the search the one most like the others, by chrF or sentence-BLEU "
        "(minimum Bayes risk)",
    )
    parser.add_argument(
        "--candidates",
        metavar="N",
        type=count,
        help=f"translations that --mbr chooses from; the beam is at least as wide (default: {DEFAULT_CANDIDATES})",
    )


def _translated(
    options: argparse.Namespace, translator: Translator, sentences: Sequence[str], ranks: Ranks
) -> list[str]:
    """Translate by the search, or by minimum Bayes risk where --mbr is given."""
    from recipes.translation.data.bleu_tokenizers import check_tokenizer, tokenizer_for
    from recipes.translation.rerank import translate_by_mbr
    from recipes.translation.translate import translate as translate_all

    config = translator.config
    if not options.mbr:
        return translate_all(translator, sentences, config.decoding, ranks)
    tokenize = tokenizer_for(config.data.tokenize, config.data.target, [])
    check_tokenizer(tokenize)
    candidates = options.candidates or DEFAULT_CANDIDATES
    return translate_by_mbr(translator, sentences, config.decoding, options.mbr, candidates, tokenize, ranks)


def _write_alignments(
    file: Path, translator: Translator, sentences: Sequence[str], translations: Sequence[str], ranks: Ranks
) -> None:
    """Write a line of links for each sentence; rank 0 alone writes."""
    from recipes.translation.alignments import align, pharaoh

    found = align(translator, sentences, translations, translator.config.decoding, ranks)
    if ranks.is_main:
        file.write_text("".join(f"{pharaoh(links)}\n" for links in found), encoding="utf-8")


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
