"""Compare a student with its teacher: BLEU with intervals, sentences a second, bytes on the disk, and the ratios.

    python -m benchmarks.distilled --teacher RUN --student RUN                 # the test set of the student's data
    python -m benchmarks.distilled --teacher RUN/averaged --student RUN/averaged --split valid --rounds 5

Each model has its own search, that of its settings: the teacher in torch and in CTranslate2 with float32 weights, the
student in CTranslate2 with float32 and int8 weights; `--student-beams` adds wider ones. They take turns on the whole
set, and the fastest turn of each counts, in the processor time of one thread, which other work on the machine does not
change. Loading is not timed. A ratio's interval comes from the same resamples of the sentences for both models.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ctranslate2
import torch

from benchmarks.loss.results import hardware
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.export import ctranslate2_model
from recipes.translation.files.atomic_folder import model_folder, verified_folder
from recipes.translation.run_folder.checkpoint import SavedModel, load_saved, load_translator
from recipes.translation.scores.scores import Measured, interval, measure, resampled_scores
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.pair import Pair
from recipes.translation.translating import ctranslate2_engine
from recipes.translation.translating.translate import translate
from seqpar.markdown_table import markdown_table

TEACHER = "teacher, torch"
HEADER = ("", "beam", "BLEU", "of the teacher's", "sentences/s", "x the teacher's", "MB", "of the teacher's")


class System(NamedTuple):
    """A model in one engine, with its search."""

    translate: Callable[[list[str]], list[str]]
    beam: int
    size: int
    """Bytes on the disk of all that translation needs."""


class Found(NamedTuple):
    """What was measured of a system."""

    system: System
    bleu: Measured
    seconds: float


def main() -> None:
    """Measure a pair of runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="a run (its best model), or a checkpoint folder")
    parser.add_argument("--student", type=Path, required=True, help="the same of the student")
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="of the student's data")
    parser.add_argument("--sentences", type=int, help="the first so many of them (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--student-beams", type=int, nargs="*", default=[], help="further beams of the int8 student")
    options = parser.parse_args()
    torch.set_num_threads(1)
    teacher, student = (load_saved(model_folder(run)) for run in (options.teacher, options.student))
    pairs = load_pairs(student.config.data, options.split, student.config.subwords.lowercase)[: options.sentences]
    with tempfile.TemporaryDirectory() as folder:
        made = systems(teacher, student, Path(folder), options.student_beams)
        found = measured(made, pairs, student, options.rounds)
    print(table(found, len(pairs)))
    print(
        f"\n{date.today()}, {hardware('cpu')}, one thread; torch {torch.__version__}, ctranslate2 "
        f"{ctranslate2.__version__}; {len(pairs):,} sentences ({options.split}); {found[TEACHER].bleu.signature}; "
        "[ ] is a 95 % interval"
    )


def systems(teacher: SavedModel, student: SavedModel, folder: Path, beams: Sequence[int]) -> dict[str, System]:
    """Return the systems by name; what is exported is written to `folder`."""
    in_torch = partial(translate, load_translator(teacher.folder))
    made = {TEACHER: System(in_torch, teacher.config.decoding.beam, bytes_of(teacher.folder))}
    for who, saved, types in (("teacher", teacher, ("float32",)), ("student", student, ("float32", "int8"))):
        for kind in types:
            path = folder / f"{who}-{kind}"
            ctranslate2_model.write(saved, path, kind)
            engine = ctranslate2_engine.load(path)
            searches = [saved.config.decoding]
            if kind == "int8":
                searches += [replace(saved.config.decoding, beam=beam) for beam in beams]
            for search in searches:
                name = f"{who}, CTranslate2, {kind}"
                if search.beam != saved.config.decoding.beam:
                    name += f", beam {search.beam}"
                way = partial(
                    ctranslate2_engine.translate, replace(engine, config=replace(engine.config, decoding=search))
                )
                made[name] = System(way, search.beam, bytes_of(path))
    return made


def bytes_of(folder: Path) -> int:
    """Return the size of a folder's files."""
    return sum(file.stat().st_size for file in verified_folder(folder).iterdir())


def measured(made: dict[str, System], pairs: Sequence[Pair], student: SavedModel, rounds: int) -> dict[str, Found]:
    """Let the systems translate in turn; return the BLEU and the fewest seconds of each."""
    sources = [pair.source for pair in pairs]
    references = [pair.target for pair in pairs]
    seconds: dict[str, float] = {}
    bleus: dict[str, Measured] = {}
    config = student.config
    for system in made.values():
        system.translate(sources[:64])  # memory is taken and code is loaded before the first turn
    for _ in range(rounds):
        for name, system in made.items():
            start = time.process_time()
            translations = system.translate(sources)
            taken = time.process_time() - start
            seconds[name] = min(taken, seconds.get(name, taken))
            if name not in bleus:
                found = measure(
                    translations,
                    references,
                    lowercase=config.subwords.lowercase,
                    tokenize=tokenizer_for(config.data.tokenize, config.data.target, references),
                )
                (bleus[name],) = (one for one in found if one.name == "bleu")
    return {name: Found(system, bleus[name], seconds[name]) for name, system in made.items()}


def table(found: dict[str, Found], sentences: int) -> str:
    """Return the figures of every system beside the teacher's in torch."""
    names = list(found)
    resamples = dict(zip(names, resampled_scores([found[name].bleu for name in names]), strict=True))
    theirs = found[TEACHER]
    if not resamples[TEACHER].all():
        raise SystemExit("the teacher's BLEU is 0 in some resamples, so there is no ratio: take more --sentences")
    rows = []
    for name, (system, bleu, seconds) in found.items():
        ratio = interval(100 * resamples[name] / resamples[TEACHER])
        rows.append(
            [
                name,
                str(system.beam),
                f"{bleu.score:.2f} {interval(resamples[name])}",
                f"{100 * bleu.score / theirs.bleu.score:.1f} % {ratio}",
                f"{sentences / seconds:.1f}",
                f"{theirs.seconds / seconds:.1f}",
                f"{system.size / 1e6:.1f}",
                f"{100 * system.size / theirs.system.size:.0f} %",
            ]
        )
    return markdown_table(HEADER, rows)


if __name__ == "__main__":
    main()
