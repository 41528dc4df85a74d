"""A teacher's translations of training sentences, in text files that are continued where they were interrupted.

<folder>/<name>.source.txt   the sentences, one a line
<folder>/<name>.target.txt   their translations, in blocks of BLOCK lines
<folder>/<name>.json         all that they are made from: written before the first translation
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.translation.data.model_text import tags_of
from recipes.translation.files.json_fields import noted_in
from recipes.translation.files.writing import add_to, adding_to, make_folder, replace_file, writing_to
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.processes.status_line import StatusLine, duration
from recipes.translation.run_folder.made_from import lines_digest
from recipes.translation.run_folder.translator import Translator
from recipes.translation.translating.translate import translate

BLOCK = 1_000
"""Sentences that are translated between two writes: an interruption loses at most these."""


def write_translations(
    teacher: Translator, sources: Sequence[str], folder: Path, name: str, *, tag: str = "", ranks: Ranks = ALONE
) -> tuple[Path, Path]:
    """Translate `sources` by the teacher's own settings of decoding; return the files of sources and translations.

    `tag` is put in front of each sentence that is translated, not in the file. Translations that are there already are
    kept if they are made of the same: these sentences, this teacher and its settings. Otherwise they are replaced.

    Every rank must call it with the same arguments; each translates some of the sentences, and rank 0 writes.
    """
    lines = [" ".join(sentence.splitlines()) for sentence in sources]
    made_from = origin(teacher, lines, tag)
    paths = [folder / f"{name}.{what}" for what in ("source.txt", "target.txt", "json")]
    source, target, _ = paths
    done = ranks.run_on_main(lambda: begun(paths, lines, made_from))
    if done == len(lines):
        print(f"[distil] {target}: {done:,} translations reused", flush=True)
        return source, target
    if done:
        print(f"[distil] {target}: continuing after {done:,} translations", flush=True)
    began = time.monotonic()
    with StatusLine(sys.stdout) as status:
        for first in range(done, len(lines), BLOCK):
            block = [f"{tag} {line}".lstrip() for line in lines[first : first + BLOCK]]
            found = translate(teacher, block, ranks)
            written = "".join(f"{text}\n" for text in found).encode()
            ranks.run_on_main(lambda written=written: add_to(target, written))  # type: ignore[misc]
            finished = first + len(block)
            rate = (finished - done) / max(time.monotonic() - began, 1e-9)
            status.show(
                f"[distil] {finished:,}/{len(lines):,} sentences   {rate:,.1f} sentences/s   "
                f"{duration((len(lines) - finished) / rate)} left"
            )
    taken = duration(time.monotonic() - began)
    print(f"[distil] {target}: {len(lines) - done:,} sentences translated in {taken}", flush=True)
    return source, target


def origin(teacher: Translator, lines: Sequence[str], tag: str) -> dict[str, Any]:
    """Return everything that determines the translations, as JSON."""
    return {
        "sources": lines_digest(lines),
        "tag": tag,
        "tags": list(tags_of(teacher.config)),
        "weights": list(teacher.digests),
        "subwords": [teacher.source.digest, teacher.target.digest],
        "lowercase": teacher.config.subwords.lowercase,
        "decoding": asdict(teacher.config.decoding),
        "longest": teacher.config.training.max_length,
    }


def begun(paths: Sequence[Path], lines: Sequence[str], made_from: dict[str, Any]) -> int:
    """Return how many translations can be kept, after removing what cannot: all lines, or whole blocks of them."""
    source, target, record = paths
    make_folder(source.parent)
    if noted_in(record) != made_from:
        record.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        replace_file(source, "".join(f"{line}\n" for line in lines).encode())
        replace_file(record, (json.dumps(made_from, indent=2) + "\n").encode())
    with writing_to(target), adding_to(target) as file:
        file.seek(0)
        # What follows the last newline is not a whole line
        written = file.read().split(b"\n")[:-1]
        kept = min(len(written), len(lines))
        if kept < len(lines):
            kept -= kept % BLOCK
        file.truncate(sum(len(line) + 1 for line in written[:kept]))
    return kept
