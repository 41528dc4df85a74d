"""Import models of the published sizes, with random weights: CPU time, memory, and logits against transformers.

    python -m benchmarks.imports                        # all four, one after another, in a temporary folder
    python -m benchmarks.imports opus-mt-en-de --folder /large/disk

Nothing is downloaded: transformers makes each model from the numbers of its published config.json. The sentencepiece
models have as many pieces as the published ones; a few hundred are learned from the built-in corpus, and all others are
made up. Making, importing and loading are processes of their own, so that the peak of memory is that of one of them.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from benchmarks.loss.results import hardware
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.importing.folder import Folder
from recipes.translation.importing.published_model import import_model
from recipes.translation.importing.tokenizer import M2M100, SPM, read_tokenizer
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.text.sentencepiece_file import Kind, Piece, pieces_of, with_pieces
from seqpar.testing.markdown_table import markdown_table

SENTENCES, TOKENS = 3, 12
LARGE: dict[str, Any] = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "relu",
    "max_position_embeddings": 1024,
    "scale_embedding": True,
    "decoder_start_token_id": 2,
}
BASE: dict[str, Any] = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "activation_function": "swish",
    "max_position_embeddings": 512,
    "scale_embedding": True,
    "pad_token_id": 58_100,
    "decoder_start_token_id": 58_100,
    "eos_token_id": 0,
}


class Published(NamedTuple):
    """A published model: the numbers of its config.json and tokenizer."""

    kind: str
    config: dict[str, Any]
    vocab_size: int
    pieces: int
    """Of each sentencepiece model."""
    tokenizer: str
    languages: tuple[str, str] = ("", "")
    tags: int = 0


MODELS = {
    "opus-mt-en-de": Published("Marian", BASE, 58_101, 32_000, "MarianTokenizer"),
    "m2m100_418M": Published("M2M100", LARGE, 128_112, 128_000, "M2M100Tokenizer", ("en", "de")),
    "nllb-200-distilled-600M": Published(
        "M2M100", LARGE, 256_206, 256_000, "NllbTokenizer", ("eng_Latn", "deu_Latn"), 202
    ),
    "mbart-large-50": Published("MBart", LARGE, 250_054, 250_000, "MBart50Tokenizer", ("en_XX", "de_DE"), 52),
}


def main() -> None:
    """Measure the models that are named, or all, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.imports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"any of {', '.join(MODELS)}")
    parser.add_argument("--folder", help="where the models are written, for as long as it takes")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append([name, *measured(name, Path(folder))])
        print(rows[-1], flush=True)
    titles = ["", "parameters", "vocabulary", "folder", "import, CPU time", "its memory", "load, CPU time"]
    titles += ["its memory", "logits apart"]
    print(markdown_table(titles, rows))
    print(
        f"\n{date.today()}, {hardware('cpu')}, {torch.get_num_threads()} threads; torch {torch.__version__}, "
        f"transformers {version('transformers')}; memory is the largest resident set of the process"
    )


def measured(name: str, folder: Path) -> list[str]:
    """Return a row of the table."""
    there, run = folder / name, folder / "run"
    alone(make, name, there)
    size = sum(file.stat().st_size for file in there.iterdir())
    import_seconds, import_peak = alone(imported, name, there, run)
    (load_seconds, apart, parameters), load_peak = alone(loaded, name, there, run)
    return [
        f"{parameters / 1e6:.0f} M",
        f"{MODELS[name].vocab_size:,}",
        f"{size / 1e9:.2f} GB",
        f"{import_seconds:.0f} s",
        f"{import_peak / 1e9:.1f} GB",
        f"{load_seconds:.0f} s",
        f"{load_peak / 1e9:.1f} GB",
        f"{apart:.1e}",
    ]


