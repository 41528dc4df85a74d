"""Training: the gradient it follows, where it stops, and that it goes on as if it had never stopped."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from recipes.translation.data.batches import Batch
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError, TrainingError
from recipes.translation.processes.stop import StopSignals
from recipes.translation.run_folder.checkpoint import load_facts, load_translator
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes
from recipes.translation.train import train
from recipes.translation.training import training, validation
from recipes.translation.training.progress import Metrics, Progress, in_words
from recipes.translation.training.summary import Summary
from recipes.translation.training.validation import Validation
from tests.recipes.plain_scores import plain_loss, plain_sums
from tests.recipes.saved import assert_same_run, saved_file, state_in, steps_of, trained_run, validations_of
from tests.recipes.scores.scored import score
from tests.recipes.tiny import OF_FILES, options, tiny, write_pairs

DROPOUT = {
    "model.dropout": 0.2,
    "training.devices": "[cpu, cpu]",
    "training.accumulate": 2,
    "training.batch_tokens": 2000,  # seven batches an epoch, which ends in the middle of the fourth step
    "training.steps": 7,
    "training.validate_every": 3,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven steps with dropout, across the end of an epoch."""
    return trained_run(tmp_path_factory, DROPOUT)


@pytest.fixture
def signal_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Deliver a real signal in the middle of a step."""

    def at(step: int, number: signal.Signals) -> None:
        def check(now: int, *arguments: Any) -> None:
            if now == step:
                signal.raise_signal(number)

        monkeypatch.setattr(training, "check_finite", check)

    return at


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    uninterrupted: Path, tmp_path: Path, signal_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for step, number, epoch in ((2, signal.SIGTERM, 0), (5, signal.SIGINT, 1)):
        signal_after(step, number)
        summary = train(tiny(run, DROPOUT))
        assert (summary.state.step, summary.stopped_by) == (step, number)
        assert summary.state.epoch == epoch  # an epoch ends in what is resumed
        assert f"train --run {run}" in str(summary)
        assert state_in(run)["step"] == step
        torch.rand(1000)  # whatever the process does in between
    assert summary.state.batch > 0  # in the middle of an epoch
    monkeypatch.undo()
    assert train(tiny(run, DROPOUT)).stopped_by is None
    assert_same_run(run, uninterrupted)


def test_a_run_whose_validations_reduce_the_rate_is_stopped_and_resumed_bit_for_bit(
    tmp_path: Path, signal_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plateau = {"training.schedule": "plateau", "training.plateau_patience": 2, "training.plateau_factor": 0.3}
    worse = {"training.learning_rate": 3.0, "training.warmup": 0, "training.validate_every": 1, "training.steps": 9}
    through, run = tmp_path / "through", tmp_path / "run"
    train(tiny(through, {**plateau, **worse}))
    for step in (4, 6):  # in the middle of a wait for a better one, and just after a reduction or before it
        signal_after(step, signal.SIGTERM)
        assert train(tiny(run, {**plateau, **worse})).state.step == step
    monkeypatch.undo()
    state = train(tiny(run, {**plateau, **worse})).state
    assert state.reductions > 1
    assert_same_run(run, through)
    rates = [record["learning_rate"] for record in steps_of(run)]
    assert rates[-1] == pytest.approx(3.0 * 0.3**state.reductions) or rates[-1] == pytest.approx(rates[-2])


def test_steps_done_after_the_last_save_are_done_again_alike(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(run, {**DROPOUT, "training.steps": 3}))
    with (run / "metrics.jsonl").open("a") as file:  # as a process leaves it that is killed at step 5
        file.write('{"step": 4, "loss": 9.0}\n{"step": 5, "lo')
    train(tiny(run, DROPOUT))
    assert_same_run(run, uninterrupted)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal; a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_is_answered_after_the_step_and_the_old_handlers_return() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals(several=False) as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):  # the second one
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("several", [True, False])
def test_after_an_error_of_one_of_several_processes_the_launchers_sigterm_does_not_cut_off_its_line(
    several: bool, ctrl_c: None
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals(several):
            pass
        assert signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(TrainingError), StopSignals(several):
            raise TrainingError
        assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if several else before)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_from_outside_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = options(run, {"training.steps": 100_000, "training.validate_every": 100_000})
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.translation", "train", *words], stdout=subprocess.PIPE, text=True
    )
    with process:
        deadline = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "resume with:" in output
    assert state_in(run)["step"] == len(steps_of(run)) > 0


def test_a_step_follows_the_gradient_of_all_its_batches_together(tmp_path: Path) -> None:
    """Against plain PyTorch: the step's batches as one, one device, no chunks, one mean over all tokens."""
    config = tiny(
        tmp_path / "run",
        {
            "training.steps": 1,
            "training.accumulate": 3,
            "training.devices": "[cpu, cpu]",
            "training.chunk_tokens": 4,
            "training.clip": 0,
            "model.dropout": 0,
        },
    )
    train(config)
    corpus = load_corpus(config)
    batches = [corpus.train.batch(indices) for indices in corpus.train.epoch(0)[:3]]
    assert len({batch.tokens for batch in batches}) > 1
    src, tgt_in, tgt_out = (
        pad_sequence([row for batch in batches for row in batch[side]], batch_first=True) for side in range(3)
    )
    torch.manual_seed(config.training.seed)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target)
    loss = plain_loss(model, Batch(src, tgt_in, tgt_out))
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    (step,) = steps_of(tmp_path / "run")
    assert step["tokens"] == int((tgt_out != 0).sum())
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_several_devices_and_chunks_give_the_losses_of_one_device(tmp_path: Path) -> None:
    base = {"model.dropout": 0, "training.steps": 6, "training.validate_every": 3}
    train(tiny(tmp_path / "one", {**base, "training.chunk_tokens": 1000}))
    train(tiny(tmp_path / "many", {**base, "training.devices": "[cpu, cpu, cpu]", "training.chunk_tokens": 40}))
    one, many = steps_of(tmp_path / "one"), steps_of(tmp_path / "many")
    assert [step["loss"] for step in many] == pytest.approx([step["loss"] for step in one], rel=1e-4)
    assert [step["gradient_norm"] for step in many] == pytest.approx([s["gradient_norm"] for s in one], rel=1e-3)
    losses = [[found["valid_loss"] for found in validations_of(tmp_path / name)] for name in ("one", "many")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_clipping_limits_the_step_and_zero_does_not_clip(tmp_path: Path) -> None:
    weights = []
    for clip in (0, 1e9, 1e-9):
        run = tmp_path / str(clip)
        train(tiny(run, {"training.steps": 2, "training.clip": clip, "model.dropout": 0}))
        weights.append(load_translator(run / "last").model.generator.bias)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_bf16_is_close_to_float32_and_not_equal(tmp_path: Path) -> None:
    found = {}
    for precision in ("float32", "bf16"):
        train(tiny(tmp_path / precision, {"training.steps": 2, "training.precision": precision}))
        found[precision] = [step["loss"] for step in steps_of(tmp_path / precision)]
    assert found["bf16"] == pytest.approx(found["float32"], rel=0.02)
    assert found["bf16"] != found["float32"]
    stored = load_translator(tmp_path / "bf16" / "last").model.parameters()
    assert {parameter.dtype for parameter in stored} == {torch.float32}


def test_perplexity_is_that_of_the_unsmoothed_likelihood(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {"training.devices": "[cpu, cpu]"})
    train(config)
    corpus = load_corpus(config)
    model = load_translator(tmp_path / "run" / "last").model
    _, nll, correct, tokens = plain_sums(model, corpus.valid[0].batches)
    assert tokens == sum(len(ids) + 1 for ids in corpus.target.encode([pair.target for pair in corpus.valid[0].pairs]))
    (found,) = validations_of(tmp_path / "run")
    assert found["valid_perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert found["valid_accuracy"] == pytest.approx(100 * correct / tokens, abs=0.02)


def test_validation_bleu_is_that_of_the_translations_against_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Translations too short by a word: BLEU is another number where the two sides change places."""
    config = tiny(tmp_path / "run", {"training.steps": 1, "training.validate_bleu": 9})
    pairs = load_corpus(config).valid[0].pairs[:9]
    sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
    short = [text.rpartition(" ")[0] or text for text in references]
    monkeypatch.setattr(validation, "translate", lambda _, sentences, *__: short if sentences == sources else [])
    train(config)
    (found,) = validations_of(tmp_path / "run")
    assert found["valid_bleu"] == score(short, references)["bleu"] != score(references, short)["bleu"]


def test_training_stops_when_validation_has_not_improved_for_patience_times(tmp_path: Path) -> None:
    still = {"training.learning_rate": 0, "training.validate_every": 2, "training.patience": 3, "training.steps": 50}
    summary = train(tiny(tmp_path / "run", still))
    assert summary.state.step == 8  # the best at 2, then three that are no better
    assert (summary.state.best_step, summary.state.stale) == (2, 3)
    assert train(tiny(tmp_path / "run", still)).state.step == 8  # and it stays stopped


def test_best_is_the_model_with_the_lowest_validation_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 1.5])
    biases = []

    def validate(translator: Translator, *arguments: Any) -> Validation:
        biases.append(translator.model.generator.bias.detach().clone())
        found = validation.validate(translator, *arguments)
        return replace(found, values={**found.values, "loss": next(losses)})

    monkeypatch.setattr(training, "validate", validate)
    summary = train(tiny(tmp_path / "run", {"training.validate_every": 1, "training.steps": 4}))
    best = validations_of(tmp_path / "run")[1]
    assert (best["step"], best["valid_loss"]) == (2, 1.0)
    assert load_facts(tmp_path / "run" / "best") == best
    assert summary.best == Validation.from_dict(best)
    assert torch.equal(load_translator(tmp_path / "run" / "best").model.generator.bias, biases[1])
    assert torch.equal(load_translator(tmp_path / "run" / "last").model.generator.bias, biases[3])


@pytest.mark.parametrize(
    ("change", "value"), [("model.d_model", 32), ("training.seed", 2), ("training.batch_tokens", 800)]
)
def test_resuming_with_a_setting_that_makes_it_another_run_names_it(
    uninterrupted: Path, change: str, value: int
) -> None:
    before = saved_file(uninterrupted, "last", "training.json").read_bytes()
    with pytest.raises(ConfigError, match=rf"^{change} is {value} but .* --fresh$"):
        train(tiny(uninterrupted, {**DROPOUT, change: value}))
    assert saved_file(uninterrupted, "last", "training.json").read_bytes() == before


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path, {"train": (0, 60), "valid": (60, 70)})
    text = {**OF_FILES, "data.path": str(tmp_path)}
    train(tiny(tmp_path / "run", {**text, "training.steps": 1}))
    (tmp_path / "valid.de").write_text((tmp_path / "valid.de").read_text().replace("e", "i"))
    with pytest.raises(ConfigError, match=r"data is not what .* was trained on"):
        train(tiny(tmp_path / "run", {**text, "training.steps": 2}))


def test_fresh_starts_over_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(run, {"training.steps": 3}))
    (run / "notes.txt").write_text("mine")
    summary = train(tiny(run, {"training.steps": 2, "model.d_ff": 8}), fresh=True)
    assert summary.state.step == len(steps_of(run)) == 2
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.filterwarnings("ignore:.*overflow")
def test_a_loss_that_is_not_finite_ends_training_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"^step 2: the loss is \w+: try a smaller training\.learning_rate"
    ) as caught:
        train(tiny(tmp_path / "run", {"training.learning_rate": 1e30}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "last").exists()


def test_both_betas_are_those_of_the_settings(tmp_path: Path) -> None:
    """After one step Adam's moments are (1 - b1) g and (1 - b2) g**2."""
    for betas in ((0.5, 0.75), (0.875, 0.9375)):
        run = tmp_path / str(betas)
        train(tiny(run, {"training.steps": 1, "training.betas": list(betas), "training.precision": "float64"}))
        moments = load_file(saved_file(run, "last", "training.safetensors"))
        for name, first in moments.items():
            if name.endswith("/exp_avg"):
                gradient = first / (1 - betas[0])
                torch.testing.assert_close(moments[f"{name}_sq"], (1 - betas[1]) * gradient**2, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("devices", ["[cuda:99]", "[meta]", "[nonsense]", "cpu1"])
def test_a_device_that_does_not_exist_is_one_line_naming_what_does(tmp_path: Path, devices: str) -> None:
    with pytest.raises(ConfigError, match=r"^training\.devices: .*this machine has cpu") as caught:
        train(tiny(tmp_path / "run", {"training.devices": devices}))
    assert "\n" not in str(caught.value)


def test_the_summary_says_how_good_how_fast_and_where(uninterrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.translation.training.summary.is_hopeless", lambda best: False)
    summary: Summary = train(tiny(uninterrupted, DROPOUT))
    text = str(summary)
    state = summary.state
    assert "7 of 7 steps" in text
    assert f"{state.tokens / state.train_seconds:,.0f} target tokens/s" in text
    assert state.tokens == sum(step["tokens"] for step in steps_of(uninterrupted))
    assert 0 < state.train_seconds < state.seconds
    assert "best validation, step" in text
    assert "best, checkpoints, data, last, metrics.jsonl" in text
    assert text.count("->") == 3


def test_a_progress_line_has_step_loss_speed_and_time_left(clock: list[float]) -> None:
    state = training.TrainingState()
    progress = Progress(state, steps=10)
    for tokens, loss in ((100, 2.0), (300, 4.0)):
        clock[0] += 2.0
        state.step += 1
        progress.show_step(state, loss=loss, tokens=tokens)
    assert progress.line(2) == "[train] step      2/10   loss 3.500   100 tokens/s   0:16 left"


def test_the_log_says_after_the_first_validation_how_long_the_whole_run_will_take(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first steps are slow, and do not count; each of the four validations takes as long as the first."""
    state = training.TrainingState()
    with Progress(state, steps=200, validate_every=50) as progress:
        for step in range(100):
            clock[0] += 30.0 if step < 3 else 1.5
            state.step += 1
            progress.show_step(state, loss=1.0, tokens=1)
            if state.step % 50 == 0:
                clock[0] += 60.0
                progress.show_validation(state, Validation(state.step, {"loss": 1.0, "perplexity": 2.0}))
    said = [line for line in capsys.readouterr().out.splitlines() if "will take" in line]
    whole = 3 * 30 + 197 * 1.5 + 4 * 60
    assert said == [f"[train] the whole run, with validations, will take about {whole / 60:.0f} minutes"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 second"), (80, "80 seconds"), (100, "2 minutes"), (5_000, "83 minutes"), (9_000, "2.5 hours")],
)
def test_times_are_told_as_they_are_spoken_of(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_output_that_is_no_terminal_gets_a_plain_line_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    state = training.TrainingState()
    with Progress(state, steps=100) as progress:
        for _ in range(30):
            clock[0] += 1.0
            state.step += 1
            progress.show_step(state, loss=1.0, tokens=1)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[2] for words in lines if words[1] == "step"] == ["10/100", "20/100", "30/100"]


def test_metrics_keep_what_the_resumed_step_had_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for after, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with Metrics(path, after_step=after) as metrics:
            for step in steps:
                metrics.write(step=step, after=after)
    assert [(record["step"], record["after"]) for record in read_metrics(path)] == [(1, 0), (2, 0), (3, 2), (4, 2)]


def test_the_cpu_threads_asked_for_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    train(tiny(tmp_path / "run", {"training.threads": 3, "training.steps": 1}))
    assert asked == [3]
