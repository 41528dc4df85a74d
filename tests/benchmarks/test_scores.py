"""The ways to score tokens in the benchmark are right where its page says so, and its ratios are those of the runs."""

import math

import pytest
import torch

from benchmarks.loss import engine
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.timing import Products
from benchmarks.scores import parts
from benchmarks.scores.page import products_seconds, ratio
from benchmarks.scores.parts import what_is_wrong
from benchmarks.scores.ways import BY_HAND, CASES, INVARIANT, OURS, WAYS, Case, Way
from benchmarks.seq2seq_peers import SIZES, Ours, batches, check_loss

TINY = Problem(6, 4, 11, bias=False)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", [OURS, INVARIANT, BY_HAND])
def test_a_way_without_a_mark_is_right_in_float64(name, case):
    assert what_is_wrong(WAYS[name], case, torch.float64, "cpu") == []


def test_a_wrong_gradient_and_a_wrong_score_are_named():
    def shifted(x, entropy):
        def scores():
            log_prob, entropies = WAYS[OURS].prepare(x, entropy)()
            return log_prob + 1e-3 * x.weight.sum(), entropies

        return scores

    wrong = what_is_wrong(Way(shifted), Case("hidden and projection", True), torch.float32, "cpu")
    assert [words.split(" off")[0] for words in wrong] == ["log_prob", "weight gradient"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_products_of_a_case_are_those_it_needs(case):
    entry = {
        "floor seconds": {
            f"float32: {name}, products, 512 rows": [seconds, 900.0, 900.0]
            for name, seconds in (("logits", 1.0), ("hidden gradient", 10.0), ("weight gradient", 100.0))
        }
    }
    wanted = {("hidden and projection", False): 112, ("hidden and projection", True): 112, ("hidden", False): 11}
    wanted |= {("hidden", True): 21, ("nothing", False): 1, ("nothing", True): 1}
    assert products_seconds(entry, case, "float32", min) == wanted[case]
    way = {"problem": TINY.as_json(), **entry, "seconds": {OURS: [2.0, 8.0, 4.0]}}
    median = sum(900.0 * count for count in case.products.values())
    assert ratio(way, case, OURS) == 4.0 / median


def test_a_product_is_made_only_if_it_is_wanted():
    x = Inputs.drawn(TINY, "cpu")
    counted = []
    original = torch.mm
    torch.mm = lambda *args, **kwargs: counted.append(1) or original(*args, **kwargs)
    try:
        Products(x, None).run(None, {"logits"})
        assert len(counted) == 1
        Products(x, None).run(None)
        assert len(counted) == 4
    finally:
        torch.mm = original


def test_the_cases_of_a_gpu_have_a_row_for_each_way_and_say_what_did_not_run(monkeypatch, capsys):
    def missing(x, entropy):
        raise ModuleNotFoundError("No module named 'peer'")

    monkeypatch.setattr(parts, "WAYS", {OURS: WAYS[OURS], BY_HAND: WAYS[BY_HAND], "peer": Way(missing)})
    # test_gpu_parts measures memory where a GPU's run does, in new processes that import TRL
    monkeypatch.setattr(engine, "in_fresh_process", lambda _, measure, *arguments: max(1, measure(*arguments)))
    engine.try_on_the_cpu(parts.Scores())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith(f"| {OURS} ")] == [f"| {OURS}"] * 3
    assert len([line for line in lines if line.startswith(f"| {BY_HAND}")]) == 3
    assert lines.count("- peer: not run: ModuleNotFoundError: No module named 'peer'") == 3


def test_the_loss_is_the_plain_one_of_the_same_logits() -> None:
    assert check_loss("d128") < 1e-12


def test_a_step_changes_every_weight() -> None:
    config, vocab_size = SIZES["d128"]
    ours = Ours(config, vocab_size, "float32")
    before = {name: weight.detach().clone() for name, weight in ours.model.named_parameters()}
    assert math.isfinite(ours.step(next(batches(vocab_size, 300, "similar"))))
    assert not [name for name, weight in ours.model.named_parameters() if weight.equal(before[name])]
