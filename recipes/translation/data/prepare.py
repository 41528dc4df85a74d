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
from recipes.translation.data.training_text import TrainingText
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.files.atomic_folder import check_replaceable, replaced_folder, sha256, verified_folder
from recipes.translation.files.json_fields import field_in
from recipes.translation.settings.config import SubwordConfig
from recipes.translation.settings.paths import expand_path
from recipes.translation.text.model_text import ModelText, check_symbols
from recipes.translation.text.own_model import own_model
from recipes.translation.text.segmentations import BLANK
from recipes.translation.text.sentencepiece_file import normalize, with_rules
from recipes.translation.text.subwords import Subwords, normalizations, subword_names, train_subwords

SETTINGS = "settings.json"
SHAPING = ("vocab_size", "joint", "kind", "lowercase")
"""The settings of `subwords` that the models depend on; those for sampling only use the models."""


def prepare(corpora: Corpora) -> tuple[Subwords, Subwords]:
    """Train the subword models for source and target into `<run>/subwords/`, or read them from there.

    With `subwords.joint` both are one model, `joint.model`; otherwise `source.model` and `target.model`. Models are
    reused only if they were made from the same text with the same settings, and no byte of them has changed since. The
    folder is replaced as a whole: a process that is killed leaves the old models or the new ones.
    """
    config = corpora.config
    folder = Path(config.run) / "subwords"
    check_replaceable(folder)  # before the work
    settings = inputs_of(corpora)
    make = _copy if config.subwords.model else _train
    ready = None
    with suppress(CheckpointError):  # whatever is wrong with the models, they can be made again
        ready = verified_folder(folder)
    if ready is None or field_in(ready / SETTINGS) != settings:
        check_symbols([*ModelText.of(config).tags, *config.subwords.symbols])
        make(corpora, folder, settings)
        ready = verified_folder(folder)
    else:
        print(f"[prepare] subword models of {folder} reused", flush=True)
    names = subword_names(config.subwords)
    models = {name: Subwords.load(ready / f"{name}.model") for name in set(names)}
    for name, model in models.items():
        if not config.subwords.model and len(model) < config.subwords.vocab_size:
            print(
                f"[prepare] {name}: {len(model):,} subwords, fewer than subwords.vocab_size "
                f"{config.subwords.vocab_size:,}: the text yields no more",
                flush=True,
            )
    return models[names[0]], models[names[1]]


LATER = ("markup", "metric_command", "metric_least")
"""The cleaning rules that models made by earlier versions do not name."""


def inputs_of(corpora: Corpora) -> dict[str, object]:
    """Return everything that the models depend on: the training text, and the subword settings.

    Files are identified by their contents: a rewritten file may have the same name, size and time.
    """
    config = corpora.config
    subwords = {name: getattr(config.subwords, name) for name in (*SHAPING, "train_pairs")}
    # Settings at their defaults are left out, so that models made by earlier versions without them can be reused
    if config.subwords.normalization:
        subwords["normalization"] = list(normalizations(config.subwords))
    for name in ("character_coverage", "byte_fallback"):
        if getattr(config.subwords, name) != getattr(SubwordConfig, name):
            subwords[name] = getattr(config.subwords, name)
    if config.subwords.model:
        try:
            subwords["model"] = [sha256(path) for path in own_files(config.subwords)]
        except DataError:  # the run has copies, and no longer needs the files
            subwords["model"] = field_in(Path(config.run) / "subwords" / SETTINGS, "subwords", "model")
    cleaning = {
        name: value for name, value in dataclasses.asdict(config.cleaning).items() if value or name not in LATER
    }
    return {
        "data": corpora.identity,
        "subwords": {**subwords, "symbols": list(config.subwords.symbols)},
        "cleaning": cleaning,
        "tags": list(ModelText.of(config).tags),
    }


def own_files(subwords: SubwordConfig) -> list[Path]:
    """Return the files of `subwords.model`."""
    paths = [Path(expand_path(name, "subwords.model")) for name in subwords.model]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise DataError(f"there is no file {missing}; see subwords.model")
    return paths


def _copy(corpora: Corpora, folder: Path, settings: dict[str, object]) -> None:
    """Copy the user's own subword models."""
    config = corpora.config
    sides = dict(zip(subword_names(config.subwords), normalizations(config.subwords), strict=True))
    files = own_files(config.subwords)
    # One file for both sides, also if their rules differ
    files = files if len(files) == len(sides) else files * len(sides)
    with replaced_folder(folder) as new:
        for (name, rule), path in zip(sides.items(), files, strict=True):
            tags = () if name == "target" else ModelText.of(config).tags
            added = [*(BLANK + tag for tag in tags), *config.subwords.symbols]
            (new / f"{name}.model").write_bytes(own_model(path, config.subwords.kind, rule, added))
            model = Subwords.load(new / f"{name}.model")
            given = config.subwords.vocab_size
            if given not in (SubwordConfig.vocab_size, len(model)):
                raise ConfigError(
                    f"subwords.vocab_size is {given:,}, but {path} has {len(model):,} subwords, with the special ones "
                    "and the tags and symbols of the settings: leave it out"
                )
            print(f"[prepare] {name}: {len(model):,} {model.kind} subwords of {path}", flush=True)
        (new / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def of_other_data(folder: Path, corpora: Corpora) -> bool:
    """Return whether the folder has models that were made from data other than these settings name."""
    data = field_in(folder / SETTINGS, "data")
    return data is not None and bool(data != corpora.identity)


def _train(corpora: Corpora, folder: Path, settings: dict[str, object]) -> None:
    start = time.monotonic()
    config = corpora.config
    tags = ModelText.of(config).tags
    text = corpora.text
    places = draw_indices(len(text), train_pairs(text, config.subwords.train_pairs))
    sides = [text.sources[place] for place in places], [text.targets[place] for place in places]
    names = subword_names(config.subwords)
    what = f"{config.subwords.vocab_size:,} {config.subwords.kind} subwords"
    rules = normalizations(config.subwords)
    print(
        f"[prepare] {' and '.join(dict.fromkeys(names))}: {what} from {len(places):,} of {len(text):,} pairs",
        flush=True,
    )
    with replaced_folder(folder) as new:
        if config.subwords.joint:
            both = [normalize(sentence, rule) for side, rule in zip(sides, rules, strict=True) for sentence in side]
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


def train_pairs(text: TrainingText, given: int | None) -> int:
    """Return how many pairs the subwords are made from: as many as are asked for, or as make up TRAIN_BYTES."""
    if given is not None:
        return given
    size = len(text.sources.values) + len(text.targets.values)
    return max(1, len(text) * TRAIN_BYTES // max(size, 1))


TRAIN_BYTES = 10_000_000


def draw_indices(pairs: int, count: int) -> Sequence[int]:
    """Draw `count` of `pairs` indices, all equally likely and the same in every run; return all of them for 0.

    This is reservoir sampling (algorithm R in Vitter 1985, "Random sampling with a reservoir").
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
