"""Compare a run in CTranslate2 with the same model in torch: equal translations, BLEU, speed, size.

    python -m benchmarks.exported RUN                   # the validation sentences of the run's data
    python -m benchmarks.exported RUN --threads 1

Both translate the same sentences with the same beam and the same number of threads; each takes turns with the others,
three times, and the fastest is shown. Loading is not timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import ctranslate2
import sacrebleu
import torch

from benchmarks.loss.results import hardware
from recipes.translation.data.bleu_tokenizers import tokenizer_for
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.export import ctranslate2_engine, ctranslate2_model
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.translate import translate
from seqpar.markdown_table import markdown_table

TORCH = "torch"
ROUNDS = 3
TYPES = ("float32", "int8")


def main() -> None:
    """Measure a run, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exported", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run of the recipe")
    parser.add_argument("--checkpoint", default="best", help="which of its models (default: best)")
    parser.add_argument("--beam", type=int, default=4, help="beam width of the timed translations (default: 4)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Without a length penalty, on which the two searches differ
    overrides = {"decoding.beam": options.beam, "decoding.length_penalty": 0.0}
    translator = load_translator(options.run / options.checkpoint, "cpu", overrides)
    config = translator.config
    pairs = load_pairs(config.data, "valid", config.subwords.lowercase)
    sources = [pair.source for pair in pairs]
    references = [pair.target for pair in pairs]
    tokenize = tokenizer_for(config.data.tokenize, config.data.target, references)
    greedy = DecodingConfig(beam=1, max_length=config.decoding.max_length)
    expected = translate(translator, sources, greedy)
    weights = options.run / options.checkpoint / "model.safetensors"

    ways: dict[str, Callable[[], list[str]]] = {TORCH: partial(translate, translator, sources, config.decoding)}
    sizes = {TORCH: weights.stat().st_size}
    same = {TORCH: len(sources)}
    with tempfile.TemporaryDirectory() as folder:
        for name in TYPES:
            path = Path(folder) / name
            ctranslate2_model.write(translator, path, name)
            engine = ctranslate2_engine.load(path, threads=options.threads)
            way = f"CTranslate2, {name}"
            ways[way] = partial(ctranslate2_engine.translate, engine, sources, config.decoding)
            sizes[way] = sum(file.stat().st_size for file in path.iterdir())
            same[way] = sum(map(str.__eq__, ctranslate2_engine.translate(engine, sources, greedy), expected))
        seconds, translations = timed(ways)

    rows = []
    for way, taken in seconds.items():
        bleu = sacrebleu.corpus_bleu(translations[way], [references], tokenize=tokenize, force=True).score
        rows.append(
            [
                way,
                f"{same[way]:,} of {len(sources):,}",
                f"{bleu:.2f}",
                f"{len(sources) / taken:.0f}",
                f"{seconds[TORCH] / taken:.2f}",
                f"{sizes[way] / 1e6:.1f}",
            ]
        )
    print(markdown_table(["", "greedy equal to torch", "BLEU", "sentences/s", "x torch's speed", "MB"], rows))
    print(
        f"\n{date.today()}, {hardware('cpu')}, {options.threads} threads; torch {torch.__version__}, ctranslate2 "
        f"{ctranslate2.__version__}; {len(sources):,} validation sentences, beam {options.beam} without length penalty"
    )


def timed(ways: dict[str, Callable[[], list[str]]]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Run the ways in turn; return the fastest time of each, and its translations."""
    seconds: dict[str, float] = {}
    translations: dict[str, list[str]] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            translations[name] = way()
            taken = time.perf_counter() - start
            seconds[name] = min(taken, seconds.get(name, taken))
    return seconds, translations


if __name__ == "__main__":
    main()
