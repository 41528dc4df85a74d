"""The second part of the conformance suite passes the right scores and catches every planted mistake."""

import sys
from dataclasses import replace

import pytest
import torch

from conformance import ALL_SCORES, ScoreAdapter, adapter_of, report, run
from conformance.__main__ import main
from conformance.checks import MEASURED, SCORE_CHECKS
from conformance.layout_peers import KNOWN_LAYOUTS
from conformance.memory import Growth, growth
from conformance.peers import KNOWN_SCORES
from conformance.plain import plain_scores
from conformance.problem import asked
from seqpar import TokenScores
from tests.conformance.planted_scores import SCORE_MISTAKES

pytestmark = pytest.mark.unswitched

NUMBERS = tuple(check for check in SCORE_CHECKS if not check.is_cost)
BY_NAME = {check.name: check for check in SCORE_CHECKS}


def failures(findings):
    return {name: finding.figure for name, finding in findings.items() if finding.verdict == "fail"}


def test_seqpars_scores_pass_every_check_of_numbers():
    findings = run(KNOWN_SCORES["seqpar"], NUMBERS)
    assert {name: str(f) for name, f in findings.items() if f.verdict != "pass"} == {}


def test_the_reference_passes_every_check_that_plain_pytorchs_entropy_fails_at_masked_classes():
    checks = (BY_NAME["float32"], BY_NAME["masked classes"], BY_NAME["signs"])
    assert failures(run(ScoreAdapter("reference", plain_scores), checks)) == {}
    assert failures(run(KNOWN_SCORES["torch"], checks)).keys() == {"masked classes"}


def test_trls_scores_are_called_rightly():
    names = ("float64", "temperature", "ignored tokens", "given classes", "softcap")
    assert failures(run(KNOWN_SCORES["trl"], tuple(BY_NAME[name] for name in names))) == {}
    names = ("temperature", "ignored tokens", "any chunk size", "softcap")
    assert failures(run(KNOWN_SCORES["trl-chunked"], tuple(BY_NAME[name] for name in names))) == {}


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("verl", {"masked classes", "signs", "extreme logits"}),
        ("verl-fused", {"signs", "extreme logits"}),
        ("nemo-rl", {"masked classes"}),
        ("nemo-rl-fused", set()),
    ],
)
def test_a_peer_of_post_training_that_is_installed_fails_what_the_page_says(name, fails):
    adapter = KNOWN_SCORES[name]
    if why := adapter.why_not():
        pytest.skip(f"{name}: {why}")
    assert failures(run(adapter, NUMBERS)).keys() == fails


