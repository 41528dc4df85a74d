"""What is most often not meant is noticed before a training, which goes on with `--insist`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.mistakes import check_meant
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.settings.schedules import SCHEDULES
from recipes.translation.train import train
from recipes.translation.training.optimizer import learning_rate
from tests.recipes.command_line import refusal
from tests.recipes.tiny import options, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of training and validation, under several names."""
    found = pairs(200, 1)
    for split, some in (("t", found[:150]), ("v", found[150:])):
        for side in ("source", "target"):
            text = "".join(f"{getattr(pair, side)}\n" for pair in some)
            for name in {"source": ("en", "txt", "en.txt"), "target": ("de", "fr", "tgt")}[side]:
                (tmp_path / f"{split}.{name}").write_text(text)
    (tmp_path / "t.link").symlink_to("t.txt")
    rows = "".join(f"{pair.source}\t{pair.target}\n" for pair in found)
    (tmp_path / "a.tsv").write_text(f"en\tde\n{rows}")
    return tmp_path


VALID = ["v.en", "v.de"]
MEANT: list[dict[str, Any]] = [
    {"train": ["t.en", "t.de"], "valid": VALID},
    {"train": ["t.txt", "t.tgt"], "valid": VALID},
    {"train": ["t.en", "t.fr"], "valid": ["v.en", "v.fr"], "target": "fr_FR"},
    {"train": ["t.en", "t.fr"], "valid": ["v.en", "v.fr"], "target": "french"},
    {"train": ["t.de", "t.en"], "valid": ["v.de", "v.en"], "source": "de", "target": "en"},
]
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "one file twice": (
        {"train": ["t.txt", "t.txt"], "valid": VALID},
        "data.train names the same sentences as source and",
    ),
    "a link": ({"train": ["t.txt", "t.link"], "valid": VALID}, "so that a model would learn to copy"),
    "one file to validate": ({"train": ["t.en", "t.de"], "valid": ["v.txt", "v.txt"]}, "data.valid names the same"),
    "training data": ({"train": ["t.en", "t.de"], "valid": ["t.en", "t.de"]}, "data.train and data.valid are the same"),
    "a link to it": (
        {"train": ["t.txt", "t.de"], "valid": ["t.link", "t.tgt"]},
        "would reward memorisation",
    ),
    "the same table": ({"train": "a.tsv", "valid": "a.tsv"}, "data.train and data.valid are the same data"),
    "swapped": ({"train": ["t.de", "t.en"], "valid": VALID}, "t.de as source, but data.source is en, not de: name the"),
    "French": ({"train": ["t.en", "t.fr"], "valid": VALID}, "t.fr as target, but data.target is de, not fr: name the"),
    "German": ({"train": ["t.en.txt", "t.de"], "valid": VALID, "source": "fr"}, "data.source is fr, not en"),
}


def given(folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    return {"data.path": str(folder), **{f"data.{name}": value for name, value in files.items()}}


@pytest.mark.parametrize("files", MEANT)
def test_what_is_meant_is_not_asked_about(files: dict[str, Any], folder: Path) -> None:
    check_meant(Corpora(tiny(folder / "run", given(folder, files))))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_meaning_is_one_line_with_a_way_to_insist(name: str, folder: Path) -> None:
    files, reason = MISTAKES[name]
    with pytest.raises(DataError, match=r"if that is intended, add --insist$") as caught:
        check_meant(Corpora(tiny(folder / "run", given(folder, files))))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_corpus_is_named_and_one_split_of_the_hub_is_the_same(folder: Path) -> None:
    corpora = {"news": {"train": ["t.en", "t.fr"]}}
    with pytest.raises(DataError, match=r"^corpora\.news\.train names .*t\.fr as target"):
        check_meant(Corpora(tiny(folder / "run", {"data.path": str(folder), "corpora": corpora, "data.valid": VALID})))
    hub = {"data.format": "hub", "data.path": "a/b", "data.train": "train", "data.valid": "train"}
    with pytest.raises(DataError, match=r"the same data \(a/b/train and a/b/train\)"):
        check_meant(Corpora(tiny(folder / "run", hub)))


def test_train_asks_before_it_makes_anything_and_goes_on_with_insist(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [word for name in ("train", "valid") for word in (f"--data.{name}", "t.en", "t.de")]
    words = ["train", *options(folder / "run", {"training.steps": 1}), "--data.path", str(folder), *files]
    assert "data.train and data.valid are the same data" in refusal(capsys, *words)
    assert not (folder / "run").exists()
    assert main([*words, "--insist"]) == 0


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.by_steps])
def test_a_resumed_run_does_not_jump_to_another_learning_rate(schedule: str, tmp_path: Path) -> None:
    settings = {"training.schedule": schedule, "training.steps": 4, "training.warmup": 1}
    train(tiny(tmp_path / "run", settings))
    more = tiny(tmp_path / "run", {**settings, "training.steps": 6})
    rate = learning_rate(more.training, 5, 16)
    assert rate > 4e-4
    with pytest.raises(ConfigError) as caught:
        train(more)
    assert str(caught.value) == (
        f"training.steps was 4 and is 6, and training.schedule {schedule} depends on it: the learning rate of step 5 "
        f"would be {rate:.2g}, not 0; keep training.steps, begin another --run with training.start_from, or add "
        "--insist"
    )
    assert train(more, insist=True).state.step == 6
    rates = [
        json.loads(line).get("learning_rate") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(rate for rate in rates if rate) == 2e-3
