"""The commands that judge a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.translation.atomic_folder import writing_to
from recipes.translation.commands.arguments import PROGRAM, add_model_options, load, parser_of, path
from recipes.translation.data.lines import read_lines
from recipes.translation.settings.config import LayoutConfig


def evaluate(argv: Sequence[str]) -> int:
    """Score a model on its test set, or a file of translations against a file of references.

    Prints sacreBLEU's BLEU and chrF with their signatures, BLEU of the lower-cased text, and the percentage of exact
    matches; for text that is already tokenised also BLEU as multi-bleu.perl -lc computes it. Writes translations and
    scores to the run's folder.
    """
    parser = parser_of(
        evaluate,
        f"{PROGRAM} evaluate --run runs/demo\n"
        f"{PROGRAM} evaluate --hypotheses translations.txt --references references.txt",
    )
    add_model_options(parser)
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="which data (default: test)")
    parser.add_argument(
        "--tokenize",
        metavar="NAME",
        help="sacreBLEU's tokeniser: 13a, intl, char, zh, ...; none for text that is already tokenised (default: the "
        "setting data.tokenize, which follows the target language; for files, by their script)",
    )
    parser.add_argument(
        "--hypotheses", metavar="FILE", type=path, help="translations, one a line, to score without a model"
    )
    parser.add_argument("--references", metavar="FILE", type=path, help="reference translations, one a line")
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
        translator = load(options, ranks)
        evaluation = evaluate_model(translator, options.split, translator.config.decoding, options.tokenize, ranks)
        print(evaluation.scores)
        if ranks.is_main:
            with writing_to(Path(options.run)):
                written = evaluation.write(Path(options.run))
            print("[evaluate] written:", *written)
    return 0
