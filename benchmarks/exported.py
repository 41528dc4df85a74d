"""Compare a run in CTranslate2 and ONNX Runtime with the same model in torch: equal translations, BLEU, speed, size.

    python -m benchmarks.exported RUN                   # the validation sentences of the run's data
    python -m benchmarks.exported RUN --threads 1
    python -m benchmarks.exported RUN --beam 1          # ONNX Runtime too, which has no beam search of its own

All translate the same sentences with the same beam and the same number of threads; each takes turns with the others,
three times, and the fastest is shown. Loading is not timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import ctranslate2
import numpy
import onnxruntime
import sacrebleu
import torch

from benchmarks.distilled import bytes_of
from benchmarks.loss.results import hardware
from models import default_limit
from recipes.translation.data.batches import padded
from recipes.translation.data.model_text import finished
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.export import ctranslate2_engine, ctranslate2_model, onnx_model
from recipes.translation.run_folder.checkpoint import Translator, load_translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.subwords import BOS, EOS, PAD
from recipes.translation.translating.sentences import source_ids
from recipes.translation.translating.translate import translate
from seqpar.testing.markdown_table import markdown_table

TORCH = "torch"
ONNX = "ONNX Runtime, float32"
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
    folder_of_run = options.run / options.checkpoint

    ways: dict[str, Callable[[], list[str]]] = {TORCH: partial(translate, translator, sources, config.decoding)}
    sizes = {TORCH: bytes_of(folder_of_run)}
    same = {TORCH: len(sources)}
    with tempfile.TemporaryDirectory() as folder:
        for name in TYPES:
            path = Path(folder) / name
            ctranslate2_model.write(translator, path, name)
            engine = ctranslate2_engine.load(path, threads=options.threads)
            way = f"CTranslate2, {name}"
            ways[way] = partial(ctranslate2_engine.translate, engine, sources, config.decoding)
            sizes[way] = bytes_of(path)
            same[way] = sum(map(str.__eq__, ctranslate2_engine.translate(engine, sources, greedy), expected))
        if options.beam == 1:
            path = Path(folder) / "onnx"
            onnx_model.write(translator, path)
            search = OnnxGreedy(path, translator, options.threads)
            ways[ONNX] = partial(search.translate, sources)
            sizes[ONNX] = bytes_of(path)
            same[ONNX] = sum(map(str.__eq__, search.translate(sources), expected))
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
        f"{ctranslate2.__version__}, onnxruntime {onnxruntime.__version__}; {len(sources):,} validation sentences, "
        f"beam {options.beam} without length penalty"
    )


class OnnxGreedy:
    """Greedy search in ONNX Runtime, as docs/export.md has it, in batches of similar length."""

    def __init__(self, folder: Path, translator: Translator, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.translator = translator
        self.facts = json.loads((folder / "onnx.json").read_text())
        self.encoder = onnxruntime.InferenceSession(folder / "encoder.onnx", options)
        self.decoder = onnxruntime.InferenceSession(folder / "decoder.onnx", options)

    def translate(self, sentences: list[str]) -> list[str]:
        """Translate in the same order."""
        config = self.translator.config
        ids = source_ids(self.translator.source, config, sentences, config.decoding)
        longest_first = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
        found: list[list[int]] = [[] for _ in ids]
        for start in range(0, len(ids), config.decoding.batch_sentences):
            rows = longest_first[start : start + config.decoding.batch_sentences]
            for row, tokens in zip(rows, self.search([ids[row] for row in rows]), strict=True):
                found[row] = tokens
        return finished(self.translator.target.decode(found), sentences, config)

    def search(self, sources: list[list[int]]) -> list[list[int]]:
        """Return the most probable next tokens until the end symbol or the limit."""
        src = padded([[*ids, EOS] for ids in sources]).numpy()
        limits = [min(default_limit(len(ids) + 1), self.facts["max_length"]) for ids in sources]
        held = dict(zip(self.facts["encoder"]["outputs"], self.encoder.run(None, {"source": src}), strict=True))
        rows = [[BOS] for _ in sources]
        while any(row[-1] != EOS and len(row) <= limit for row, limit in zip(rows, limits, strict=True)):
            token = numpy.array([row[-1] for row in rows])
            scores, *state = self.decoder.run(None, {"token": token, **held})
            held.update(zip(self.facts["state"], state, strict=True))
            scores[:, [PAD, BOS]] = -numpy.inf
            for row, best in zip(rows, scores.argmax(-1).tolist(), strict=True):
                row.append(EOS if row[-1] == EOS else best)
        pairs = zip(rows, limits, strict=True)
        return [[token for token in row[1 : limit + 1] if token != EOS] for row, limit in pairs]


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
