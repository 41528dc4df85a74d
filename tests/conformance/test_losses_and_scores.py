"""The first two parts pass what is right, and catch every planted mistake with the check that is about it."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import ALL_SCORES, EVERYTHING, Adapter, ScoreAdapter, adapter_of, bad_target, report, run
from conformance.__main__ import _parse, main
from conformance.checks import MEASURED
from conformance.finding import Finding, RaisedError
from conformance.layout_peers import KNOWN_LAYOUTS
from conformance.memory import Growth, growth
from conformance.parts import PARTS
from conformance.peers import KNOWN, KNOWN_SCORES
from conformance.plain import plain_loss, plain_scores
from conformance.problem import Problem, asked
from seqpar import TokenScores
from tests.conformance.planted import MISTAKES
from tests.conformance.planted_scores import SCORE_MISTAKES

pytestmark = pytest.mark.unswitched

ROOT = Path(__file__).parents[2]
OF_LOSSES, OF_SCORES = ({check.name: check for check in PARTS[part].checks} for part in ("losses", "scores"))
BY_PART = {"losses": OF_LOSSES, "scores": OF_SCORES}
PLANTED = {"losses": ("planted", MISTAKES), "scores": ("planted_scores", SCORE_MISTAKES)}
QUICK = tuple(check for check in OF_LOSSES.values() if check.name != "memory by rows")
NUMBERS, NUMBERS_OF_SCORES = (
    tuple(check for check in of.values() if not check.is_cost) for of in (OF_LOSSES, OF_SCORES)
)


def failures(findings):
    return {name: finding.figure for name, finding in findings.items() if finding.verdict == "fail"}


@pytest.mark.parametrize(("name", "checks"), [("torch", NUMBERS), ("seqpar", QUICK), ("seqpar-engine", QUICK)])
def test_plain_torch_and_seqpar_fail_nothing(name, checks):
    findings = run(KNOWN[name], checks)
    assert failures(findings) == {}
    offered = {"any number of chunks"} if name == "torch" else set()
    assert {n for n, f in findings.items() if f.verdict != "pass"} == offered


def test_seqpars_scores_pass_every_check_of_numbers():
    findings = run(KNOWN_SCORES["seqpar"], NUMBERS_OF_SCORES)
    assert {name: str(f) for name, f in findings.items() if f.verdict != "pass"} == {}


def test_the_reference_passes_every_check_that_plain_pytorchs_entropy_fails_at_masked_classes():
    checks = (OF_SCORES["float32"], OF_SCORES["masked classes"], OF_SCORES["signs"])
    assert failures(run(ScoreAdapter("reference", plain_scores), checks)) == {}
    assert failures(run(KNOWN_SCORES["torch"], checks)).keys() == {"masked classes"}


def test_trls_scores_are_called_rightly():
    names = ("float64", "temperature", "ignored tokens", "given classes", "softcap")
    assert failures(run(KNOWN_SCORES["trl"], tuple(OF_SCORES[name] for name in names))) == {}
    names = ("temperature", "ignored tokens", "any chunk size", "softcap")
    assert failures(run(KNOWN_SCORES["trl-chunked"], tuple(OF_SCORES[name] for name in names))) == {}


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
    assert failures(run(adapter, NUMBERS_OF_SCORES)).keys() == fails


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


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_check_of_a_dtype_shows_the_error_of_each_part(dtype):
    figure = OF_LOSSES[dtype](KNOWN["seqpar"]).figure
    assert re.search(r"; loss [\d.e+-]+, hidden [\d.e+-]+, weight [\d.e+-]+, bias [\d.e+-]+$", figure)


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, (_, of) in PLANTED.items() for name in of])
def test_a_planted_mistake_is_caught_by_the_check_about_it_and_repeated_by_its_lines(part, name, capsys):
    file, mistakes = PLANTED[part]
    adapter = adapter_of(part, f"tests.conformance.{file}:{name}")
    about = mistakes[name][0]
    finding = BY_PART[part][about](adapter)
    assert finding.verdict == "fail", finding
    if name == "no_smoothing":
        assert finding.figure == "NotImplementedError: no smoothing"
        with pytest.raises(RaisedError) as raised:
            exec(finding.reproduction, {})
        assert isinstance(raised.value.__cause__, NotImplementedError)
    else:
        exec(finding.reproduction, {})
        assert capsys.readouterr().out == f"{finding}\n"
    if part == "losses" and about not in ("float32", "float64"):
        assert OF_LOSSES["float32"](adapter).verdict == "pass"


def test_every_check_of_numbers_has_a_planted_mistake_or_is_a_dtype():
    planted = {about for about, _ in SCORE_MISTAKES.values()}
    assert {check.name for check in NUMBERS_OF_SCORES} - planted == {"float64", "float32", "bfloat16", "float16"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_check_of_a_dtype_asks_for_scores_in_it(dtype):
    asked = []

    def noting(hidden, *given, **options):
        asked.append(hidden.dtype)
        return plain_scores(hidden, *given, **options)

    OF_SCORES[str(dtype).removeprefix("torch.")](ScoreAdapter("noting", noting))
    assert asked
    assert set(asked) == {dtype}


NO_LOSS = {
    "detached": lambda *given: plain_loss(*given).detach(),
    "a float": lambda *given: float(plain_loss(*given)),
    "nothing": lambda *given: None,
    "a tuple": lambda *given: (plain_loss(*given),),
    "a row each": lambda *given: plain_loss(*given).expand(3),
    "inf": lambda *given: plain_loss(*given) * float("inf"),
    "nan": lambda *given: plain_loss(*given) * float("nan"),
    "zero": lambda *given: plain_loss(*given) * 0,
}


NO_SCORES = {
    "a tensor": lambda *given: plain_scores(*given).log_prob,
    "nothing": lambda *given: None,
    "a column": lambda *given: TokenScores(plain_scores(*given).log_prob[:, None]),
    "no entropy": lambda *given: plain_scores(*given)._replace(entropy=None),
    "detached": lambda *given: TokenScores(*(t if t is None else t.detach() for t in plain_scores(*given))),
    "nan": lambda *given: TokenScores(*(t if t is None else t * float("nan") for t in plain_scores(*given))),
}


OF_GRADIENTS = {
    "losses": ("float64", "upstream factor", "second backward", "accumulation", "all ignored"),
    "scores": ("float64", "both gradients", "in any batch", "no token", "frozen head"),
}
RIGHT = {"zero": ("all ignored", "second backward")}
"""Of no token the loss is 0, and so is twice its gradient."""


@pytest.mark.parametrize(
    ("part", "adapter"),
    [
        *(("losses", Adapter(kind, function)) for kind, function in NO_LOSS.items()),
        *(("scores", ScoreAdapter(kind, function)) for kind, function in NO_SCORES.items()),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_what_is_no_loss_or_no_scores_fails_every_check_of_gradients(part, adapter):
    names = [name for name in OF_GRADIENTS[part] if name not in RIGHT.get(adapter.name, ())]
    found = {name: BY_PART[part][name](adapter) for name in names}
    assert {name: finding.verdict for name, finding in found.items()} == dict.fromkeys(names, "fail")
    assert all(finding.reproduction.startswith("import torch\n") for finding in found.values())


def test_scores_are_said_to_have_the_same_bits_only_if_they_have():
    invariant = KNOWN_SCORES["seqpar-invariant"]

    def nearly(*given):
        scores = invariant.function(*given)
        factor = torch.ones_like(scores.log_prob)
        # The last bit of one token's, unless it is alone with seven others
        factor[0] += torch.finfo(factor.dtype).eps * (len(factor) > 8)
        return scores._replace(log_prob=scores.log_prob * factor)

    found = [OF_SCORES["in any batch"](adapter) for adapter in (invariant, replace(invariant, function=nearly))]
    assert [finding.verdict for finding in found] == ["pass", "pass"]
    assert [finding.figure == "the same bits" for finding in found] == [True, False]


def test_a_second_backward_may_raise_any_error():
    class FreesWhatItStored(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            ctx.stored = (loss.new_ones(()),)
            return loss.clone()

        @staticmethod
        def backward(ctx, upstream):
            (one,) = ctx.stored  # the second time a TypeError
            ctx.stored = None
            return upstream * one

    adapter = Adapter("frees", lambda *given: FreesWhatItStored.apply(plain_loss(*given)))
    assert OF_LOSSES["second backward"](adapter) == Finding("pass", "raises TypeError")


def test_a_graph_that_cannot_be_retained_may_say_so_at_the_first_backward():
    """As torch does for a compiled graph with donated buffers; a loss without any backward still fails."""
    asked = []

    def refusing(*given):
        loss = plain_loss(*given)
        asked.append(loss)
        # The check's first backward alone retains the graph
        if len(asked) == 1:
            loss.register_hook(lambda _: 1 / 0)
        return loss

    assert OF_LOSSES["second backward"](Adapter("donates", refusing)) == Finding("pass", "raises ZeroDivisionError")
    assert len(asked) == 2


def test_what_a_loss_does_not_offer_is_not_held_against_it():
    modest = replace(KNOWN["torch"], offers=frozenset({"float32", "mean"}))
    findings = run(modest, QUICK)
    missing = {"float64", "bfloat16", "float16", "any number of chunks", "label smoothing", "softcap"}
    assert {name for name, finding in findings.items() if finding.verdict == "not offered"} == missing
    assert failures(findings).keys() == {"padding is not projected"}


def test_what_scores_do_not_offer_is_not_held_against_them():
    modest = ScoreAdapter("modest", NO_SCORES["no entropy"], frozenset({"float32", "gradients"}))
    checks = [check for check in NUMBERS_OF_SCORES if check.name not in ("extreme logits", "last tile", "in any batch")]
    findings = run(modest, tuple(checks))
    passed = {"float32", "log-probability", "frozen trunk", "frozen head", "second backward", "signs"}
    assert {name for name, finding in findings.items() if finding.verdict == "pass"} == passed
    assert {finding.verdict for finding in findings.values()} == {"pass", "not offered"}
    values = replace(modest, function=NO_SCORES["detached"], offers=frozenset({"float32"}))
    assert str(OF_SCORES["float32"](values)).startswith("pass: log_prob")


@pytest.mark.parametrize(
    ("adapter", "right"), [(KNOWN["seqpar"], True), (KNOWN["torch"], False), (KNOWN_SCORES["seqpar"], True)]
)
def test_the_memory_of_all_logits_is_a_failure_and_of_a_chunk_is_not(adapter, right):
    found = growth(asked(adapter, **MEASURED))
    assert isinstance(found, Growth)
    assert found.of_logits <= Growth.ALLOWED if right else found.of_logits >= 1 > Growth.ALLOWED


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("losses", "tests.conformance.planted:deaf"),
        ("scores", "tests.conformance.planted_scores:doubling"),
        ("layouts", "tests.conformance.planted_layouts:silent"),
    ],
)
def test_the_command_in_the_heading_finds_an_adapter_of_ones_own(part, own):
    adapters = [adapter_of(part, name) for name in ("torch", own)]
    command = report.heading(adapters, part).splitlines()[1].split()
    assert command[-2:] == ["torch", own]
    given = _parse(command[3:])
    assert [adapter_of(given.part, name) for name in given.names] == adapters


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("losses torch nobody", r"conformance: 'nobody' is not known; there are torch, .*seqpar-engine, and"),
        ("losses math:pi", "'math:pi' is a float; it must be"),
        ("losses nowhere:x", "'nowhere:x' cannot be loaded: No module named 'nowhere'"),
        ("losses tests.conformance.planted_scores:doubling", r"is a ScoreAdapter; it must be a conformance\.Adapter"),
        ("scores liger-float32", r"'liger-float32' is not known; there are torch, trl, .*your own ScoreAdapter"),
        ("layouts nobody", r"'nobody' is not known; there are torch, torch-loss-parallel, .*LayoutAdapter"),
    ],
)
def test_the_command_says_what_exists(arguments, said):
    with pytest.raises(SystemExit, match=said):
        main(arguments.split())


@pytest.mark.parametrize(("part", "row"), [("losses", "float32"), ("scores", "ties in top-k")])
def test_the_command_runs_a_part_and_fails_for_a_name_that_could_not_run(part, row, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    with pytest.raises(SystemExit, match=r"^conformance: not run: cce \(not installed\)$"):
        main([part, "cce"])
    printed = capsys.readouterr().out
    assert f"python -m conformance {part} cce\n" in printed
    assert f"| {row} | not measured: not installed |" in printed
    assert "No check failed." in printed


def test_a_bad_target_is_tried_in_a_new_process_where_a_fork_cannot_use_the_device(monkeypatch):
    """No GPU is needed to see that the new process finds the adapter and raises what a forked one does."""
    known = KNOWN["seqpar-engine"]
    forked = OF_LOSSES["target out of range"](known)
    monkeypatch.setattr(bad_target, "DEVICE", "cuda")
    assert OF_LOSSES["target out of range"](known) == forked == Finding("pass", "raises IndexError")


def test_a_refusal_of_autograd_is_not_taken_for_a_refusal_of_a_bad_target(monkeypatch):
    monkeypatch.setattr(bad_target, "autograd_works_in_a_fork", lambda: False)
    said = bad_target.out_of_range(Problem(Adapter("mine", KNOWN["torch"].function))).figure
    assert "gave nothing: a new process does not find adapter_of('losses', 'mine'); name it as module:object" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU it is tried in a new process, which needs a name")
def test_a_bad_target_that_ends_its_process_is_no_silence():
    found = OF_LOSSES["target out of range"](Adapter("crashes", lambda *_: os._exit(3)))
    assert found == Finding("pass", "ends the process (3)")


def test_a_new_process_that_gives_a_number_or_does_not_find_the_adapter_is_a_failure(monkeypatch):
    monkeypatch.setattr(bad_target, "DEVICE", "cuda")
    planted = OF_LOSSES["target out of range"](adapter_of("losses", "tests.conformance.planted:any_target"))
    assert planted.verdict == "fail"
    assert "target 128 of 128 classes gave" in planted.figure
    lost = OF_LOSSES["target out of range"](Adapter("mine", KNOWN["torch"].function))
    assert lost.verdict == "fail"
    assert "a new process does not find adapter_of('losses', 'mine'); name it as module:object" in lost.figure


def test_on_a_gpu_tensors_are_there():
    """The meta device stands for a GPU: its tensors have no numbers, but they are elsewhere."""
    x = Problem(KNOWN["torch"], device="meta")
    assert {t.device.type for t in x.made().values()} == {"meta"}
    assert "device='meta'" in repr(x)


def test_a_report_has_the_table_and_the_lines_that_repeat_each_failure():
    adapter = adapter_of("losses", "tests.conformance.planted:dropped_chunk")
    findings = {adapter.name: run(adapter, (OF_LOSSES["float64"],))}
    said = report.table(PARTS["losses"], findings, report.figures) + report.reproductions(findings)
    assert "| | dropped_chunk |\n|---|---|\n| float64 | **fail: " in said
    assert said.count("```python\nimport torch") == 1
    assert said.splitlines()[-2].startswith("print(checks.of_dtype(Problem(adapter=adapter_of('losses', 'tests.")
    assert report.reproductions({"x": {}}) == "No check failed."


def test_no_peer_is_imported_before_it_runs_and_seqpar_does_not_import_the_kit():
    code = """
