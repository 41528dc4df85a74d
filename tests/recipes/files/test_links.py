"""A run folder that came from elsewhere cannot reach outside itself: no command writes through a link in it.

The names at which links are planted are those that the commands open, make and rename while they are watched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from recipes.translation.commands import main
from tests.printed_commands import all_finished
from tests.recipes.files.watching import Event, not_on_the_disk, watched
from tests.recipes.tiny import options

pytestmark = pytest.mark.faults

SHORT = {
    "data.builtin_pairs": 120,
    "subwords.vocab_size": 350,
    "model.norm": "post",  # which `import` reads again
    "training.batch_tokens": 400,
    "training.validate_bleu": 2,
}
TWO = {**SHORT, "training.steps": 2, "training.validate_every": 1, "training.keep_checkpoints": 1}
STUDENT = {**SHORT, "training.steps": 1, "training.teacher": "run"}

COMMANDS = {
    "prepare": ["prepare", *options(Path("run"), TWO)],
    "train": ["train", *options(Path("run"), TWO)],
    "resume": ["train", "--run", "run", "--training.steps", "3"],
    "tracked": ["train", "--run", "run", "--training.steps", "4", "--training.trackers", "[tensorboard]"],
    "average": ["average", "--run", "run"],
    "evaluate": ["evaluate", "--run", "run"],
    "translate": ["translate", "--run", "run", "Two trains.", "--alignments", "run/links.txt"],
    "report": ["report", "run"],
    "drawn": ["train", "--run", "run", "--training.steps", "5", "--training.report", "true"],
    "safetensors": ["export", "--run", "run", "--to", "safetensors"],
    "onnx": ["export", "--run", "run", "--to", "onnx"],
    "ctranslate2": ["export", "--run", "run", "--to", "ctranslate2"],
    "hf": ["export", "--run", "run", "--to", "hf"],
    "import": ["import", "run/hf", "--run", "imported"],
    "distil": ["distil", *options(Path("student"), {"data.cache": "student/cache", **STUDENT})],
    "fresh": ["train", "--fresh", *options(Path("run"), TWO)],
}
"""Every command that writes, each in the folder that the ones before it have left."""

SECRET = "secret words"
NAMED = {"run", "imported", "student", "student/cache"}
"""What the user names, who may have linked it."""


class Watched(NamedTuple):
    """A command: the folder as it was before, what it did, and what there was afterwards."""

    before: Path
    events: list[Event]
    after: set[str]

    def names(self) -> dict[str, set[str]]:
        """Return what is done at each name below the folder."""
        root = self.before.with_name("made")
        found: dict[str, set[str]] = {}
        for event in self.events:
            for what, path in ((event.what, event.path), ("to", event.to)):
                if what != "flushed" and path and path != root and path.is_relative_to(root):
                    found.setdefault(str(path.relative_to(root)), set()).add(what)
        return {name: done for name, done in found.items() if name not in NAMED}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Watched]]:
    """What each command did."""
    root = tmp_path_factory.mktemp("links") / "made"
    root.mkdir()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        # A teacher of a few steps ends no translation, and a student is not trained on cut ones
        patch.setattr("recipes.translation.training.student_data.best", all_finished)
        for name, words in COMMANDS.items():
            if name == "resume":
                with Path("run/metrics.jsonl").open("a") as file:
                    file.write('no record\n{"step": 3, "loss": 1.0}\n')
            before = shutil.copytree(root, root.with_name(name))
            with watched() as events:
                assert main(words) == 0, name
            found[name] = Watched(before, events, {str(path.relative_to(root)) for path in root.rglob("*")})
        yield found


def plants(commands: dict[str, Watched]) -> Iterator[tuple[str, str, str]]:
    """Each command, a name at which it does what no command before it did, and where a link leads that is put there."""
    seen = set()
    for command, found in commands.items():
        for name, done in sorted(found.names().items()):
            below = (name.partition("/")[2] or name, *sorted(done))
            # In a folder that is new itself nothing can be planted: what is left of a killed process is removed
            if below in seen or any(is_new(folder) for folder in Path(name).parents):
                continue
            seen.add(below)
            for kind in ("file", "missing") if "opened" in done else ("file", "folder"):
                yield command, name, kind


def is_new(path: Path) -> bool:
    return path.name.endswith(".new") or path.name.startswith(".unfinished-")


def linked(path: Path, kind: str, elsewhere: Path) -> None:
    """Put a link in the place of whatever is at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere / kind)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user's, with a file and an empty folder."""
    (tmp_path / "elsewhere" / "folder").mkdir(parents=True)
    (tmp_path / "elsewhere" / "file").write_text(SECRET)
    return tmp_path / "elsewhere"


def changes_of(elsewhere: Path) -> list[str]:
    """What is no longer as the fixture made it."""
    there = {str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*")} ^ {"file", "folder"}
    if (elsewhere / "file").read_text() != SECRET:
        there.add("file")
    return sorted(there)


def copies_of_the_secret(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_is_refused_in_one_line_or_replaced_and_never_followed(
    command: str,
    commands: dict[str, Watched],
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = []
    for number, (_, name, kind) in enumerate(plant for plant in plants(commands) if plant[0] == command):
        copy = shutil.copytree(commands[command].before, elsewhere.with_name(str(number)))
        monkeypatch.chdir(copy)
        linked(copy / name, kind, elsewhere)
        status = main(COMMANDS[command])
        # Beside notes, such as that translations were cut
        errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
        refused = status == 2 and len(errors) == 1 and errors[0].startswith("error: ") and Path(name).name in errors[0]
        if changes_of(elsewhere) or copies_of_the_secret(copy) or not (status == 0 or refused):
            wrong.append((name, kind, status, errors, changes_of(elsewhere), copies_of_the_secret(copy)))
    assert not wrong


def test_what_a_command_writes_is_on_the_disk_before_it_has_its_name(commands: dict[str, Watched]) -> None:
    assert not [line for found in commands.values() for line in not_on_the_disk(found.events)]


def test_records_are_on_the_disk_before_the_state_that_counts_on_them(commands: dict[str, Watched]) -> None:
    events = commands["train"].events
    saved = [number for number, event in enumerate(events) if event.to and event.to.name == "last"]
    for number, last in enumerate(saved, start=1):  # a thread saves, and the next records may be there before it has
        flushed = [event.path.name for event in events[:last] if event.what == "flushed"]
        for name in ("metrics.jsonl", "resources.jsonl", "samples.jsonl"):
            assert flushed.count(name) >= number
    assert len(saved) == 2


def test_a_teachers_translations_are_on_the_disk_before_the_next_ones_are_made(commands: dict[str, Watched]) -> None:
    done = [event.what for event in commands["distil"].events if event.path.name == "1.target.txt"]
    assert done == ["opened", "opened", "flushed"]


def test_every_file_that_a_command_leaves_was_seen(commands: dict[str, Watched]) -> None:
    """Those that compiled code writes are in folders that are new."""
    for found in commands.values():
        names = found.names().keys() | NAMED
        new = {name for name in found.after if not (found.before / name).exists()}
        unseen = {name for name in new if not names & {name, *map(str, Path(name).parents)} - NAMED} - NAMED
        assert not unseen
