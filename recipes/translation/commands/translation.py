"""The command that translates."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from recipes.translation.commands.arguments import PROGRAM, add_model_options, load, parser_of, path
from recipes.translation.data.lines import lines_of, read_lines
from recipes.translation.settings.config import ConfigError, LayoutConfig


def translate(argv: Sequence[str]) -> int:
    """Translate sentences given on the command line, in a file, through a pipe, or typed one by one."""
    parser = parser_of(
        translate,
        f'{PROGRAM} translate --run runs/demo "The train to Vienna leaves at half past seven."\n'
        f"{PROGRAM} translate --run runs/demo --file sentences.txt > translations.txt\n"
        f"{PROGRAM} translate --run runs/demo",
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="a sentence, in quotes; any number of them")
    parser.add_argument("--file", metavar="FILE", type=path, help="a text file, one sentence a line")
    add_model_options(parser)
    options = parser.parse(argv)
    if options.sentences and options.file:
        parser.error("give sentences or --file, not both")

    from recipes.translation.processes.ranks import joined
    from recipes.translation.translate import translate as translate_all

    typing = not options.sentences and not options.file and sys.stdin.isatty()
    with joined(LayoutConfig().timeout) as ranks:
        if typing and ranks.world > 1:
            raise ConfigError(
                "sentences can be typed to one process only; give several processes words, --file or a pipe"
            )
        sentences: list[str] = []
        if not typing:
            sentences = ranks.run_on_main(lambda: options.sentences or _sentences(options.file))
        translator = load(options, ranks)
        decoding = translator.config.decoding
        if typing:
            for sentence in typed(f"{translator.config.data.source}> "):
                print(*translate_all(translator, [sentence], decoding), flush=True)
        for translation in translate_all(translator, sentences, decoding, ranks):
            print(translation)
    return 0


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