import sys, seqpar
seqpar.LossCompute
assert not [name for name in sys.modules if name.startswith("seqpar.testing")]
import conformance
peers = {"liger_kernel", "cut_cross_entropy", "torchtune", "trl", "verl"}
assert not (peers | {"triton", "transformers", "hypothesis"}) & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_adapter_of_ones_own_is_a_name_and_a_function():
    mine = Adapter("mine", KNOWN["torch"].function)
    assert mine.offers == EVERYTHING
    assert run(mine, (OF_LOSSES["float64"],))["float64"].verdict == "pass"
    assert {*run(replace(mine, why_not=lambda: "needs a GPU")).values()} == {
        replace(run(mine, (OF_LOSSES["float64"],))["float64"], verdict="not measured", figure="needs a GPU")
    }


def test_an_adapter_of_scores_of_ones_own_is_a_name_and_a_function_of_a_few_lines():
    def scores(hidden, weight, target, bias, options):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return TokenScores(log_prob=-torch.nn.functional.cross_entropy(logits, target, reduction="none"))

    mine = ScoreAdapter("mine", scores, offers=frozenset({"float64", "bias", "gradients"}))
    assert run(mine, (OF_SCORES["float64"],))["float64"].verdict == "pass"
    assert ScoreAdapter("all", scores).offers == ALL_SCORES
    assert {f.figure for f in run(replace(mine, why_not=lambda: "needs a GPU")).values()} == {"needs a GPU"}
