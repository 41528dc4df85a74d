"""Every setting does something: each is changed alone, and a tiny run differs where the setting says it does.

The settings are those of the dataclasses, so one that is added without an entry here fails. An entry names the parts
of a run's outcome that the change must move, and those that its documentation says it leaves alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from models.transformer import Layer
from recipes.translation.data.builtin_corpus import pairs as builtin_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder import saving
from recipes.translation.run_folder.checkpoint import load_facts, load_translator
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.scores.evaluate import evaluate
from recipes.translation.settings.config import RunConfig, SubwordConfig
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.text.subwords import EOS, train_subwords
from recipes.translation.train import train
from tests.recipes.saved import model_in, saved_file
from tests.recipes.tiny import tiny

BASE: dict[str, Any] = {"data.builtin_pairs": 120, "subwords.vocab_size": 360, "training.batch_tokens": 400}
FILES: dict[str, Any] = {
    "data.format": "tsv",
    "data.path": "one",
    "data.train": ("train.tsv",),
    "data.valid": ("valid.tsv",),
    "data.test": ("test.tsv",),
}
DIRTY: dict[str, Any] = {**FILES, "data.train": ("dirty.tsv",)}
METRIC = "sed s/.*/30/;2s/.*/1/"
"""A metric with which every pair is well translated, but the second one."""
TWO: dict[str, Any] = {"a": {}, "b": {"format": "tsv", "path": "one", "train": ["small.tsv"]}}
PLATEAU: dict[str, Any] = {
    "training.schedule": "plateau",
    "training.learning_rate": 5.0,
    "training.warmup": 0,
    "training.validate_every": 1,
    "training.steps": 6,
}
KEPT = ("weights", "subwords")
NUMBERS = ("weights", "metrics", "translations")
ENDED = "translations that could end anywhere"
LOGITS = "logits at once"
EVALUATED = frozenset({"translations", "scores", "sentences at once", ENDED})
TAKE_TIME = EVALUATED | {LOGITS}
"""What is looked at only where a change says what becomes of it: evaluations, and a look at every operation."""


@dataclass(frozen=True)
class Change:
    """Another value of a setting, and what of a run's outcome it moves and keeps."""

    value: Any
    moves: tuple[str, ...] = ("weights",)
    keeps: tuple[str, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What both runs have changed, so that the setting matters."""
    refused: str = ""
    """What the one line says, where the value cannot be had alone."""


CHANGES: dict[str, Sequence[Change]] = {
    "run": [Change("another", ("folder",), NUMBERS)],
    "data.format": [Change("text", refused="data.train takes two files")],
    "data.path": [Change("other", ("weights", "metrics", "subwords"), beside=FILES)],
    "data.train": [Change(("more.tsv",), ("weights", "subwords"), beside=FILES)],
    "data.valid": [Change(("test.tsv",), ("metrics",), ("weights", "subwords", "translations"), beside=FILES)],
    "data.test": [Change(("valid.tsv",), ("translations",), ("weights", "metrics", "subwords"), beside=FILES)],
    "data.tokenize": [Change("char", ("scores",), ("weights", "subwords", "translations"))],
    "data.source": [Change("xx", ("weights", "subwords"), beside=FILES)],
    "data.target": [Change("xx", ("weights", "subwords", "scores"), beside=FILES)],
    "data.builtin_pairs": [Change(150, ("weights", "subwords"))],
    "data.cache": [Change("cache", ("said",), (*NUMBERS, "subwords", "batches"))],
    "data.language_tags": [Change(True, ("weights", "subwords"))],
    "data.temperature": [
        Change(5.0, ("weights",), ("subwords",), beside={"corpora": TWO}),
        Change(5.0, refused="data.temperature is 5, but there is one corpus"),
    ],
    "corpora": [
        Change(TWO, ("weights", "subwords")),
        Change({**TWO, "b": {**TWO["b"], "weight": 3}}, ("weights",), ("subwords",), beside={"corpora": TWO}),
        Change({**TWO, "b": {**TWO["b"], "tag": "<bt>"}}, ("weights", "subwords"), beside={"corpora": TWO}),
        Change({**TWO, "b": {**TWO["b"], "valid": ["valid.tsv"]}}, ("metrics",), KEPT, beside={"corpora": TWO}),
        Change({**TWO, "b": {**TWO["b"], "test": ["test.tsv"]}}, ("scores",), KEPT, beside={"corpora": TWO}),
    ],
    "cleaning.max_words": [Change(60, beside=DIRTY)],
    "cleaning.max_characters": [Change(300, beside=DIRTY)],
    "cleaning.max_ratio": [Change(9.0, beside=DIRTY)],
    "cleaning.script": [Change(True, beside=DIRTY)],
    "cleaning.encoding": [Change(True, beside=DIRTY)],
    "cleaning.markup": [Change(True, beside=DIRTY)],
    "cleaning.copies": [Change(True, beside=DIRTY)],
    "cleaning.duplicates": [Change(True, beside=DIRTY)],
    "cleaning.metric_command": [
        Change(METRIC, beside={**DIRTY, "cleaning.metric_command": "sed s/.*/30/", "cleaning.metric_least": 20.0}),
        Change(METRIC, refused="cleaning.metric_command is set, but cleaning.metric_least is not"),
        Change("no-such-metric", beside={"cleaning.metric_least": 20.0}, refused="there is no program no-such-metric"),
    ],
    "cleaning.metric_least": [
        Change(20.0, beside={**DIRTY, "cleaning.metric_command": METRIC, "cleaning.metric_least": 0.0}),
        Change(20.0, refused="cleaning.metric_least is 20, but cleaning.metric_command names no program"),
    ],
    "subwords.vocab_size": [Change(340, ("weights", "subwords"))],
    "subwords.train_pairs": [Change(100, ("weights", "subwords"))],
    "subwords.symbols": [Change(("<url>",), ("weights", "subwords"))],
    "subwords.joint": [Change(False, ("weights", "subwords"), beside={"model.tie": "target"})],
    "subwords.kind": [
        *(Change(kind, ("weights", "subwords")) for kind in ("bpe", "char", "none")),
        Change("char", beside={"subwords.sampling": 0.1}, refused="of kind char, which divides a text in only one way"),
    ],
    "subwords.model": [
        Change(("own.model",), ("weights", "subwords")),
        Change(("own.model", "own.model"), refused="subwords.model names 2 files"),
        Change(("nothing.model",), refused="there is no file"),
    ],
    "subwords.character_coverage": [Change(0.98, ("subwords",))],
    "subwords.byte_fallback": [Change(False, ("weights", "subwords"))],
    "subwords.lowercase": [Change(True, ("weights", "subwords", "scores"))],
    "subwords.sampling": [
        Change(0.3, ("weights", "metrics"), ("subwords",)),
        Change(0.1, ("weights", "metrics"), ("subwords",), beside={"subwords.kind": "bpe"}),
    ],
    "subwords.normalization": [
        Change("nfkc", ("subwords",)),
        Change(("nfkc", "none"), ("subwords",)),
        Change("nfc", keeps=("weights", "subwords", "metrics"), moves=()),
    ],
    "subwords.sampled": [
        Change(value, ("weights", "metrics"), ("subwords",), beside={"subwords.sampling": 0.3})
        for value in ("source", "target")
    ]
    + [Change("source", refused="subwords.sampled is source, but subwords.sampling is 0, which turns sampling off")],
    "model.preset": [Change("base")],
    "model.d_model": [Change(18)],
    "model.d_ff": [Change(20)],
    "model.heads": [Change(4)],
    "model.encoder_layers": [Change(2)],
    "model.decoder_layers": [Change(2)],
    "model.dropout": [Change(0.5), Change(0.0)],
    "model.norm": [Change("post")],
    "model.tie": [Change("target"), Change("none")],
    "model.activation": [Change("gelu"), Change("swish")],
    "model.max_positions": [
        Change(500, refused="model: max_positions is 500, but the positions of vaswani are computed"),
        Change(500, ("weights",), beside={"model.preset": "mbart"}),
        Change(
            9,
            beside={"model.preset": "mbart"},
            refused="training.max_length is 256, but the model has learned positions for 8",
        ),
    ],
    "training.devices": [Change(("cpu", "cpu"), ("said",))],
    "training.chunk_tokens": [Change(7, (LOGITS,), ("batches",)), Change(8, (LOGITS,))],
    "training.batch_tokens": [Change(300, ("weights", "batches"))],
    "training.accumulate": [Change(2, ("weights", "batches"))],
    "training.steps": [Change(3, ("weights", "metrics"))],
    "training.epochs": [
        Change(1, ("weights", "metrics", "said"), beside={"training.steps": 40}),
        Change(50, ("said",), (*NUMBERS, "subwords", "batches")),
    ],
    "training.schedule": [Change(name) for name in SCHEDULES if name != "inverse_sqrt"],
    "training.plateau_patience": [
        Change(1, ("metrics",), beside=PLATEAU),
        Change(1, refused="training.schedule is inverse_sqrt, which ignores validations"),
        Change(
            4,
            beside={**PLATEAU, "training.patience": 4},
            refused="the run would end before its learning rate is reduced",
        ),
    ],
    "training.plateau_factor": [
        Change(0.1, ("metrics",), beside={**PLATEAU, "training.plateau_patience": 1}),
        Change(0.1, refused="training.schedule is inverse_sqrt, which ignores validations"),
    ],
    "training.learning_rate": [Change(3e-3)],
    "training.warmup": [Change(3)],
    "training.betas": [Change((0.5, 0.98)), Change((0.9, 0.7))],
    "training.adam_eps": [Change(1e-3)],
    "training.weight_decay": [Change(0.1)],
    "training.clip": [Change(0.01), Change(0.0, beside={"training.clip": 0.01})],
    "training.label_smoothing": [Change(0.0), Change(0.3)],
    "training.smoothing_convention": [Change("fairseq"), Change("harvard", ("weights", "metrics"))],
    "training.teacher": [Change("start", ("weights", "metrics", "said"), ("batches", "subwords"))],
    "training.teacher_weight": [
        Change(0.3, ("weights", "metrics"), ("batches",), beside={"training.teacher": "start"}),
        Change(0.0, ("weights", "metrics"), ("batches",), beside={"training.teacher": "start"}),
        Change(0.5, refused="training.teacher names no model to learn from"),
    ],
    "training.teacher_temperature": [
        Change(2.0, ("weights", "metrics"), ("batches",), beside={"training.teacher": "start"}),
        Change(2.0, refused="training.teacher names no model to learn from"),
    ],
    "training.precision": [Change("bf16"), Change("fp16"), Change("float64")],
    "training.compile": [Change(True, ("weights", "said"), ("batches", "subwords"))],
    "training.max_length": [Change(20, ("weights", "said"))],
    "training.validate_every": [Change(2, ("metrics",), ("last weights",))],
    "training.validate_bleu": [Change(3, ("metrics",), ("weights", "translations"))],
    "training.save_every": [
        Change("1", ("saved",), (*NUMBERS, "subwords")),
        Change("often", refused="training.save_every is 'often': it is a number of steps, such as 500, or of minutes"),
    ],
    "training.keep_checkpoints": [
        Change(2, ("kept",), (*NUMBERS, "subwords"), beside={"training.validate_every": 1}),
        Change(1, ("kept",), (*NUMBERS, "subwords")),
    ],
    "training.patience": [Change(1, ("metrics",), beside={"training.learning_rate": 0, "training.validate_every": 1})],
    "training.best_by": [
        Change(
            "chrf",
            ("best",),
            ("last weights", "metrics"),
            beside={"training.validate_every": 1, "training.validate_bleu": 8, "training.seed": 3},
        )
    ],
    "training.report": [Change(True, ("report",), (*NUMBERS, "subwords", "batches"))],
    "training.trackers": [Change(("tensorboard",), ("tracked",), (*NUMBERS, "subwords", "batches"))],
    "training.ema": [Change(0.5, ("weights", "metrics"), ("batches",))],
    "training.start_from": [Change("start", ("weights", "metrics"), ("batches",))],
    "training.freeze": [
        Change(("encoder",)),
        Change(("target_embedding", "source_embedding", "generator")),
    ],
    "training.lora_rank": [
        Change(4, ("weights", "metrics", "said"), ("batches", "subwords"), beside={"training.start_from": "start"}),
        Change(4, refused="training.start_from names no model"),
    ],
    "training.lora_alpha": [
        Change(
            3.0, ("weights", "metrics"), ("batches",), beside={"training.start_from": "start", "training.lora_rank": 4}
        ),
        Change(3.0, refused="training.lora_rank is 0"),
    ],
    "training.seed": [Change(2, ("weights", "batches"))],
    "training.threads": [Change(3, ("threads",), ("batches",))],
    "layout.data": [Change(2, refused="layout data 2 x shard 1 x vocab 1 needs 2 processes, but 1")],
    "layout.shard": [Change(2, refused="layout data 1 x shard 2 x vocab 1 needs 2 processes, but 1")],
    "layout.vocab": [Change(2, refused="layout data 1 x shard 1 x vocab 2 needs 2 processes, but 1")],
    "layout.timeout": [Change(77.0, ("waits",), NUMBERS)],
    "decoding.beam": [
        Change(
            4,
            ("translations",),
            ("weights", "metrics"),  # with the validations' BLEU and chrF, which are greedy
            beside={"model.norm": "post", "training.validate_bleu": 8},
        )
    ],
    "decoding.length_penalty": [Change(9.0, (ENDED,), ("weights", "metrics"), beside={"decoding.beam": 4})],
    "decoding.length_norm": [
        Change(
            "length",
            (ENDED,),
            ("weights", "metrics"),
            beside={"decoding.beam": 4, "decoding.length_penalty": 3.0},
        )
    ],
    "decoding.batch_sentences": [Change(2, ("sentences at once",), NUMBERS)],
    "decoding.max_length": [Change(3, ("translations",), ("weights", "metrics"))],
    "decoding.max_ratio": [
        Change(0.1, ("translations",), ("weights", "metrics"), beside={"decoding.max_length": 40}),
        Change(
            0.1,
            ("metrics",),
            ("weights",),
            beside={"decoding.max_length": 40, "decoding.no_repeat_ngram": 1, "training.validate_bleu": 8},
        ),
    ],
    "decoding.min_length": [Change(7, (ENDED,), ("weights",))],
    "decoding.no_repeat_ngram": [
        Change(1, ("translations", "metrics"), ("weights",), beside={"training.validate_bleu": 8})
    ],
}
CASES = [(name, change) for name, changes in CHANGES.items() for change in changes]


def names_of(root: type[Any]) -> list[str]:
    """Every setting by its dotted name, from the dataclasses themselves."""
    names = []
    for each in dataclasses.fields(root):
        inner = each.default_factory if each.default_factory is not dataclasses.MISSING else None
        names += [f"{each.name}.{name}" for name in names_of(inner)] if dataclasses.is_dataclass(inner) else [each.name]
    return names


def test_every_setting_of_the_configuration_has_an_entry() -> None:
    assert sorted(CHANGES) == sorted(names_of(RunConfig)), "say in CHANGES what the new setting moves"


Outcome = dict[str, Any]


class Runs:
    """Tiny runs, each made once, in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: dict[str, Outcome] = {}
        self.folders = itertools.count()

    def outcome(self, changes: Mapping[str, Any], also: Set[str] = frozenset()) -> Outcome:
        """Everything that can be seen of a run with these settings; of what takes time, `also`."""
        key = repr((sorted(changes.items()), sorted(also)))
        if key not in self.done:
            self.done[key] = self.run(changes, also)
        return self.done[key]

    def config(self, changes: Mapping[str, Any]) -> RunConfig:
        folder = self.root / "runs" / str(next(self.folders)) / str(changes.get("run", "run"))
        given = {**BASE, **{name: value for name, value in changes.items() if name != "run"}}
        if "data.path" in given:
            given["data.path"] = str(self.root / given["data.path"])
        if "data.cache" in given:
            given["data.cache"] = str(self.root / given["data.cache"])
        if "subwords.model" in given:
            given["subwords.model"] = [str(self.root / name) for name in given["subwords.model"]]
        if "corpora" in given:
            second = given["corpora"]["b"]
            given["corpora"] = {**given["corpora"], "b": {**second, "path": str(self.root / second["path"])}}
        for name in ("training.start_from", "training.teacher"):
            if name in given:
                given[name] = str(self.root / given[name])
        return tiny(folder, given)

    def run(self, changes: Mapping[str, Any], also: Set[str] = frozenset()) -> Outcome:
        config = self.config(changes)
        seen: Outcome = {"folder": Path(config.run).name}
        with observed(seen, also):
            train(config)
            run = Path(config.run)
            if also & EVALUATED:
                translator = load_translator(run / "best")
                with largest_input(translator.model.tgt_embed, seen):
                    found = evaluate(translator, "test")
                seen |= {"translations": list(found.translations), "scores": found.scores}
            if ENDED in also:
                with torch.no_grad():
                    translator.model.generator.bias[EOS] += 3.0  # one that has learned as little never ends by itself
                seen[ENDED] = list(evaluate(translator, "test").translations)
        records = read_metrics(run / "metrics.jsonl")
        return seen | {
            "weights": [digest(saved_file(run, name, "model.safetensors")) for name in ("last", "best")],
            "last weights": digest(saved_file(run, "last", "model.safetensors")),
            "best": load_facts(run / "best")["step"],
            "kept": {folder.name: digest(folder / "model.safetensors") for folder in kept_models(run)},
            "metrics": records,
            "report": (run / "report.html").exists(),
            "tracked": (run / "tensorboard").exists(),
            "batches": [record["tokens"] for record in records if "tokens" in record],
            "subwords": [digest(path) for path in sorted(model_in(run, "last").glob("*.model"))],
        }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class LargestLogits(TorchFunctionMode):
    """Note the most rows of vocabulary-wide numbers that ever exist in one tensor, other than the weights' own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 2 and result.size(1) == BASE["subwords.vocab_size"]:
            self.rows = max(self.rows, result.size(0))
        return result


@contextlib.contextmanager
def observed(seen: Outcome, also: Set[str]) -> Iterator[None]:
    """What a run prints, the threads it leaves, its logits, and how long its groups wait."""
    before, said, made, logits = torch.get_num_threads(), io.StringIO(), [], LargestLogits()
    new_group = dist.new_group
    saves: list[str] = []
    write_state = saving.write_state

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(new_group(*args, **kwargs))
        return made[-1]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.ExitStack() as looks:
            if LOGITS in also:
                looks.enter_context(logits)
            patch.setattr(dist, "new_group", noted)
            patch.setattr(saving, "write_state", lambda *given: (saves.append(given[0].name), write_state(*given)))
            yield
        seen["threads"] = torch.get_num_threads()
        seen["waits"] = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made]
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(before)
    seen["saved"] = saves
    seen[LOGITS] = logits.rows
    seen["said"] = re.sub(r"\S*/runs/\S+|[\d.,:]+ s\b|in \d+:\d+|[\d,]+ (target )?tokens/s", "", said.getvalue())


@contextlib.contextmanager
def largest_input(module: nn.Module, seen: Outcome) -> Iterator[None]:
    """The most rows that the module is given at once."""
    rows = [0]
    hook = module.register_forward_pre_hook(lambda _, args: rows.append(args[0].size(0)))
    yield
    hook.remove()
    seen["sentences at once"] = max(rows)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs, two small corpora of three languages, the third one the first spelt backwards, and one with defects."""
    root = tmp_path_factory.mktemp("settings")
    for seed, folder in enumerate(("one", "other")):
        (root / folder).mkdir()
        for name, count, split in (
            ("train", 120, "train"), ("more", 130, "train"), ("small", 30, "train"),
            ("valid", 8, "valid"), ("test", 8, "test"),
        ):  # fmt: skip
            lines = [f"{en}\t{de}\t{en[::-1]}" for en, de in builtin_pairs(count, 5 + seed, split)]
            (root / folder / f"{name}.tsv").write_text("\n".join(["en\tde\txx", *lines]) + "\n", encoding="utf-8")
    ten = "one two three four five six seven eight nine ten "
    defects = [
        "no\tnein",
        "no\tnein",
        "a copy\ta copy",
        "see https://a.org/b.\tsiehe https://a.org/b.",
        "ü\tÃ¼",
        "yes\tжд",
        "<P> yes\tja",
        f"yes\t{ten}",
        f"{ten * 7}\t{ten * 7}is seventy",
    ]
    clean = [f"{en}\t{de}" for en, de in builtin_pairs(100, 7)]
    (root / "one" / "dirty.tsv").write_text("\n".join(["en\tde", *clean, *defects]) + "\n", encoding="utf-8")
    train_subwords((en for en, _ in builtin_pairs(300, 8)), root / "own", SubwordConfig(vocab_size=360, kind="bpe"))
    train(tiny(root / "start", {**BASE, "training.seed": 9}))
    return Runs(root)


@pytest.fixture(scope="module", autouse=True)
def graphs() -> Iterator[None]:
    """Compile layers to graphs of torch's own kernels, which is done sooner; test_compilation has generated ones."""
    forward = torch.compile(Layer.forward, dynamic=True, backend="eager")
    with patch("models.compiled._compiled_forward", lambda: forward):
        yield


def test_a_run_that_is_repeated_has_the_same_outcome(runs: Runs) -> None:
    once, again = runs.outcome({}, TAKE_TIME), runs.run({}, TAKE_TIME)
    assert {aspect for aspect in once if once[aspect] != again[aspect]} == set()


@pytest.mark.parametrize(("name", "change"), CASES, ids=[f"{name}={change.value}" for name, change in CASES])
def test_a_setting_changes_what_it_says_and_keeps_the_rest(name: str, change: Change, runs: Runs) -> None:
    changes = {**change.beside, name: change.value}
    if change.refused:
        with pytest.raises((ConfigError, DataError)) as caught:
            runs.run(changes)
        assert change.refused in str(caught.value)
        return
    also = TAKE_TIME & {*change.moves, *change.keeps}
    if also & EVALUATED:
        also |= EVALUATED - {ENDED}  # one evaluation shows them all
    before, after = runs.outcome(change.beside, also), runs.outcome(changes, also)
    moved = {aspect for aspect in before if before[aspect] != after[aspect]}
    assert set(change.moves) <= moved, f"{name} leaves {set(change.moves) - moved} as they were"
    assert not set(change.keeps) & moved, f"{name} moves {set(change.keeps) & moved}"
