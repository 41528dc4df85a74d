"""The command line: `python -m recipes.translation <command>`.

Settings on the command line override those of the YAML file, which override the defaults. For a mistake of the user the
program prints one line and exits with status 2. Each command imports what needs torch itself, so that help and error
messages appear at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.translation.atomic_folder import CheckpointError, whole_folder, writing_to
from recipes.translation.data.lines import lines_of, read_lines
from recipes.translation.data.sentence_pairs import DataError
from recipes.translation.processes.stop import OtherRankError, TrainingError
from recipes.translation.settings.config import ConfigError, LayoutConfig, RunConfig, load_config
from recipes.translation.settings.options import ALSO, OneLineParser, add_config_options, fail, overrides, unknown

if TYPE_CHECKING:
    from recipes.translation.data.subwords import Subwords
    from recipes.translation.processes.ranks import Ranks
    from recipes.translation.run_folder.checkpoint import Translator
    from recipes.translation.training.summary import Summary

PROGRAM = "python -m recipes.translation"
DEMO_CONFIG = Path(__file__).parent / "configs" / "demo.yaml"


def main(argv: Sequence[str]) -> int:
    """Run a command; return the exit status: 0, 2 for a mistake of the user, or 128 + the number of a signal."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        return fail(f"{unknown('command', name, list(COMMANDS))}; the commands are {', '.join(COMMANDS)}")
    try:
        return COMMANDS[name](rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename:  # str(error) would begin with [Errno 13]
            return fail(f"{error.filename}: {error.strerror}")
        return fail(str(error))
    except OtherRankError as error:
        if os.environ.get("RANK", "0") != "0":
            return 2  # rank 0 prints the error
        return fail(str(error))
    except (ConfigError, DataError, CheckpointError, TrainingError) as error:
        return fail(str(error))


def overview() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {(run.__doc__ or '').splitlines()[0]}" for name, run in COMMANDS.items())
    return (
        f"Train and use translation models.\n\nusage: {PROGRAM} COMMAND [OPTIONS]\n\ncommands:\n{commands}\n\n"
        f"Begin with: {PROGRAM} demo\nHelp on a command and its options: {PROGRAM} train --help"
    )


def prepare(argv: Sequence[str]) -> int:
    """Make the subword models of a run, as the first step of train, and nothing else."""
    parser = _parser(prepare, f"{PROGRAM} prepare --config recipes/translation/configs/demo.yaml --run runs/mine")
    _add_config_file(parser)
    add_config_options(parser)
    config = _run_config(parser.parse(argv))

    from recipes.translation.data.prepare import prepare as make_subwords
    from recipes.translation.processes.ranks import joined
    from recipes.translation.run_folder.lock import sole_writer

    def make() -> tuple[Subwords, Subwords]:
        with sole_writer(Path(config.run)):
            return make_subwords(config)

    with joined(config.layout.timeout) as ranks:
        source, target = ranks.run_on_main(make)
        print(
            f"[prepare] {len(source):,} source and {len(target):,} target subwords in {Path(config.run) / 'subwords'}"
        )
    return 0


def train(argv: Sequence[str]) -> int:
    """Train a model, or resume a run that was stopped.

    A run is a folder (--run; under torchrun --folder). If it contains an unfinished run, training resumes where it
    stopped, with the settings of that run. Ctrl-C finishes the current step, saves, and prints the command to resume.
    """
    parser = _parser(
        train,
        f"{PROGRAM} train --config recipes/translation/configs/demo.yaml --run runs/mine --training.steps 500\n"
        f"{PROGRAM} train --run runs/mine",
    )
    _add_config_file(parser)
    parser.add_argument("--fresh", action="store_true", help="start over: remove what an earlier run left in --run")
    add_config_options(parser)
    options = parser.parse(argv)
    config = _run_config(options)

    from recipes.translation.processes.ranks import joined
    from recipes.translation.train import train as train_model

    with joined(config.layout.timeout) as ranks:
        summary = train_model(config, fresh=options.fresh, ranks=ranks)
        print(summary)
    return _status(summary)


def _status(summary: Summary) -> int:
    """Return the exit status after a training."""
    if summary.stopped_by:
        return 128 + summary.stopped_by
    return 0


def average(argv: Sequence[str]) -> int:
    """Average the weights of a run's last models, which often translates better than any of them.

    Training keeps these models where --training.keep_checkpoints is set. The average is written to the run's folder
    `averaged`; evaluate and translate use it with --checkpoint averaged.
    """
    parser = _parser(average, f"{PROGRAM} average --run runs/mine\n{PROGRAM} average --run runs/mine --last 5")
    _add_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", metavar="K", type=_count, help="average the last K of the kept models (default: all)")
    which.add_argument("--best", metavar="K", type=_count, help="average the K with the best validation loss")
    options = parser.parse(argv)

    from recipes.translation.processes.ranks import joined
    from recipes.translation.run_folder.average import average as average_models

    with joined(LayoutConfig().timeout) as ranks:
        made = ranks.run_on_main(lambda: average_models(Path(options.run), options.last, options.best))
        steps = ", ".join(f"{step:,}" for step in made.steps)
        print(f"[average] {made.folder} is the average of {len(made.steps)} models, of the steps {steps}")
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Score a model on its test set, or a file of translations against a file of references.

    Prints sacreBLEU's BLEU and chrF with their signatures, BLEU of the lower-cased text, and the percentage of exact
    matches; for text that is already tokenised also BLEU as multi-bleu.perl -lc computes it. Writes translations and
    scores to the run's folder.
    """
    parser = _parser(
        evaluate,
        f"{PROGRAM} evaluate --run runs/demo\n"
        f"{PROGRAM} evaluate --hypotheses translations.txt --references references.txt",
    )
    _add_model_options(parser)
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="which data (default: test)")
    parser.add_argument(
        "--tokenize",
        metavar="NAME",
        help="sacreBLEU's tokeniser: 13a, intl, char, zh, ...; none for text that is already tokenised (default: the "
        "setting data.tokenize, which follows the target language; for files, by their script)",
    )
    parser.add_argument(
        "--hypotheses", metavar="FILE", type=_path, help="translations, one a line, to score without a model"
    )
    parser.add_argument("--references", metavar="FILE", type=_path, help="reference translations, one a line")
    options = parser.parse(argv)
    if bool(options.hypotheses) != bool(options.references):
        parser.error("--hypotheses and --references go together")

    from recipes.translation.data.bleu_tokenizers import check_tokenizer
    from recipes.translation.evaluate import evaluate as evaluate_model
    from recipes.translation.evaluate import score
    from recipes.translation.processes.ranks import joined

    if options.tokenize:
        check_tokenizer(options.tokenize)
    with joined(LayoutConfig().timeout) as ranks:
        if options.hypotheses:
            hypotheses = read_lines(Path(options.hypotheses))
            references = read_lines(Path(options.references))
            print(score(hypotheses, references, tokenize=options.tokenize or "auto"))
            return 0
        translator = _load(options, ranks)
        evaluation = evaluate_model(translator, options.split, translator.config.decoding, options.tokenize, ranks)
        print(evaluation.scores)
        if ranks.is_main:
            with writing_to(Path(options.run)):
                written = evaluation.write(Path(options.run))
            print("[evaluate] written:", *written)
    return 0


def translate(argv: Sequence[str]) -> int:
    """Translate sentences given on the command line, in a file, through a pipe, or typed one by one."""
    parser = _parser(
        translate,
        f'{PROGRAM} translate --run runs/demo "The train to Vienna leaves at half past seven."\n'
        f"{PROGRAM} translate --run runs/demo --file sentences.txt > translations.txt\n"
        f"{PROGRAM} translate --run runs/demo",
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="a sentence, in quotes; any number of them")
    parser.add_argument("--file", metavar="FILE", type=_path, help="a text file, one sentence a line")
    _add_model_options(parser)
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
        translator = _load(options, ranks)
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


def demo(argv: Sequence[str]) -> int:
    """Train, evaluate and try out a small English-German model on the built-in corpus (minutes on 2 CPU cores).

    Needs no download and no GPU; if there are GPUs, it trains on all of them.
    """
    parser = _parser(demo, f"{PROGRAM} demo\n{PROGRAM} demo --run runs/short --training.steps 100")
    add_config_options(parser)
    config = _with_folder(load_config(DEMO_CONFIG, overrides(parser.parse(argv))))

    from recipes.translation.demo import demo as run_demo

    return _status(run_demo(config))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "prepare": prepare,
    "train": train,
    "average": average,
    "evaluate": evaluate,
    "translate": translate,
}


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


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 up")
    return int(word)


def _path(word: str) -> str:
    if "\0" in word:
        raise argparse.ArgumentTypeError(f"{word!r} is not a path: it contains a NUL")
    return word


def _parser(run: Callable[[Sequence[str]], int], example: str) -> OneLineParser:
    return OneLineParser(f"{PROGRAM} {run.__name__}", (run.__doc__ or "").replace("\n    ", "\n"), example)


def _add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=_path,
        help="YAML file with settings, which options override (default: the settings of --run, if it is a run)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", ALSO["run"], metavar="FOLDER", type=_path, default="runs/demo", help="the run (default: runs/demo)"
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--checkpoint",
        choices=("best", "last", "averaged"),
        default="best",
        help="the model with the best validation loss, the newest, or what the command average made (default: best)",
    )
    parser.add_argument("--beam", metavar="N", help="beam width; 1 is greedy and fastest (default: as trained for)")
    parser.add_argument(
        "--length-penalty", metavar="X", help="exponent of the length penalty; 0 has none (default: as trained for)"
    )
    parser.add_argument(
        "--length-norm",
        metavar="NAME",
        help="base of the length penalty: gnmt ((5 + length) / 6) or length (default: as trained for)",
    )


def _run_config(options: argparse.Namespace) -> RunConfig:
    """Read the settings; without --config, an existing run's own take the place of the defaults."""
    given: dict[str, object] = {**overrides(options)}
    path = options.config
    if path is None:
        run = str(given.get("run", RunConfig().run))
        if begun := whole_folder(Path(run) / "last"):
            path = begun / "config.yaml"
            given["run"] = run  # the folder may have been moved
    return _with_folder(load_config(path, given))


def _with_folder(config: RunConfig) -> RunConfig:
    if "\0" in config.run:
        raise ConfigError(f"run is {config.run!r}, which is not a path: it contains a NUL")
    return config


def _load(options: argparse.Namespace, ranks: Ranks) -> Translator:
    """Read the model of --run on rank 0, with the decoding options given; move it to this process's GPU, if any."""
    given = {
        "decoding.beam": options.beam,
        "decoding.length_penalty": options.length_penalty,
        "decoding.length_norm": options.length_norm,
    }

    import torch

    from recipes.translation.run_folder.checkpoint import load_translator

    def read() -> Translator:
        folder = Path(options.run)
        if not whole_folder(folder):  # it is not a checkpoint itself, so it is the run that contains one
            folder = folder / options.checkpoint
        if whole_folder(folder) is None and not folder.exists():
            way = "train one"
            if options.checkpoint == "averaged":
                way = f"make it with {PROGRAM} average"
            raise CheckpointError(f"there is no trained model in {folder}; {way}, or name another folder with --run")
        return load_translator(folder, "cpu", {name: value for name, value in given.items() if value is not None})

    # On the CPU, where one process can send it to the others; each then uses a GPU of its own
    translator = ranks.run_on_main(read)
    if torch.cuda.is_available():
        translator.model.to(torch.device("cuda", ranks.local_rank % torch.cuda.device_count()))
    return translator
