"""The command `distil`: a teacher's translations as training data, and a student that has learnt from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.commands import main
from recipes.translation.commands.training import STUDENT
from recipes.translation.data.builtin_corpus import pairs as builtin_pairs
from recipes.translation.data.corpora import Corpora, HeldOutSplit
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.distil import distil
from recipes.translation.errors import ConfigError
from recipes.translation.files.lines import read_lines
from recipes.translation.processes.ranks import join_ranks
from recipes.translation.run_folder.checkpoint import load_facts, load_translator, save_model
from recipes.translation.run_folder.other_model import load_teacher
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import CorpusConfig, RunConfig, load_config, moved_to, save_config
from recipes.translation.text.model_text import ModelText
from recipes.translation.text.subwords import EOS
from recipes.translation.train import train
from recipes.translation.training import student_data
from recipes.translation.training.student_data import sentences_of, student_of, write_translations
from recipes.translation.translating.translate import Translation, best
from seqpar.testing.ranks import ranks
from tests.recipes.importing.tuned import files
from tests.recipes.random_translator import random_translator
from tests.recipes.run_folder.made import contents
from tests.recipes.saved import model_in, saved_file
from tests.recipes.tiny import tiny

SENTENCES = [pair.source for pair in builtin_pairs(23, 4)]
SPLITS: tuple[HeldOutSplit, ...] = ("valid", "test")
SMALL = ["--model.d_model", "16", "--model.d_ff", "16", "--model.heads", "2"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_data, "BLOCK", 5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    return random_translator(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained teacher."""
    folder = tmp_path_factory.mktemp("run") / "teacher"
    changes = {
        "data.builtin_pairs": 40,
        "training.steps": 12,
        "training.learning_rate": 0.01,
        "model.d_model": 24,
        "decoding.beam": 2,
        "decoding.min_length": 4,
    }
    train(tiny(folder, {**changes, "training.freeze": ("encoder",)}))
    translator = load_translator(folder / "best")
    with torch.no_grad():
        translator.model.generator.bias[EOS] += 3.0  # a model that has learned as little never ends by itself
    save_model(model_in(folder, "best"), translator, load_facts(folder / "best"))
    return folder


