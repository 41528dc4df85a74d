"""The conformance suite passes what is right and catches every planted mistake with the check that is about it."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import EVERYTHING, Adapter, adapter_of, bad_target, report, run
from conformance.__main__ import _parse, main
from conformance.checks import CHECKS, MEASURED
from conformance.finding import Finding, RaisedError
from conformance.memory import Growth, growth
from conformance.parts import PARTS
from conformance.peers import KNOWN
from conformance.plain import plain_loss
from conformance.problem import Problem, asked
from tests.conformance.planted import MISTAKES

pytestmark = pytest.mark.unswitched

ROOT = Path(__file__).parents[2]
NUMBERS = tuple(check for check in CHECKS if not check.is_cost)
QUICK = tuple(check for check in CHECKS if check.name != "memory by rows")
BY_NAME = {check.name: check for check in CHECKS}


def failures(findings):
    return {name: finding.figure for name, finding in findings.items() if finding.verdict == "fail"}


@pytest.mark.parametrize(("name", "checks"), [("torch", NUMBERS), ("seqpar", QUICK), ("seqpar-engine", QUICK)])
def test_plain_torch_and_seqpar_fail_nothing(name, checks):
    findings = run(KNOWN[name], checks)
    assert failures(findings) == {}
    offered = {"any number of chunks"} if name == "torch" else set()
    assert {n for n, f in findings.items() if f.verdict != "pass"} == offered


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_check_of_a_dtype_shows_the_error_of_each_part(dtype):
    figure = BY_NAME[dtype](KNOWN["seqpar"]).figure
    assert re.search(r"; loss [\d.e+-]+, hidden [\d.e+-]+, weight [\d.e+-]+, bias [\d.e+-]+$", figure)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught_by_the_check_about_it_and_repeated_by_its_lines(name, capsys):
    adapter = adapter_of("losses", f"tests.conformance.planted:{name}")
    about = MISTAKES[name][0]
    finding = BY_NAME[about](adapter)
    assert finding.verdict == "fail", finding
    if name == "no_smoothing":
        assert finding.figure == "NotImplementedError: no smoothing"
        with pytest.raises(RaisedError) as raised:
            exec(finding.reproduction, {})
        assert isinstance(raised.value.__cause__, NotImplementedError)
    else:
        exec(finding.reproduction, {})
        assert capsys.readouterr().out == f"{finding}\n"
    if about not in ("float32", "float64"):
        assert BY_NAME["float32"](adapter).verdict == "pass"


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


@pytest.mark.parametrize("kind", NO_LOSS)
def test_what_is_no_loss_fails_every_check_of_its_gradients(kind):
    names = ["float64", "upstream factor", "second backward", "accumulation", "all ignored"]
    if kind == "zero":
        names.remove("all ignored")  # there it is right
        names.remove("second backward")  # twice 0 is 0
    found = {name: BY_NAME[name](Adapter(kind, NO_LOSS[kind])) for name in names}
    assert {name: finding.verdict for name, finding in found.items()} == dict.fromkeys(names, "fail")
    assert all(finding.reproduction.startswith("import torch\n") for finding in found.values())


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
    assert BY_NAME["second backward"](adapter) == Finding("pass", "raises TypeError")


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

    assert BY_NAME["second backward"](Adapter("donates", refusing)) == Finding("pass", "raises ZeroDivisionError")
    assert len(asked) == 2


def test_what_is_not_offered_is_not_held_against_it():
    modest = replace(KNOWN["torch"], offers=frozenset({"float32", "mean"}))
    findings = run(modest, QUICK)
    missing = {"float64", "bfloat16", "float16", "any number of chunks", "label smoothing", "softcap"}
    assert {name for name, finding in findings.items() if finding.verdict == "not offered"} == missing
    assert failures(findings).keys() == {"padding is not projected"}


def test_the_memory_of_all_logits_is_a_failure_and_of_a_chunk_is_not():
    right, wrong = (growth(asked(KNOWN[name], **MEASURED)) for name in ("seqpar", "torch"))
    assert isinstance(right, Growth)
    assert isinstance(wrong, Growth)
    assert right.of_logits <= Growth.ALLOWED < 1 <= wrong.of_logits


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


def test_the_command_says_what_exists_and_what_is_not_installed(capsys, monkeypatch):
    with pytest.raises(SystemExit, match=r"conformance: 'nobody' is not known; there are torch, .*seqpar-engine, and"):
        main(["losses", "torch", "nobody"])
    with pytest.raises(SystemExit, match="'math:pi' is a float; it must be"):
        main(["losses", "math:pi"])
    with pytest.raises(SystemExit, match="'nowhere:x' cannot be loaded: No module named 'nowhere'"):
        main(["losses", "nowhere:x"])
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    with pytest.raises(SystemExit, match=r"^conformance: not run: cce \(not installed\)$"):
        main(["losses", "cce"])
    printed = capsys.readouterr().out
    assert "| float32 | not measured: not installed |" in printed
    assert "No check failed." in printed


def test_a_bad_target_is_tried_in_a_new_process_where_a_fork_cannot_use_the_device(monkeypatch):
    """No GPU is needed to see that the new process finds the adapter and raises what a forked one does."""
    known = KNOWN["seqpar-engine"]
    forked = BY_NAME["target out of range"](known)
    monkeypatch.setattr(bad_target, "DEVICE", "cuda")
    assert BY_NAME["target out of range"](known) == forked == Finding("pass", "raises IndexError")


def test_a_refusal_of_autograd_is_not_taken_for_a_refusal_of_a_bad_target(monkeypatch):
    monkeypatch.setattr(bad_target, "autograd_works_in_a_fork", lambda: False)
    said = bad_target.out_of_range(Problem(Adapter("mine", KNOWN["torch"].function))).figure
    assert "gave nothing: a new process does not find adapter_of('losses', 'mine'); name it as module:object" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU it is tried in a new process, which needs a name")
def test_a_bad_target_that_ends_its_process_is_no_silence():
    found = BY_NAME["target out of range"](Adapter("crashes", lambda *_: os._exit(3)))
    assert found == Finding("pass", "ends the process (3)")


def test_a_new_process_that_gives_a_number_or_does_not_find_the_adapter_is_a_failure(monkeypatch):
    monkeypatch.setattr(bad_target, "DEVICE", "cuda")
    planted = BY_NAME["target out of range"](adapter_of("losses", "tests.conformance.planted:any_target"))
    assert planted.verdict == "fail"
    assert "target 128 of 128 classes gave" in planted.figure
    lost = BY_NAME["target out of range"](Adapter("mine", KNOWN["torch"].function))
    assert lost.verdict == "fail"
    assert "a new process does not find adapter_of('losses', 'mine'); name it as module:object" in lost.figure


def test_on_a_gpu_tensors_are_there():
    """The meta device stands for a GPU: its tensors have no numbers, but they are elsewhere."""
    x = Problem(KNOWN["torch"], device="meta")
    assert {t.device.type for t in x.made().values()} == {"meta"}
    assert "device='meta'" in repr(x)


def test_a_report_has_the_table_and_the_lines_that_repeat_each_failure():
    adapter = adapter_of("losses", "tests.conformance.planted:dropped_chunk")
    findings = {adapter.name: run(adapter, CHECKS[:1])}
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
    assert run(mine, CHECKS[:1])["float64"].verdict == "pass"
    assert {*run(replace(mine, why_not=lambda: "needs a GPU")).values()} == {
        replace(run(mine, CHECKS[:1])["float64"], verdict="not measured", figure="needs a GPU")
    }