def test_a_placeholder_of_nemo_rl_is_said_to_be_no_installation_and_a_clone_has_the_version_it_names(
    tmp_path, monkeypatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").write_text("__version__ = '0.6.0+7ea279a'")
    monkeypatch.syspath_prepend(tmp_path)
    said = "not installed: clone https://github.com/NVIDIA-NeMo/RL and put it on PYTHONPATH"
    assert KNOWN_SCORES["nemo-rl"].why_not() == KNOWN_LAYOUTS["nemo-rl"].why_not() == said
    assert report.installed_version("nemo-rl") == "0.6.0+7ea279a"
    monkeypatch.delitem(sys.modules, "nemo_rl")
    assert report.installed_version("nemo-rl") == "not installed"


@pytest.mark.parametrize("name", SCORE_MISTAKES)
def test_a_planted_mistake_is_caught_by_the_check_about_it_and_repeated_by_its_lines(name, capsys):
    finding = BY_NAME[SCORE_MISTAKES[name][0]](adapter_of("scores", f"tests.conformance.planted_scores:{name}"))
    assert finding.verdict == "fail", finding
    exec(finding.reproduction, {})
    assert capsys.readouterr().out == f"{finding}\n"


def test_every_check_of_numbers_has_a_planted_mistake_or_is_a_dtype():
    planted = {about for about, _ in SCORE_MISTAKES.values()}
    assert {check.name for check in NUMBERS} - planted == {"float64", "float32", "bfloat16", "float16"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_check_of_a_dtype_asks_for_scores_in_it(dtype):
    asked = []

    def noting(hidden, *given, **options):
        asked.append(hidden.dtype)
        return plain_scores(hidden, *given, **options)

    BY_NAME[str(dtype).removeprefix("torch.")](ScoreAdapter("noting", noting))
    assert asked
    assert set(asked) == {dtype}


NO_SCORES = {
    "a tensor": lambda *given: plain_scores(*given).log_prob,
    "nothing": lambda *given: None,
    "a column": lambda *given: TokenScores(plain_scores(*given).log_prob[:, None]),
    "no entropy": lambda *given: plain_scores(*given)._replace(entropy=None),
    "detached": lambda *given: TokenScores(*(t if t is None else t.detach() for t in plain_scores(*given))),
    "nan": lambda *given: TokenScores(*(t if t is None else t * float("nan") for t in plain_scores(*given))),
}


@pytest.mark.parametrize("kind", NO_SCORES)
def test_what_are_no_scores_fails_every_check(kind):
    names = ["float64", "both gradients", "in any batch", "no token", "frozen head"]
    found = {name: BY_NAME[name](ScoreAdapter(kind, NO_SCORES[kind])) for name in names}
    assert {name: finding.verdict for name, finding in found.items()} == dict.fromkeys(names, "fail")


def test_what_is_not_offered_is_not_held_against_it():
    modest = ScoreAdapter("modest", NO_SCORES["no entropy"], frozenset({"float32", "gradients"}))
    checks = [check for check in NUMBERS if check.name not in ("extreme logits", "last tile", "in any batch")]
    findings = run(modest, tuple(checks))
    passed = {"float32", "log-probability", "frozen trunk", "frozen head", "second backward", "signs"}
    assert {name for name, finding in findings.items() if finding.verdict == "pass"} == passed
    assert {finding.verdict for finding in findings.values()} == {"pass", "not offered"}
    values = replace(modest, function=NO_SCORES["detached"], offers=frozenset({"float32"}))
    assert str(BY_NAME["float32"](values)).startswith("pass: log_prob")


def test_the_memory_of_all_logits_is_a_failure_of_scores_too():
    right = growth(asked(KNOWN_SCORES["seqpar"], **MEASURED))
    assert isinstance(right, Growth)
    assert right.of_logits <= Growth.ALLOWED


def test_the_command_runs_a_part_and_fails_for_a_name_that_could_not_run(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    with pytest.raises(SystemExit, match=r"^conformance: not run: cce \(not installed\)$"):
        main(["scores", "cce"])
    printed = capsys.readouterr().out
    assert "python -m conformance scores cce\n" in printed
    assert "| ties in top-k | not measured: not installed |" in printed
    with pytest.raises(
        SystemExit, match=r"'liger-float32' is not known; there are torch, trl, .*your own ScoreAdapter"
    ):
        main(["scores", "liger-float32"])
    planted = "tests.conformance.planted_scores:doubling"
    with pytest.raises(SystemExit, match=r"is a ScoreAdapter; it must be a conformance\.Adapter"):
        main(["losses", planted])


def test_an_adapter_of_ones_own_is_a_name_and_a_function_of_a_few_lines():
    def scores(hidden, weight, target, bias, options):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return TokenScores(log_prob=-torch.nn.functional.cross_entropy(logits, target, reduction="none"))

    mine = ScoreAdapter("mine", scores, offers=frozenset({"float64", "bias", "gradients"}))
    assert run(mine, SCORE_CHECKS[:1])["float64"].verdict == "pass"
    assert ScoreAdapter("all", scores).offers == ALL_SCORES
    assert {f.figure for f in run(replace(mine, why_not=lambda: "needs a GPU")).values()} == {"needs a GPU"}
