"""What a kind of device can do stands in one table; everybody else asks it."""

import ast
from pathlib import Path

import pytest
import torch

import seqpar
from seqpar.core.device_facts import FACTS, DeviceFacts, current, may_read

SOURCES = Path(seqpar.__file__).parent
KINDS = {"cpu", "cuda", "hip", "meta", "mps", "xla", "xpu"}


def names_a_kind(node):
    return any(isinstance(part, ast.Constant) and part.value in KINDS for part in ast.walk(node))


def comparisons(source):
    """The lines that ask a device, or a tensor, which kind it is."""
    for node in ast.walk(ast.parse(source)):
        asks = isinstance(node, ast.Compare) and names_a_kind(node)
        if asks or (isinstance(node, ast.Attribute) and node.attr in {f"is_{kind}" for kind in KINDS - {"meta"}}):
            yield node.lineno


def test_nobody_else_compares_the_type_of_a_device():
    found = {
        path.relative_to(SOURCES): [*comparisons(path.read_text())]
        for path in SOURCES.rglob("*.py")
        if path.name != "device_facts.py"
    }
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "code", ['x.device.type == "cpu"', 'kind not in ("cuda", "xpu")', "x.is_cuda", "y.is_cpu or z"]
)
def test_a_comparison_is_seen(code):
    assert [*comparisons(code)] == [1]


def test_of_a_backend_without_a_row_no_more_is_known_than_that_it_computes():
    assert FACTS["npu"] == DeviceFacts()
    assert "npu" not in FACTS
    assert not FACTS["npu"].is_host
    assert not FACTS["npu"].has_kernels
    assert FACTS["npu"].has_float64


@pytest.mark.unswitched
def test_a_check_reads_numbers_on_the_host_but_not_on_an_accelerator_or_while_a_compiler_traces(monkeypatch):
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert may_read(here)
    assert not may_read(elsewhere)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not may_read(here)


@pytest.mark.unswitched
def test_the_host_is_never_the_current_device(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.accelerator, "device_index", asked.append)
    with current(torch.device("cpu")):
        assert asked == []
    current(torch.device("cuda", 3))
    assert asked == [3]


@pytest.mark.parametrize(
    ("fact", "expected"), [({"has_float64": True}, torch.float64), ({"has_float64": False}, torch.float32)]
)
def test_vectors_are_summed_in_float64_where_the_device_has_it(fact, expected, monkeypatch):
    from seqpar.core.stored_gradients import _sum_dtype

    kind = torch.zeros(1).device.type
    monkeypatch.setitem(FACTS, kind, FACTS[kind]._replace(**fact))
    assert _sum_dtype(torch.zeros(3)) == expected
    assert _sum_dtype(torch.zeros(3, 3)) == torch.float32
