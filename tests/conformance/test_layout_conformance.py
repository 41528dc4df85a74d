"""The third part of the conformance suite passes right training steps over ranks and names every planted mistake."""

import json
import operator
import re
import sys
from dataclasses import replace

import pytest
import torch

from conformance import EVERY_LAYOUT, Case, LayoutAdapter, adapter_of, report, run
from conformance.__main__ import main
from conformance.layout_adapter import LAYOUTS, ROWS
from conformance.layout_adapters import torch_step
from conformance.layout_cases import NAMES, cases
from conformance.layout_checks import LAYOUT_CHECKS, fault
from conformance.layout_peers import KNOWN_LAYOUTS
from conformance.parts import PARTS
from seqpar.testing import ranks as ranks_module
from tests.conformance.planted_layouts import LAYOUT_MISTAKES, OTHER_MISTAKES, SOURCES

pytestmark = pytest.mark.unswitched

BY_NAME = {check.name: check for check in LAYOUT_CHECKS}


def planted(name):
    return adapter_of("layouts", f"tests.conformance.planted_layouts:{name}")


def failures(findings):
    return {name: finding.figure for name, finding in findings.items() if finding.verdict == "fail"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_seqpar_is_right_in_every_case_of_every_layout(layout):
    checks = tuple(check for check in LAYOUT_CHECKS if check.name.startswith(f"{layout}: "))
    assert {n: str(f) for n, f in run(KNOWN_LAYOUTS["seqpar"], checks).items() if f.verdict != "pass"} == {}


def test_a_step_of_deepspeeds_zero_3_is_right_in_every_case():
    adapter = KNOWN_LAYOUTS["deepspeed"]
    if why := adapter.why_not():
        pytest.skip(f"deepspeed: {why}")
    checks = tuple(check for check in LAYOUT_CHECKS if check.name.startswith("ZeRO-3: "))
    assert {str(finding) for finding in run(adapter, checks).values()} == {"pass"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_case_of_a_layout_is_plain_but_for_its_tokens(layout):
    case = next(iter(cases(layout).values()))[0]
    plain = Case(
        layout, case.ranks, case.tokens, vocab_size=8, tied=False, frozen_head=False, few_classes=False,
        whole_head=False, label_smoothing=0.0, loss_scale=1.0, reduction="sum", seed=0,
        groups=case.ranks if ROWS[layout].is_alone else 1,
    )  # fmt: skip
    assert case == plain
    assert all(parameter.requires_grad for parameter in case.model().parameters())
    assert torch.equal(case.model().head.weight, case.model(group=0).head.weight)


def test_plain_sums_are_right_and_a_mean_under_ddp_is_named_a_mean_of_means():
    layouts = ("data parallel", "split sequence", "pipeline")
    failed = failures(run(KNOWN_LAYOUTS["torch"], tuple(c for c in LAYOUT_CHECKS if c.name.startswith(layouts))))
    assert failed.keys() == {"data parallel: mean differentiated"}, failed
    assert "mean of means: each rank divides by its own tokens" in failed["data parallel: mean differentiated"]


def test_a_right_split_vocabulary_fails_nothing_but_logits_that_it_cannot_know_to_be_gathered():
    failed = failures(run(planted("right")))
    assert {name.partition(": ")[2] for name in failed} == {"the whole head passed as a shard"}
    assert all("off by log(ranks)" in figure for figure in failed.values())


@pytest.mark.parametrize("name", ["verl", "nemo-rl", "nemo-rl-fused"])
def test_a_peer_of_post_training_that_is_installed_fails_only_for_logits_that_it_cannot_know_to_be_gathered(name):
    adapter = KNOWN_LAYOUTS[name]
    if why := adapter.why_not():
        pytest.skip(f"{name}: {why}")
    failed = failures(run(adapter))
    assert {name.partition(": ")[2] for name in failed} == {"the whole head passed as a shard"}
    assert all("off by log(ranks)" in figure for figure in failed.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_steps_are_right_too(layout):
    """By hand: 100 seeds of every case."""
    adapter = KNOWN_LAYOUTS["seqpar"]
    for seed, name in enumerate(
        name for name in NAMES[layout] if name not in ("odd vocabulary", "mean differentiated")
    ):
        if not name.startswith("the whole"):
            assert fault(adapter, cases(layout, seed + 1)[name][-1]) is None, name


@pytest.mark.parametrize("name", LAYOUT_MISTAKES)
def test_a_published_mistake_is_caught_and_its_cause_named(name, request):
    _, about, cause = LAYOUT_MISTAKES[name]
    assert re.match(rf"({'|'.join(SOURCES)})_\d+", name), (
        "a published mistake is at https://github.com/SOURCE/issues/NUMBER"
    )
    if "hangs" in cause:
        request.getfixturevalue("impatient_ranks")
    finding = BY_NAME[about](planted(name))
    assert finding.verdict == "fail"
    assert cause in finding.figure
    assert finding.reproduction.startswith("import torch\n")


@pytest.mark.usefixtures("impatient_ranks")
def test_ranks_that_load_an_implementation_slowly_do_not_hang():
    """As on a busy machine, where loading may take one of them longer than a collective may last."""
    sys.modules.pop("tests.conformance.loaded_slowly", None)
    ranks_module.ranks(2, operator.add)  # which are there before this process loads the file
    adapter = adapter_of("layouts", "tests.conformance.loaded_slowly:STEP")
    assert fault(adapter, cases("data parallel")["unequal tokens"][0]) is None


@pytest.mark.parametrize("name", OTHER_MISTAKES)
def test_every_other_cause_is_named_too(name):
    _, about, cause = OTHER_MISTAKES[name]
    finding = BY_NAME[about](planted(name))
    assert (finding.verdict, cause in finding.figure) == ("fail", True), finding.figure


def test_a_verdict_has_the_numbers_of_every_rank_and_its_lines_print_them(capsys):
    finding = BY_NAME["data parallel: unequal tokens"](planted("trl_7245"))
    assert re.search(r"by rank: loss [\d.]+, [\d.]+ \([\d.]+ is right\), \S+ off by [\d.]+, [\d.]+$", finding.figure)
    exec(finding.reproduction, {})
    assert finding.figure.partition("by rank: ")[2] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mistake", "check", "tokens"),
    [
        ("trl_7245", "data parallel: unequal tokens", "((2,), (1,))"),
        ("torchtitan_1733", "pipeline: unequal tokens", "((2, 2, 2, 2),)"),
    ],
)
def test_the_case_that_is_shown_has_few_tokens(mistake, check, tokens):
    assert f"tokens={tokens})" in BY_NAME[check](planted(mistake)).reproduction


def test_a_step_that_returns_no_loss_or_has_no_number_is_a_failure():
    finding = BY_NAME["data parallel: unequal tokens"](planted("returns_nothing"))
    assert (
        "not finite, such as 0 / 0 tokens, or no loss at all; only the value is wrong; by rank: loss nan"
        in finding.figure
    )
    finding = BY_NAME["data parallel: unequal tokens"](planted("not_a_number"))
    assert finding.figure.startswith("2 ranks: a number that is not finite, such as 0 / 0 tokens; the value is right")


def test_an_error_is_named_with_its_rank():
    finding = BY_NAME["data parallel: frozen head"](planted("raises_on_rank_1"))
    assert finding.figure == "2 ranks: rank 1 raises KeyError: 'nobody'"


def test_a_layout_that_is_not_offered_is_no_failure():
    modest = LayoutAdapter("modest", torch_step, frozenset({"pipeline", "float64"}))
    findings = run(modest, tuple(check for check in LAYOUT_CHECKS if not check.name.startswith("pipeline")))
    assert {finding.verdict for finding in findings.values()} == {"not offered"}
    assert BY_NAME["pipeline: label smoothing"](modest).verdict == "not offered"
    assert replace(modest, offers=EVERY_LAYOUT).spec == "modest"


def test_a_run_replaces_its_own_column_of_the_file_and_keeps_the_others(tmp_path, capsys):
    path = tmp_path / "layouts.json"
    for adapter in (KNOWN_LAYOUTS["seqpar"], planted("trl_7245"), KNOWN_LAYOUTS["seqpar"]):
        found = report.keep(path, {adapter.name: run(adapter, LAYOUT_CHECKS[:1])}, [adapter])
    assert [*json.loads(path.read_text())] == ["seqpar", "trl_7245"]
    row = "| data parallel | 1 of 1 pass | **not reduced over ranks** (unequal tokens); 0 of 1 pass |"
    assert report.table(PARTS["layouts"], found, report.figures).splitlines()[2] == row
    assert report.table(PARTS["layouts"], found).splitlines()[2] == "| data parallel | ✓ | **✗ silent** 1 of 1 |"
    with pytest.raises(SystemExit):
        main(["page", "--json", str(path), "page.md"])
    assert "page takes one file, and nothing else" in capsys.readouterr().err
