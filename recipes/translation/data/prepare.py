"""The subword models of a run: made once, and reused as long as text and settings do not change."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from recipes.translation.data.corpora import Corpora
from recipes.translation.data.model_text import check_symbols, tags_of
from recipes.translation.errors import CheckpointError
from recipes.translation.files.atomic_folder import check_replaceable, replaced_folder, verified_folder
from recipes.translation.files.json_fields import noted_in
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.normalization import normalized, with_rules
from recipes.translation.text.subwords import Subwords, normalizations, subword_names, train_subwords

SETTINGS = "settings.json"
SHAPING = ("vocab_size", "joint", "kind", "lowercase")
"""The settings of `subwords` on which the models depend; those of sampling only use them."""


def prepare(corpora: Corpora) -> tuple[Subwords, Subwords]:
    """Train the subword models of source and target into `<run>/subwords/`, or read them from there.

    With `subwords.joint` both are one model, `joint.model`; otherwise `source.model` and `target.model`. Models are
    reused only if they were made from the same text with the same settings, and no byte of them has changed since. The
    folder is replaced as a whole: a process that is killed leaves the old models or the new ones.
    """
    config = corpora.config
    folder = Path(config.run) / "subwords"
    check_replaceable(folder)  # before the work
    settings = made_from(corpora)
    ready = None
    with suppress(CheckpointError):  # whatever is wrong with them, they can be made again
        ready = verified_folder(folder)
    if ready is None or noted_in(ready / SETTINGS) != settings:
        _train(corpora, folder, settings)
        ready = verified_folder(folder)
    else:
        print(f"[prepare] subword models of {folder} reused", flush=True)
    names = subword_names(config)
    models = {name: Subwords.load(ready / f"{name}.model") for name in set(names)}
    return models[names[0]], models[names[1]]


def made_from(corpora: Corpora) -> dict[str, object]:
    """Return everything on which the models depend: the training text, and the subword settings.

    Files are identified by their contents: a file that was written again may have the same name, size and time.
    """
    config = corpora.config
    subwords = {name: getattr(config.subwords, name) for name in (*SHAPING, "train_pairs")}
    # What is not set is left out: the models of earlier versions, without these settings, are reused as they are
    if config.subwords.normalization:
        subwords["normalization"] = list(normalizations(config.subwords))
    cleaning = {name: value for name, value in dataclasses.asdict(config.cleaning).items() if value or name != "markup"}
    return {
        "data": corpora.identity,
        "subwords": {**subwords, "symbols": list(config.subwords.symbols)},
        "cleaning": cleaning,
        "tags": list(tags_of(config)),
    }


def of_other_data(folder: Path, config: RunConfig) -> bool:
    """Return whether there are models in the folder that were made from other data than these settings name."""
    data = noted_in(folder / SETTINGS, "data")
    return data is not None and bool(data != Corpora(config).identity)


def _train(corpora: Corpora, folder: Path, settings: dict[str, object]) -> None:
    start = time.monotonic()
    config = corpora.config
    tags = tags_of(config)
    check_symbols([*tags, *config.subwords.symbols])
    text = corpora.text
    places = drawn(len(text), config.subwords.train_pairs)
    sides = [text.sources[place] for place in places], [text.targets[place] for place in places]
    names = subword_names(config)
    what = f"{config.subwords.vocab_size:,} {config.subwords.kind} subwords"
    rules = normalizations(config.subwords)
    print(f"[prepare] {' and '.join(dict.fromkeys(names))}: {what} from {len(places):,} pairs", flush=True)
    with replaced_folder(folder) as new:
        if config.subwords.joint:
            both = [normalized(sentence, rule) for side, rule in zip(sides, rules, strict=True) for sentence in side]
            train_subwords(both, new / names[0], config.subwords, tags, "none")
            pieces = (new / f"{names[0]}.model").read_bytes()
            for name, rule in zip(names, rules, strict=True):
                (new / f"{name}.model").write_bytes(with_rules(pieces, rule))
        else:
            for name, side, rule in zip(names, sides, rules, strict=True):
                # Only sources have tags
                train_subwords(side, new / name, config.subwords, () if name == "target" else tags, rule)
        (new / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    print(f"[prepare] written to {folder} in {time.monotonic() - start:.1f} s", flush=True)


def drawn(pairs: int, count: int) -> Sequence[int]:
    """Draw `count` of so many pairs, each as likely as any other and the same in every run; all of them for 0.

    It is by reservoir sampling (algorithm R in Vitter 1985, "Random sampling with a reservoir").
    """
    if not 0 < count < pairs:
        return range(pairs)
    draw = random.Random(0).random
    found = list(range(count))
    for number in range(count, pairs):
        place = int(draw() * (number + 1))
        if place < count:
            found[place] = number
    return found