def alone(stage: Callable[..., Any], *arguments: object) -> tuple[Any, int]:
    """Run a stage in a process of its own; return what it returns, and the largest resident set in bytes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(stage, *arguments).result()
        return result, pool.submit(peak).result()


def peak() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def make(name: str, folder: Path) -> None:
    """Write a model as transformers saves it, and its logits of random tokens."""
    import transformers  # here, so that the processes that import and load do not have it in memory

    published = MODELS[name]
    folder.mkdir(parents=True)
    write_tokenizer(published, folder)
    torch.manual_seed(1)
    config = getattr(transformers, f"{published.kind}Config")(
        **published.config, vocab_size=published.vocab_size, dropout=0.0, attention_dropout=0.0
    )
    heads = {"Marian": "MarianMTModel"}
    model = getattr(transformers, heads.get(published.kind, f"{published.kind}ForConditionalGeneration"))(config).eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    source, target = torch.randint(5, published.pieces, (2, SENTENCES, TOKENS))
    source[1:, TOKENS // 2 :] = model.config.pad_token_id
    with torch.no_grad():
        logits = model(
            input_ids=source, attention_mask=source != model.config.pad_token_id, decoder_input_ids=target
        ).logits
    model.save_pretrained(folder)
    save_file({"source": source, "target": target, "logits": logits}, folder.parent / "expected")


def write_tokenizer(published: Published, folder: Path) -> None:
    """Write the files of a tokenizer, with made-up pieces and, for most languages, made-up tags."""
    own = {"tokenizer_class": published.tokenizer}
    (folder / "tokenizer_config.json").write_text(json.dumps(own), encoding="utf-8")
    if published.kind == "Marian":
        model = spm("unigram", published.pieces)
        (folder / "source.spm").write_bytes(model)
        (folder / "target.spm").write_bytes(model)
        texts = [piece.text for piece in pieces_of(model)[3:]]
        more = [f"\u2581other{number}" for number in range(published.vocab_size - 3 - len(texts))]
        write_ids(folder, ["</s>", "<unk>", *texts, *more, "<pad>"])
        return
    kind = "bpe"
    if published.kind == "MBart":
        kind = "unigram"
    model = spm(kind, published.pieces)
    (folder / SPM).write_bytes(model)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(piece.text for piece in pieces_of(model)[3:])]
    if not published.tags:
        unused = published.vocab_size - len(names) - len(M2M100.split())
        write_ids(folder, [*names, *(f"madeupword{number:04}" for number in range(unused - 8))])
        return
    tags = [*published.languages, *(f"x{number:03}_Latn" for number in range(published.tags - 2)), "<mask>"]
    added = [{"id": len(names) + number, "content": tag} for number, tag in enumerate(tags)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}), encoding="utf-8")


def write_ids(folder: Path, names: list[str]) -> None:
    """Write the ids of pieces to vocab.json."""
    ids = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")


def spm(kind: str, size: int) -> bytes:
    """Return a sentencepiece model of that many pieces, most of them made up."""
    learned = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(side for pair in pairs(300, 1) for side in pair),
        model_writer=learned,
        vocab_size=300,
        model_type=kind,
        minloglevel=2,
    )
    pieces = pieces_of(learned.getvalue())
    lowest = min(piece.score for piece in pieces)
    pieces += [
        Piece(f"\u2581piece{number}", lowest - 1 - number / size, Kind.NORMAL) for number in range(size - len(pieces))
    ]
    return with_pieces(learned.getvalue(), pieces, {}, {})


def imported(name: str, folder: Path, run: Path) -> float:
    """Import a model; return the CPU seconds."""
    start = time.process_time()
    import_model(folder, run, *MODELS[name].languages)
    return time.process_time() - start


def loaded(name: str, folder: Path, run: Path) -> tuple[float, float, int]:
    """Load the imported model; return the CPU seconds, how far its logits are from those of `make`, and its size."""
    start = time.process_time()
    translator = load_translator(run / "best")
    seconds = time.process_time() - start
    files = Folder(folder)
    settings = files.json("config.json")
    generation = {**settings, **files.json_or_nothing("generation_config.json")}
    tokenizer = read_tokenizer(files, settings, generation, MODELS[name].languages)
    expected = load_file(folder.parent / "expected")
    source_ids, target_ids = torch.tensor(tokenizer.source_ids), torch.tensor(tokenizer.target_ids)
    with torch.no_grad():
        hidden = translator.model(source_ids.argsort()[expected["source"]], target_ids.argsort()[expected["target"]])
        logits = translator.model.generator(hidden)
    apart = float((logits - expected["logits"][..., target_ids]).abs().max())
    return seconds, apart, sum(each.numel() for each in translator.model.parameters())


if __name__ == "__main__":
    main()
