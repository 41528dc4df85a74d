"""The implementations in the loss benchmark are right where it says so, and its figures are those of the runs."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import seqpar
from benchmarks.loss import engine, ours, peers, plain_ways, report, results, targets
from benchmarks.loss.checks import kit_inputs, what_is_wrong
from benchmarks.loss.implementations import ENGINE, PLAIN, Implementation
from benchmarks.loss.parts import Loss
from benchmarks.loss.problems import IGNORED, Inputs, Problem
from benchmarks.loss.timing import floors
from benchmarks.seq2seq_peers import plain_loss
from conformance.problem import deviations

TINY = Problem(128, 6, 11, dtype=torch.float64, padding=0.3)
WAYS = {
    "plain": plain_ways.plain,
    "checkpointed": plain_ways.checkpointed,
    "torchtitan-style": plain_ways.titan_style,
    "torch op": peers.torch_op({"batch_chunk_size": 16}),
    "LossCompute": ours.engine(),
    "own generator": ours.engine(known=False),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_has_the_plain_gradients_in_float64(name, smoothing):
    x = kit_inputs(Implementation(WAYS[name]), TINY._replace(smoothing=smoothing), "cpu")
    found = {deviation.name: deviation.error for deviation in deviations(x)}
    assert found.keys() == {"loss", "hidden", "weight", "bias"}
    assert max(found.values()) < 1e-12, found


def test_a_part_of_the_targets_the_kit_draws_is_padding():
    x = kit_inputs(Implementation(plain_ways.plain), TINY, "cpu")
    ignored = (x.made()["target"] == IGNORED).float().mean()
    assert abs(ignored - TINY.padding) < 0.05


def test_a_factor_on_the_loss_that_is_ignored_is_named():
    problem = TINY._replace(dtype=torch.float32)
    assert what_is_wrong(Implementation(plain_ways.titan_style), problem, "cpu") == ["ignores a factor on the loss"]
    assert not what_is_wrong(Implementation(plain_ways.plain), problem, "cpu")


def test_a_wrong_gradient_is_named():
    def doubled(x):
        return lambda: plain_ways.plain(x)() + 0.01 * x.bias.sum()

    wrong = what_is_wrong(Implementation(doubled), TINY._replace(dtype=torch.float32), "cpu")
    assert any(word.startswith("bias gradient") for word in wrong)


def test_the_products_are_of_the_kept_rows_whole_and_in_chunks():
    x = Inputs.drawn(TINY, "cpu")
    for run in floors(x).values():
        run()
    assert x.tokens == int((x.target != IGNORED).sum()) < TINY.rows
    assert abs(x.tokens / TINY.rows - 0.7) < 0.05


def test_a_target_is_reached_only_if_every_problem_is_inside():
    def entry(seconds):
        problem = TINY.as_json()
        return {"problem": problem, "floor seconds": {"products": [1.0]}, "seconds": {"LossCompute": [seconds]}}

    in_products = targets.over(targets.time_of("LossCompute"), results.floor_seconds)
    for second, reached in ((1.1, True), (1.3, False)):
        target = targets.most("time", [entry(1.0), entry(second)], in_products, 1.15)
        assert target.reached is reached
        assert target.measured.startswith(f"{second:.3g}")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that measures a part with tiny problems, in this process, and returns the file."""
    monkeypatch.setattr(engine, "in_fresh_process", lambda _, measure, *arguments: max(1, measure(*arguments)))
    monkeypatch.setattr(plain_ways, "compiled", plain_ways.plain)

    def measure(part, asked):
        run = engine.Run(Loss(), results.load(path, "cpu", "a command", []), path, "cpu", 1, "")
        problems = [asked.problems[0]._replace(rows=64, width=4, vocab_size=11)]
        engine.measure(run, part, asked._replace(problems=problems))
        assert not run.todo(part, problems)
        return path

    path = tmp_path / "loss.json"
    return measure


@pytest.mark.parametrize("part", Loss.parts)
def test_every_part_is_measured_kept_and_shown(part, measured, monkeypatch):
    monkeypatch.setattr(Loss, "what_is_wrong", lambda *_: [])
    path = measured(part, Loss.parts[part])
    (entry,) = results.read(path)["parts"][part].values()
    assert Loss.parts[part].times is bool(entry["seconds"])
    assert entry["peak bytes"]
    assert len(report.part_table(results.read(path), part)) > 2
    report.write(path)
    assert "## How it was measured" in (path.parent / "loss.md").read_text()


def test_the_part_for_a_gpu_measures_what_runs_and_says_why_the_rest_does_not(measured, monkeypatch):
    """Run on the CPU instead of a GPU."""

    def broken(x):
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(peers, "torch_op", lambda options: broken)
    path = measured("gpu", Loss.gpu_parts["gpu"])
    found = results.read(path)
    (entry,) = found["parts"]["gpu"].values()
    assert {PLAIN, ENGINE} <= set(entry["seconds"])
    assert entry["not run"]["Liger"] == "not installed"
    assert entry["not run"]["torch op, default"] == "RuntimeError: no kernel"
    (checked,) = found["checks"].values()
    assert not any(checked[name] for name in (PLAIN, ENGINE))
    report.write(path)
    page = (path.parent / "loss.md").read_text()
    assert "| LossCompute |" in page
    assert "- Liger: not run: not installed" in page


def test_one_of_ours_that_fails_ends_the_run(measured, monkeypatch):
    def broken(x):
        raise RuntimeError("broken")

    monkeypatch.setattr(Loss, "ways", lambda *_: {ENGINE: Implementation(broken)})
    with pytest.raises(RuntimeError, match="broken"):
        measured("gpu", Loss.gpu_parts["gpu"])


@pytest.mark.parametrize("scattered", [False, True])
def test_the_plain_loss_that_training_is_held_against_is_the_engines(scattered):
    torch.manual_seed(0)
    engine = seqpar.LossCompute(nn.Linear(4, 9).double(), seqpar.LabelSmoothing(0.1, "torch", ignore_index=0))
    hidden, target = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(9, (2, 5))
    plain = plain_loss(engine, [hidden] if scattered else hidden, target)
    assert_close(plain.total, engine(hidden, target).total)
    assert plain.tokens == (target != 0).sum()