def finished(translator: Translator, sentences: list[str]) -> list[str]:
    """The translations, and nothing in place of those that are cut."""
    return [one.text if one.finished else "" for one in best(translator, sentences)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sentences that are translated from now on."""
    seen: list[str] = []

    def noted(translator: Translator, sentences: list[str], *more: Any) -> list[Translation]:
        seen.extend(sentences)
        return best(translator, sentences, *more)

    monkeypatch.setattr(student_data, "best", noted)
    return seen


def test_the_files_have_the_sentences_and_the_teachers_translations_line_by_line(
    teacher: Translator, tmp_path: Path
) -> None:
    broken = [*SENTENCES, "one\u2028line", "", "two\nlines"]
    source, target = write_translations(teacher, broken, tmp_path, "1")
    assert read_lines(source) == [*SENTENCES, "one line", "", "two lines"]
    assert read_lines(target) == finished(teacher, read_lines(source))
    assert read_lines(target)[-2] == ""
    assert len(set(read_lines(target))) > 5


@pytest.mark.parametrize(
    ("whole_lines", "left", "kept"),
    [(10, b"", 10), (10, b"a part of a line", 10), (10, b"a whole line\nand a part", 10), (9, b"a part of a line", 5)],
)
def test_an_interrupted_translation_goes_on_after_its_last_whole_block(
    whole_lines: int, left: bytes, kept: int, teacher: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = write_translations(teacher, SENTENCES, tmp_path, "1")
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:whole_lines]) + left)
    seen = counted(monkeypatch)
    write_translations(teacher, SENTENCES, tmp_path, "1")
    assert seen == SENTENCES[kept:]
    assert target.read_bytes() == whole


def test_translations_are_reused_only_where_they_are_made_of_the_same(
    teacher: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_translations(teacher, SENTENCES, tmp_path, "1")
    seen = counted(monkeypatch)
    write_translations(teacher, SENTENCES, tmp_path, "1")
    assert seen == []
    assert f"[distil] {tmp_path / '1.target.txt'}: 23 translations reused" in capsys.readouterr().out
    other = random_translator(tmp_path / "other", seed=2)
    wider = replace(other, config=tiny(tmp_path / "wider", {"decoding.beam": 2}))
    for translator, sentences, tag in (
        (other, SENTENCES, ""),
        (wider, SENTENCES, ""),
        (wider, SENTENCES[1:], ""),
        (wider, SENTENCES[1:], "<2de>"),
    ):
        seen.clear()
        write_translations(translator, sentences, tmp_path, "1", tag=tag)
        assert seen == [f"{tag} {sentence}".strip() for sentence in sentences]
        assert read_lines(tmp_path / "1.source.txt") == sentences
    (tmp_path / "1.json").write_text("not JSON")
    seen.clear()
    write_translations(wider, SENTENCES, tmp_path, "1")
    assert seen == SENTENCES


def test_one_command_makes_a_student_with_the_teachers_subwords_data_and_translations(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = tmp_path / "student"
    words = ["distil", "--teacher", str(run), "--run", str(student), *SMALL]
    assert main([*words, "--training.steps", "1"]) == 0
    told = capsys.readouterr().out
    made = load_translator(student / "best")
    taught = load_translator(run / "best")
    config = made.config
    assert made.source.model_bytes() == taught.source.model_bytes()
    assert (config.model.preset, len(made.model.encoder.layers), len(made.model.decoder.layers)) == ("student", 6, 1)
    assert (config.training.teacher, config.training.freeze) == (str(run), ())
    assert (config.decoding.beam, config.training.warmup) == (1, 2)
    (corpus,) = Corpora(config).training
    pairs = load_pairs(corpus.data, "train")
    sources = [pair.source for pair in load_pairs(taught.config.data, "train")]
    kept = [pair for pair in zip(sources, finished(taught, sources), strict=True) if pair[1]]
    assert list(map(tuple, pairs)) == kept
    assert f"{40 - len(kept)} of 40 translations are unfinished" in told or len(kept) == 40
    for name in ("evaluate", "export", "translate"):
        assert f"-m recipes.translation {name} --run {student}" in told
    # The same command goes on with the student; with --fresh the translations are kept
    assert main(["distil", "--run", str(student), "--training.steps", "2"]) == 0
    assert "[train] resuming from step 1" in capsys.readouterr().out
    assert main([*words, "--training.steps", "1", "--fresh"]) == 0
    assert "40 translations reused" in capsys.readouterr().out


def test_the_same_command_with_its_data_goes_on_with_the_student_and_other_data_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [("Two trains leave.", "Zwei Züge fahren ab."), ("The number is six.", "Die Zahl ist sechs.")] * 4
    text = files(tmp_path, pairs)
    student = str(tmp_path / "student")
    (tmp_path / "held").mkdir()
    held = files(tmp_path / "held", pairs[:2])
    data = ["--data.format", "text", "--data.train", *text, "--data.valid", *held]
    words = ["distil", "--teacher", str(run), "--run", student, *SMALL, *data]
    assert main([*words, "--training.steps", "1"]) == 0
    assert main([*words, "--training.steps", "2"]) == 0
    assert "[train] resuming from step 1" in capsys.readouterr().out
    assert main(["distil", "--run", student, *data, "--training.steps", "3"]) == 0
    assert "[train] resuming from step 2" in capsys.readouterr().out
    translations = (tmp_path / "student" / "translations" / "1.target.txt").read_bytes()
    files(tmp_path, [*pairs, ("One train leaves.", "Ein Zug fährt ab.")])
    assert main([*words, "--training.steps", "4"]) == 2
    told = capsys.readouterr().err
    assert f"training data differ from {student}/translations/1.source.txt, which {student} was trained on" in told
    assert "()" not in told
    assert (tmp_path / "student" / "translations" / "1.target.txt").read_bytes() == translations
    assert main(["distil", "--teacher", student, "--run", student, "--training.steps", "4"]) == 2
    assert "is the teacher's own folder" in capsys.readouterr().err


def test_a_student_that_was_moved_is_resumed_averaged_and_evaluated(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path is wrong from anywhere else
    words = ["distil", "--teacher", str(run), "--run", "first", *SMALL, "--training.keep_checkpoints", "5"]
    assert main([*words, "--training.steps", "1"]) == 0
    (tmp_path / "first").rename(tmp_path / "second")
    assert main(["train", "--run", "second", "--training.steps", "2"]) == 0
    assert "[train] resuming from step 1" in capsys.readouterr().out
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "second", tmp_path / "elsewhere" / "copy")
    shutil.rmtree(tmp_path / "second")
    monkeypatch.chdir("/")
    copy = str(tmp_path / "elsewhere" / "copy")
    assert main(["distil", "--run", copy, "--training.steps", "3"]) == 0
    assert "[train] resuming from step 2" in capsys.readouterr().out
    # Of the three models, one was kept in each folder
    assert main(["average", "--run", copy, "--last", "3"]) == 0
    assert load_facts(Path(copy) / "averaged")["averaged_steps"] == [1, 2, 3]
    assert main(["evaluate", "--run", copy, "--checkpoint", "averaged"]) == 0
    assert (Path(copy) / "test.scores.json").is_file()
    (corpus,) = Corpora(load_translator(Path(copy) / "last").config).training
    assert corpus.data.path == f"{copy}/translations"
    assert not (tmp_path / "first").exists()


def test_a_teacher_that_was_moved_is_one_line_and_its_new_place_is_taken(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = str(tmp_path / "student")
    shutil.copytree(run, tmp_path / "teacher")
    words = ["distil", "--teacher", str(tmp_path / "teacher"), "--run", student, *SMALL, "--training.steps", "1"]
    assert main(words) == 0
    (tmp_path / "teacher").rename(tmp_path / "moved")
    again = ["train", "--run", student, "--training.steps", "2"]
    capsys.readouterr()
    assert main(again) == 2
    told = capsys.readouterr().err
    assert f"training.teacher is {tmp_path}/teacher, but there is no trained model in {tmp_path}/teacher/best" in told
    assert main([*again, "--training.teacher", str(tmp_path / "moved")]) == 0
    assert "[train] resuming from step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/student/translations", "/new/translations"),
        ("runs/./student/a/b", "/new/a/b"),
        ("runs/student2/translations", "runs/student2/translations"),
        ("/data/runs/student/x", "/data/runs/student/x"),
        (None, None),
    ],
)
def test_only_corpora_inside_a_runs_folder_move_with_it(path: str | None, expected: str | None, tmp_path: Path) -> None:
    config = replace(tiny(tmp_path), run="runs/student", corpora={"a": CorpusConfig(path=path, weight=2.0)})
    assert moved_to(config, "/new").corpora == {"a": CorpusConfig(path=expected, weight=2.0)}
    assert moved_to(config, "runs/student").corpora == {"a": CorpusConfig(path=path and str(Path(path)), weight=2.0)}


def test_each_corpus_is_translated_into_its_language_and_keeps_its_weight(tmp_path: Path) -> None:
    files = {"en": SENTENCES, "de": [pair.target for pair in builtin_pairs(23, 4)]}
    for language, lines in files.items():
        (tmp_path / language).write_text("\n".join([*lines[:4], "", *lines[4:]]) + "\n", encoding="utf-8")
    given = {
        "data.language_tags": True,
        "data.path": str(tmp_path),
        "corpora": {
            "news": {"train": ["en", "de"], "format": "text", "weight": 2},
            "back": {"train": ["de", "en"], "format": "text", "source": "de", "target": "en", "tag": "<bt>"},
        },
        "data.format": "text",
        "data.valid": ["en", "de"],
    }
    config = tiny(tmp_path / "run", given)
    news, back = sentences_of(Corpora(config), ModelText.of(config))
    assert news == ("<2de>", files["en"])
    assert back == ("<2en>", files["de"])
    student = student_of(Corpora(config), [("a", "b"), ("c", "d")])
    save_config(student, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == student
    found = {each.name: (each.data.train, each.data.path, each.tags, each.weight) for each in Corpora(student).training}
    folder = str(tmp_path / "run" / "translations")
    assert found == {
        "news.translations": (("a", "b"), folder, ("<2de>",), 2.0),
        "back.translations": (("c", "d"), folder, ("<2en>",), 1.0),
    }


def test_a_student_is_validated_and_tested_on_the_files_of_each_corpus(tmp_path: Path) -> None:
    held_out_files = {"valid": ["en", "de"], "test": ["x", "y"], "tag": "<bt>"}
    corpora = {"news": {"train": ["en", "de"], "weight": 2, **held_out_files}, "new": {"valid": ["v", "w"]}}
    config = tiny(tmp_path / "run", {"data.path": str(tmp_path), "corpora": corpora})
    student = student_of(Corpora(config), [("a", "b")])
    for split in SPLITS:
        theirs = Corpora(config).held_out(split)
        own = [replace(each, config=student, data=replace(each.data, train=())) for each in theirs]
        assert Corpora(student).held_out(split) == own
    assert "news" not in [each.name for each in Corpora(student).training]
    # One that has no training data has no weight in it either, and is refused with one
    assert {student.corpora[name].weight for name in corpora} == {1.0}


@pytest.mark.parametrize("format", ["text", "tsv", "jsonl", "tmx", "parquet", "hub"])
def test_a_student_reads_validation_and_test_data_in_their_own_format(format: str, tmp_path: Path) -> None:
    names = {split: ["a", "b"] if format == "text" else [f"{split}.{format}"] for split in ("train", *SPLITS)}
    files = {f"data.{split}": each for split, each in names.items()}
    config = tiny(tmp_path / "run", {"data.format": format, "data.path": str(tmp_path), **files})
    student = student_of(Corpora(config), [("a", "b")])
    for split in SPLITS:
        (own,), (theirs,) = Corpora(student).held_out(split), Corpora(config).held_out(split)
        assert own.data == replace(theirs.data, train=())


def test_files_that_are_the_only_corpus_become_one(tmp_path: Path) -> None:
    files = {"data.format": "text", "data.path": str(tmp_path), "data.train": ["en", "de"], "data.valid": ["en", "de"]}
    student = student_of(Corpora(tiny(tmp_path / "run", files)), [("a", "b")])
    assert student.data.train == ()
    (translations,) = Corpora(student).training
    assert (translations.name, translations.data.train, translations.weight) == ("translations", ("a", "b"), 1.0)


def test_a_student_is_exported_with_int8_weights(run: Path, tmp_path: Path) -> None:
    train(tiny(tmp_path / "run", {**STUDENT, "model.d_model": 16, "model.d_ff": 16, "training.steps": 1}))
    words = ["export", "--run", str(tmp_path / "run"), "--to", "ctranslate2"]
    assert main([*words, "--quantization", "int8"]) == 0
    assert json.loads((tmp_path / "run" / "ctranslate2" / "manifest.json").read_text())["files"]["model.bin"]
    assert main(["translate", "--run", str(tmp_path / "run"), "--engine", "ctranslate2", SENTENCES[0]]) == 0


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--teacher", "a"], "name the student's folder: --run FOLDER"),
        (["--run", "{tmp}"], "training.teacher names no model to learn from: give --teacher FOLDER"),
        (["--run", "{tmp}", "--teacher", "nowhere"], "there is no trained model in nowhere/best"),
        (["--run", "{tmp}", "--teacher", "{run}", "--subwords.kind", "bpe"], "a student uses its teacher's subwords"),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_leaves_no_folder(
    words: list[str], answer: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"{tmp}": str(tmp_path / "new"), "{run}": str(run)}
    try:
        status: object = main(["distil", *(names.get(word, word) for word in words)])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def told(rank: int, world: int, config: RunConfig) -> int:
    with join_ranks(60) as processes:
        return distil(config, False, processes).state.step


@pytest.mark.launched
def test_several_processes_share_the_sentences_and_write_them_in_order(run: Path, tmp_path: Path) -> None:
    changes = {"model.d_model": 16, "model.d_ff": 16, "model.heads": 2, "training.steps": 1, "training.devices": "auto"}
    given = {**STUDENT, **changes, "training.teacher": str(run)}
    for name, world in (("one", 1), ("two", 2)):
        config = load_config(saved_file(run, "best", "config.yaml"), {**given, "run": str(tmp_path / name)})
        assert ranks(world, told, config) == [1] * world
    one, two = (read_lines(tmp_path / name / "translations" / "1.target.txt") for name in ("one", "two"))
    assert one == two
    assert len(one) == 40


def test_a_student_of_files_without_a_test_set_has_none(tmp_path: Path) -> None:
    corpora = {"news": {"train": ["en", "de"], "valid": ["v", "w"]}}
    config = tiny(tmp_path / "run", {"data.path": str(tmp_path), "corpora": corpora})
    student = student_of(Corpora(config), [("a", "b")])
    assert not Corpora(config).has("test")
    assert not Corpora(student).has("test")
    builtin = tiny(tmp_path / "run")
    assert Corpora(student_of(Corpora(builtin), [("a", "b")])).has("test")


def test_the_teachers_tag_is_that_of_the_corpus_whatever_the_student_reads(tmp_path: Path) -> None:
    (tmp_path / "fr").write_text("un\n")
    corpora = {"a": {"train": ["en", "de"]}, "c": {"train": ["fr", "es"], "source": "fr", "target": "es"}}
    teacher = tiny(tmp_path / "teacher", {"corpora": corpora, "data.language_tags": True})
    files = {"data.path": str(tmp_path), "data.train": ["fr", "fr"], "data.valid": ["fr", "fr"], "data.source": "fr"}
    student = tiny(tmp_path / "run", {**files, "data.target": "es"})
    assert sentences_of(Corpora(student), ModelText.of(teacher)) == [("<2es>", ["un"])]
    assert [tag for tag, _ in sentences_of(Corpora(student), ModelText.of(tiny(tmp_path / "other")))] == [""]
    with pytest.raises(
        ConfigError, match="target language of train is it, but the teacher has no tag <2it>: it has <2de>, <2es>"
    ):
        sentences_of(Corpora(tiny(tmp_path / "run", {**files, "data.target": "it"})), ModelText.of(teacher))


def test_a_teacher_that_reads_tags_is_refused_by_a_student_that_does_not(run: Path, tmp_path: Path) -> None:
    translator = load_translator(run / "best")
    with pytest.raises(
        ConfigError,
        match=r"data\.language_tags is True, but the teacher .* has False and .* training\.teacher_weight 0",
    ):
        load_teacher(str(run), True, translator.source, translator.target)


def test_a_student_in_its_teachers_folder_is_refused_before_any_work(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    before = contents(run)
    refused = f"a model of {run} itself, which the new run would replace"
    for fresh in (False, True):
        with join_ranks(60) as ranks, pytest.raises(ConfigError, match=refused):
            distil(tiny(run, {"training.teacher": str(run)}), fresh, ranks)
    assert seen == []
    assert contents(run) == before


def test_a_source_that_the_teacher_reads_cut_has_no_translation(
    teacher: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student, who may read it whole, would learn to leave out its end."""

    def ended(*arguments: Any) -> list[Translation]:
        return [one._replace(text="a translation", finished=True) for one in best(*arguments)]

    monkeypatch.setattr(student_data, "best", ended)
    sentences = [SENTENCES[0], " ".join(SENTENCES), SENTENCES[1]]
    sizes = [len(ids) for ids in teacher.source.encode(list(map(teacher.text.source, sentences)))]
    assert sizes[0] <= teacher.text.longest < sizes[1]
    _, target = write_translations(teacher, sentences, tmp_path, "1")
    assert read_lines(target) == ["a translation", "", "a translation"]
