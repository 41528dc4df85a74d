"""What a run finds in its folder: it goes on, begins, or says what is wrong; it never overwrites in silence."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.translation.commands import arguments, main
from recipes.translation.errors import CheckpointError, ConfigError, DataError
from recipes.translation.files.atomic_folder import MANIFEST, pointer_to, verified_folder
from recipes.translation.report.records import begun_settings
from recipes.translation.run_folder import resume
from recipes.translation.run_folder.checkpoint import (
    TrainingState,
    load_facts,
    load_training,
    load_translator,
)
from recipes.translation.run_folder.numbered import POINTERS
from recipes.translation.run_folder.resume import check_best, flat
from recipes.translation.settings.config import SCHEMA, CorpusConfig, DecodingConfig, RunConfig, load_config
from recipes.translation.train import begin, train
from recipes.translation.training import training
from tests.recipes.run_folder.made import MADE, contents, refused
from tests.recipes.saved import load_weights, model_in, resealed, saved_file
from tests.recipes.tiny import options, tiny

SHORT: dict[str, Any] = {**MADE, "training.validate_every": 2, "training.keep_checkpoints": 0}
LONGER: dict[str, Any] = {**SHORT, "training.steps": 6}


def test_last_without_its_manifest_is_an_error_and_best_stays(run: Path) -> None:
    last = model_in(run, "last")
    (last / MANIFEST).unlink()
    assert f"{last} has no manifest.json: it is damaged" in refused(run, LONGER)
    assert "has no manifest.json" in refused(run, LONGER, fresh=True)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["last", "best", "kept"])
def test_a_folder_in_a_pointers_place_is_refused(name: str, fresh: bool, run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    said = f"{run / name} is not a file that names a model, as training writes it: it was imported, or saved by"
    assert said in refused(run, LONGER, fresh=fresh)


def test_best_without_last_is_never_overwritten(run: Path) -> None:
    (run / "last").unlink()
    assert "is the model of step 4, but there is no" in refused(run, LONGER)
    assert train(tiny(run, SHORT), fresh=True).state.step == 4


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("name", "said"), [("last", "is not a file"), ("best", "is not a file"), ("subwords", "has no manifest.json")]
)
def test_a_folder_that_is_not_ours_is_never_deleted(name: str, said: str, fresh: bool, tmp_path: Path) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / name / "thesis.tex").write_text("mine")
    assert f"{tmp_path / 'run' / name} {said}" in refused(tmp_path / "run", LONGER, fresh=fresh)


@pytest.mark.parametrize(
    ("name", "said"), [("last", "is not a file"), ("best", "is not a file"), ("subwords", "has no manifest.json")]
)
def test_a_folder_that_is_not_ours_is_kept_by_the_demo_and_by_prepare(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / name / "thesis.tex").write_text("mine")
    for command in ("demo", "prepare") if name == "subwords" else ("demo",):
        assert main([command, *options(tmp_path / "run")]) == 2
        assert said in capsys.readouterr().err
    assert contents(tmp_path / "run") == {f"{name}/thesis.tex": b"mine"}


def test_a_file_of_others_in_a_checkpoint_keeps_it_from_being_removed(run: Path) -> None:
    folder = model_in(run, "last")
    assert folder == model_in(run, "best")
    (folder / "notes.txt").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.svg").write_text("mine")
    train(tiny(run, {**SHORT, "training.steps": 8}))
    assert load_facts(run / "last")["step"] == load_facts(run / "best")["step"] == 8
    assert (folder / "notes.txt").read_text() == (folder / "plots" / "a.svg").read_text() == "mine"
    assert load_facts(folder)["step"] == 4
    said = refused(run, {**SHORT, "training.steps": 10}, fresh=True)
    assert f"{folder / 'notes.txt'} was not written by the recipe, and would be removed: move it away first" in said


def test_last_as_a_link_is_one_line(run: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "moved")
    run.mkdir()
    (run / "last").symlink_to(moved / "last")
    for fresh in (False, True):
        assert f"{run / 'last'} is a symbolic link, which cannot be replaced" in refused(run, LONGER, fresh=fresh)
    assert load_translator(run / "last").model is not None  # reading through it is no harm
    (tmp_path / "link").symlink_to(moved)
    assert train(tiny(tmp_path / "link", {**SHORT, "training.steps": 5})).state.step == 5


@pytest.mark.parametrize(
    "text", ["", "mine", "../elsewhere", "checkpoints/step-00000004/../..", "/etc", "checkpoints/step-4", "\0" * 99]
)
@pytest.mark.parametrize("name", ["last", "best", "kept"])
def test_a_pointer_that_names_anything_else_is_one_line(name: str, text: str, run: Path) -> None:
    (run / name).write_text(text)
    if name == "kept" and not text:  # names nothing
        return
    for fresh in (False, True):
        assert f"{run / name} is damaged: " in refused(run, LONGER, fresh=fresh)
    if name == "best":
        with pytest.raises(CheckpointError, match=rf"{run / name} is damaged: its lines should name folders such as"):
            load_translator(run / name)


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_pointer_to_a_folder_that_is_gone_is_one_line(name: str, run: Path) -> None:
    (run / name).write_text("checkpoints/step-00000009\n")
    for read in (load_translator, load_facts, verified_folder):
        with pytest.raises(CheckpointError, match=r"names .*step-00000009, which is missing or incomplete: restore it"):
            read(run / name)
    if name == "last":
        assert f"names {run / 'checkpoints' / 'step-00000009'}, which is missing" in refused(run, LONGER)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "the state is gone": (
        lambda run: shutil.rmtree(saved_file(run, "last", "training.json").parent),
        "{run}/checkpoints/state-00000004, the state that belongs to {run}/last, is missing",
    ),
    "best is damaged": (
        lambda run: saved_file(run, "best", "model.json").write_text("{}"),
        "model.json is damaged",
    ),
    "only kept models are left": (
        lambda run: [(run / name).unlink() for name in ("last", "best")],
        "step-00000002 is the model of step 2, but there is no {run}/last",
    ),
    "a file is in the place of all models": (
        lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").write_text("mine")),
        "{run}/checkpoints is not a folder",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_is_named_before_anything_is_trained(name: str, run: Path) -> None:
    spoil, said = SPOILED[name]
    spoil(run)
    assert said.format(run=run) in refused(run, LONGER)


def test_the_best_of_another_run_is_named_before_anything_is_trained(run: Path, tmp_path: Path) -> None:
    train(tiny(tmp_path / "other", {**SHORT, "training.seed": 2}))
    shutil.copytree(model_in(tmp_path / "other", "best"), run / "checkpoints" / "step-00000001")
    (run / "best").write_text("checkpoints/step-00000001\n")
    assert "training.seed is 1 but" in refused(run, LONGER)


def test_a_best_that_is_gone_is_said_and_replaced_by_the_next_validation(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "best").unlink()
    validate = training.validate
    monkeypatch.setattr(
        training, "validate", lambda *given: replace(validate(*given), values={"loss": 99.0, "perplexity": 1e43})
    )
    summary = train(tiny(run, {**SHORT, "training.steps": 6}))
    assert "is gone: the next validation will replace it" in capsys.readouterr().out
    assert (summary.state.best_step, load_facts(run / "best")["step"]) == (6, 6)


def test_nothing_is_remembered_of_a_best_that_is_gone(run: Path) -> None:
    saved = load_training(run / "last")
    progress: dict[str, Any] = {"step": 4, "epoch": 1, "batch": 2, "tokens": 3, "data": "x"}
    saved = replace(saved, state=TrainingState(**progress, best_loss=1.0, best_score=2.0, best_step=3, stale=5))
    kept = replace(saved.state)
    check_best(saved, run, flat(tiny(run, SHORT)))
    assert saved.state == kept
    (run / "best").unlink()
    check_best(saved, run, flat(tiny(run, SHORT)))
    assert saved.state == TrainingState(**progress)


@pytest.mark.parametrize(("before", "after"), [("float64", "float32"), ("float32", "float64"), ("float64", "bf16")])
def test_a_run_goes_on_in_another_precision(before: str, after: str, tmp_path: Path) -> None:
    changes = {"training.precision": before, "training.steps": 3}
    train(tiny(tmp_path, changes))
    summary = train(tiny(tmp_path, {**changes, "training.precision": after, "training.steps": 5}), insist=True)
    assert summary.state.step == 5
    kinds = {tensor.dtype for tensor in load_weights(tmp_path / "last").values()}
    assert kinds == {torch.float64 if after == "float64" else torch.float32}


MAY_CHANGE = (
    *(
        "run",
        "data.path",
        "data.cache",
        "data.test",
        "data.tokenize",
        "training.devices",
        "training.chunk_tokens",
        "training.precision",
        "training.compile",
    ),
    *("training.threads", "layout.data", "layout.shard", "layout.vocab", "layout.timeout"),
    *("training.steps", "training.epochs", "training.validate_every", "training.validate_bleu", "training.patience"),
    "training.teacher",  # where it lies: another model, or none, is refused by its weights
    *(
        "training.keep_checkpoints",
        "training.save_every",
        "training.report",
        "training.trackers",
        "decoding.length_norm",
    ),
    *("decoding.beam", "decoding.length_penalty", "decoding.batch_sentences", "decoding.max_length"),
    *("decoding.max_ratio", "decoding.min_length", "decoding.no_repeat_ngram"),
)


def another(name: str, value: Any) -> Any:
    """A value of the setting that it does not have."""
    if SCHEMA.settings[name].choices:
        return next(choice for choice in SCHEMA.settings[name].choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (0.5, 0.5) if isinstance(value, tuple) else "another"


@pytest.mark.parametrize(("name", "value"), [("decoding.beam", 3), ("decoding.length_penalty", 0.2)])
def test_a_new_setting_of_saved_models_is_said_or_refused_where_none_is_saved_any_more(
    name: str, value: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**MADE, name: value}
    with pytest.raises(ConfigError, match=rf"^{name} is .*, but {run} has finished its .* steps, and its models keep"):
        begin(tiny(run, changes), False)
    begin(tiny(run, {**changes, "training.steps": 100}), False)
    assert f"[train] {name} is now " in capsys.readouterr().out
    begin(tiny(run, MADE), False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", [name for name in SCHEMA.settings if name not in MAY_CHANGE])
def test_no_setting_that_makes_it_another_run_can_change_on_resuming(name: str, made: Path) -> None:
    config = tiny(made, {**SHORT, "training.steps": 6})
    if name == "model.preset":  # looked up first
        changed = replace(config, model=replace(config.model, preset="base"))
    elif name == "corpora":
        changed = replace(config, corpora={"another": CorpusConfig()})
        name = "corpora.another"
    else:
        section, _, key = name.partition(".")
        old = getattr(config, section)
        changed = replace(config, **{section: replace(old, **{key: another(name, getattr(old, key))})})
    before = contents(made)
    with pytest.raises(ConfigError, match=rf"^{name} is .* but {made} was trained with .* --fresh$"):
        begin(changed, False)
    assert contents(made) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.format": "text", "data.train": ["typo.en", "a.de"]}, "there is no file"),
        (
            {"data.format": "text", "data.train": ["a.en", "a.de"], "data.valid": ["a.en", "typo.de"]},
            "there is no file",
        ),
        ({"data.tokenize": "flores200", "training.validate_bleu": 2}, "which is not downloaded"),
        ({"training.start_from": "elsewhere"}, "there is no trained model in elsewhere"),
        ({"training.start_from": "{run}"}, "a model of {run} itself, which the new run would replace: choose"),
        ({"training.start_from": "{run}/last"}, "a model of {run} itself, which the new run would replace: choose"),
        ({"training.teacher": "{run}"}, "a model of {run} itself, which the new run would replace: choose"),
        ({"training.teacher": "elsewhere"}, "there is no trained model in elsewhere"),
    ],
)
def test_fresh_removes_nothing_where_the_new_run_cannot_begin(
    changes: dict[str, Any], message: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.en").write_text("one\n")
    (tmp_path / "a.de").write_text("eins\n")
    given = {"data.path": str(tmp_path)} if "data.train" in changes else {}
    given |= {name: value.format(run=run) if isinstance(value, str) else value for name, value in changes.items()}
    before = contents(run)
    with pytest.raises((CheckpointError, ConfigError, DataError), match=re.escape(message.format(run=run))):
        train(tiny(run, {**SHORT, **given}), fresh=True)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subwords.vocab_size": 100_000}, "subwords.vocab_size 100,000 is too large"),
        ({"training.max_length": 1}, "training.max_length"),
        ({"training.lora_rank": 999, "training.start_from": "{other}"}, "lora_rank is 999"),
        ({"training.freeze": ["source_embedding"], "training.start_from": "{other}"}, "training.freeze"),
        ({"training.start_from": "{other}", "training.teacher": "elsewhere"}, "there is no trained model in elsewhere"),
        ({"layout.data": 2}, "layout data 2"),
        ({"training.trackers": ["wandb"]}, "wandb"),
    ],
)
def test_fresh_keeps_the_models_until_the_new_run_can_begin(
    changes: dict[str, Any], message: str, run: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (run / "averaged").mkdir()
    shutil.copytree(made, tmp_path / "other")
    given = {
        name: value.format(other=tmp_path / "other") if isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises((CheckpointError, ConfigError, DataError), match=re.escape(message)):
        train(tiny(run, {**SHORT, **given}), fresh=True)
    shutil.rmtree(run / "averaged")
    assert contents(run / "checkpoints") == contents(made / "checkpoints")
    for name in POINTERS:
        assert (run / name).read_bytes() == (made / name).read_bytes()
    train(tiny(run, LONGER))
    train(tiny(tmp_path / "other", LONGER))
    assert (
        saved_file(run, "last", "model.safetensors").read_bytes()
        == (saved_file(tmp_path / "other", "last", "model.safetensors")).read_bytes()
    )


def test_steps_that_are_made_already_are_refused_unless_the_last_one_was_validated(run: Path, tmp_path: Path) -> None:
    said = refused(run, {**SHORT, "training.steps": 3})
    assert said.startswith(
        f"training.steps is 3, but {run} has already done 4 steps: set training.steps to 5 or more to continue"
    )
    assert train(tiny(run, SHORT)).state.step == 4  # a finished run, which was validated at its end
    saved_file(run, "last", "model.json").write_text(json.dumps({"step": 4}))  # as Ctrl-C leaves it
    resealed(model_in(run, "last"))
    assert "training.steps is 4" in refused(run, SHORT)
    assert train(tiny(run, {**SHORT, "training.steps": 5})).state.step == 5


def test_a_run_that_ended_before_its_first_checkpoint_is_begun_again_with_its_own_settings(
    run: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoints")
    for name in POINTERS:
        (run / name).unlink()
    begun: list[RunConfig] = []

    def begin_only(config: RunConfig, **_: object) -> None:
        begun.append(config)
        raise ConfigError("as far as this")

    monkeypatch.setattr("recipes.translation.train.train", begin_only)
    for given in ({}, {"training.steps": 3}, {"training.learning_rate": 0.01}, {"data.builtin_pairs": 99}):
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        assert main(["train", "--run", str(run), *words]) == 2
        if "data.builtin_pairs" in given:  # other data, for which these are all the settings
            assert begun[-1] == load_config(None, {"run": str(run), **given})
        else:
            assert begun[-1] == tiny(run, {**MADE, **given})
    monkeypatch.undo()
    assert main(["train", "--run", str(run)]) == 0
    assert (
        saved_file(run, "last", "model.safetensors").read_bytes()
        == (saved_file(made, "last", "model.safetensors")).read_bytes()
    )


def test_the_settings_of_a_start_are_those_that_were_recorded_whatever_they_are(tmp_path: Path) -> None:
    corpora = {"web.en": {"train": ["en", "de"], "weight": 2.0, "tag": "<bt>"}, "news": {"train": ["a.tsv"]}}
    config = tiny(tmp_path / "run", {"data.format": "text", "corpora": corpora, "data.valid": ["en", "de"]})
    began = {"settings": flat(config)}
    (tmp_path / "resources.jsonl").write_text(
        "".join(json.dumps({"step": 0, "began": one}) + "\n" for one in ({}, began))
    )
    assert load_config(None, begun_settings(tmp_path)) == config


def test_a_run_that_was_only_prepared_is_not_trained_on_the_built_in_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("en", "one train and two"), ("de", "ein Zug und zwei")):
        (tmp_path / name).write_text(f"{text}\n" * 9)
    run, files = str(tmp_path / "run"), [str(tmp_path / "en"), str(tmp_path / "de")]
    assert main(["prepare", "--run", run, *given_files(files), "--subwords.vocab_size", "277"]) == 0
    capsys.readouterr()
    assert main(["train", "--run", run, "--training.steps", "1"]) == 2
    assert capsys.readouterr().err == (
        f"error: {run} has no checkpoint yet, and its subwords were made from data other than the built-in corpus, "
        "which is the default: give the settings of the run again, with --config or as options\n"
    )


def given_files(files: list[str]) -> list[str]:
    return ["--data.train", *files, "--data.valid", *files]


def test_fresh_takes_the_subwords_of_the_new_start_and_not_those_of_the_earlier_run(run: Path, tmp_path: Path) -> None:
    train(tiny(tmp_path / "other", {**SHORT, "subwords.vocab_size": 340}))
    started = {**SHORT, "subwords.vocab_size": 340, "training.start_from": str(tmp_path / "other")}
    train(tiny(run, started), fresh=True)
    for name in ("best", "last"):
        there, here = (saved_file(folder, name, "joint.model").read_bytes() for folder in (tmp_path / "other", run))
        assert there == here
    assert not (run / "subwords").exists()


@pytest.mark.parametrize(
    ("was", "changes", "what"),
    [
        ({}, {"training.precision": "bf16"}, "training.precision was float32 and is bf16: from step 5 on, weights and"),
        (
            {"training.patience": 9},
            {"training.patience": 9, "training.validate_every": 3},
            "training.validate_every was 2 and is 3: training.patience 9 counts validations, and would end the run",
        ),
        (
            {"training.schedule": "plateau"},
            {"training.schedule": "plateau", "training.validate_every": 3},
            "training.validate_every was 2 and is 3: with training.schedule plateau validations reduce the learning",
        ),
        (
            {"training.learning_rate": 0.0, "training.validate_every": 1},
            {"training.learning_rate": 0.0, "training.validate_every": 1, "training.patience": 2},
            "training.patience is 2, and the last 3 validations were not better than that of step 1: the run would end",
        ),
        (
            {"training.learning_rate": 0.0, "training.validate_every": 1, "training.patience": 3},
            {"training.learning_rate": 0.0, "training.validate_every": 1, "training.patience": 3},
            "training.patience is 3, and the last 3 validations were not better than that of step 1: the run would end",
        ),
        (
            {"training.validate_every": 1, "training.keep_checkpoints": 3},
            {"training.validate_every": 1, "training.keep_checkpoints": 1},
            "training.keep_checkpoints was 3 and is 1: the next validation would remove 3 of the 3 models in",
        ),
        (
            {"training.validate_bleu": 2},
            {"training.validate_bleu": 3},
            "training.validate_bleu was 2 and is 3: BLEU and chrF of later validations could not be compared",
        ),
        (
            {"training.validate_bleu": 2},
            {"training.validate_bleu": 2, "data.tokenize": "char"},
            "data.tokenize was auto and is char: BLEU and chrF of later validations could not be compared",
        ),
        (
            {"training.validate_bleu": 2},
            {"training.validate_bleu": 2, "decoding.max_length": 9},
            "decoding.max_length was 8 and is 9: BLEU and chrF of later validations could not be compared",
        ),
        (
            {"training.validate_bleu": 2},
            {"training.validate_bleu": 2, "decoding.no_repeat_ngram": 3},
            "decoding.no_repeat_ngram was 0 and is 3: BLEU and chrF of later validations could not be compared",
        ),
    ],
)
def test_a_setting_by_which_something_would_jump_is_asked_about_before_the_run_goes_on(
    was: dict[str, Any], changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(tiny(run, {**SHORT, **was}))
    assert refused(run, {**LONGER, **changes}).startswith(what)
    assert refused(run, {**LONGER, **changes}).endswith(
        "; keep the setting, begin another --run with training.start_from, or add --insist"
    )
    ended = train(tiny(run, {**LONGER, **changes}), insist=True).state
    assert ended.step == (6 if "training.patience is" not in what else 4)


@pytest.mark.parametrize(
    ("was", "changes"),
    [
        ({"training.patience": 9}, {"training.patience": 8}),
        ({}, {"training.validate_every": 3}),
        ({"training.keep_checkpoints": 2}, {"training.keep_checkpoints": 3}),
        ({"training.keep_checkpoints": 2}, {"training.keep_checkpoints": 0}),
        ({"training.validate_bleu": 2}, {"training.validate_bleu": 0, "decoding.max_length": 9}),
        ({}, {"training.save_every": "1", "training.chunk_tokens": 7}),
    ],
)
def test_other_settings_change_without_a_question(was: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    train(tiny(tmp_path / "run", {**SHORT, **was}))
    assert train(tiny(tmp_path / "run", {**LONGER, **was, **changes})).state.step == 6


@pytest.mark.parametrize("best_by", ["loss", "bleu"])
@pytest.mark.parametrize("name", [each.name for each in fields(DecodingConfig)])
def test_a_change_of_the_search_is_refused_where_it_would_change_the_scores_that_choose_the_best(
    name: str, best_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations search greedily: what belongs to beams alone may change."""
    before = tiny(tmp_path, {**MADE, "training.validate_bleu": 2, "training.best_by": best_by})
    other = "length" if name == "length_norm" else getattr(before.decoding, name) + 1
    now = replace(before, decoding=replace(before.decoding, **{name: other}))
    monkeypatch.setattr(resume, "saved_config", lambda folder: before)
    refusal: AbstractContextManager[object] = nullcontext()
    if best_by == "bleu" and name in ("max_length", "max_ratio", "min_length", "no_repeat_ngram"):
        refusal = pytest.raises(ConfigError, match=rf"^decoding\.{name} is {other} but .* was trained with ")
    with refusal:
        resume.check_same_settings(flat(now), tmp_path / "last")


def test_settings_are_read_again_where_a_training_replaces_the_model_at_this_moment(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = model_in(run, "last")
    new = old.with_name("step-00000005")
    load = arguments.load_config

    def replaced(path: Path, *given: Any) -> RunConfig:
        if old.exists():
            old.rename(new)
            (new / MANIFEST).write_text((new / MANIFEST).read_text() + "\n")  # that of another model
            (run / "last").write_bytes(pointer_to([new]))
        return load(path, *given)

    monkeypatch.setattr(arguments, "load_config", replaced)
    options = argparse.Namespace(config=None, **{"run": str(run), "training.steps": "7"})
    assert arguments.run_config(options).training.steps == 7
    assert not old.exists()
