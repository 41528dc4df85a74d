"""Users' tests get live ranks from a pytest plugin: held by running pytest on a user's file."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]

USERS_FILE = """
import os
import torch
import torch.distributed as dist

def total(rank, world, x):
    summed = torch.tensor([float(rank + x)])
    dist.all_reduce(summed)
    return summed.item(), os.getpid()

def raises_on_one(rank, world):
    if rank == 1:
        raise KeyError("only on rank one")

def dies(rank, world):
    if rank == 0:
        os._exit(3)

def cannot_be_sent(rank, world):
    return lambda: 0

def test_the_ranks_are_one_group(rank_pool):
    (first, _), (second, _) = rank_pool(2, total, 10)
    assert first == second == 21

def test_a_rank_raises(rank_pool):
    rank_pool(2, raises_on_one)

def test_a_rank_dies(rank_pool):
    rank_pool(2, dies)

def test_what_a_rank_returns_cannot_be_sent(rank_pool):
    rank_pool(2, cannot_be_sent)

def test_the_next_call_has_new_ranks_that_stay(rank_pool):
    assert rank_pool(2, total, 0) == rank_pool(2, total, 0)
"""


@pytest.fixture
def users_pytest(pytester, monkeypatch):
    """pytest on a file, in a process of its own, with our plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(source):
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", "seqpar.testing.plugin", "-v")

    return run


def test_a_users_test_has_ranks_whose_failures_are_shown_and_do_not_outlive_their_test(users_pytest):
    result = users_pytest(USERS_FILE)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(["*::test_the_ranks_are_one_group PASSED*", "*::test_the_next_call_has_new* PASSED*"])
    said = result.stdout.str()
    assert "rank 1: Traceback" in said
    assert "in raises_on_one" in said
    assert "KeyError: 'only on rank one'" in said
    assert "rank 0: the process ended with 3" in said
    assert "pickle local object 'cannot_be_sent" in said


def test_pytest_shows_the_users_own_line_and_then_the_cause_and_no_source_of_ours(users_pytest):
    result = users_pytest("""
        import torch
        from torch import nn
        from seqpar.testing import assert_numerical_gradients, assert_same_gradients, assert_same_loss
        from seqpar.testing import assert_same_results, plain_loss

        def halved(*given):
            return plain_loss(*given) / 2

        criterion, w = nn.CrossEntropyLoss(reduction="sum"), torch.ones(3).double().requires_grad_()

        def test_a_loss():
            assert_same_loss(nn.Linear(2, 5), criterion, torch.ones(4, 2), torch.arange(4), loss=halved)

        def test_ranks():
            assert_same_loss(nn.Linear(2, 5), criterion, torch.ones(4, 2), torch.arange(4), loss=halved, ranks=2)

        def test_refused():
            assert_same_loss(nn.Linear(2, 5), criterion, torch.ones(2, 2), torch.arange(2), ranks=2)

        def test_gradients():
            assert_same_gradients(lambda: w.sum() / 2, lambda: w.sum(), {"w": w})

        def test_results():
            assert_same_results((w.sum() / 2, {"w": w}), (w.sum(), {"w": w}))

        def test_numerical():
            assert_numerical_gradients(lambda: (w * w.detach()).sum(), {"w": w})
    """)
    result.assert_outcomes(failed=6)
    said = result.stdout.str()
    result.stdout.fnmatch_lines(["E * AssertionError: Likely cause: accumulation: all gradients are 1/2 of the plain*"])
    assert "<built-in method" not in said
    sources = re.findall(r"^(\S*\.py):\d+: ", said, re.MULTILINE)
    assert {Path(source).name for source in sources} == {Path(sources[0]).name}
    assert len(sources) == 6


def test_a_fixture_of_the_users_own_goes_before_ours_and_torch_is_not_loaded(users_pytest):
    result = users_pytest("""
        import sys
        import pytest

        @pytest.fixture
        def rank_pool():
            return "mine"

        def test_it_is_mine(rank_pool):
            assert rank_pool == "mine"
            assert "seqpar.testing.plugin" in sys.modules
            assert "torch" not in sys.modules
    """)
    result.assert_outcomes(passed=1)


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert hasattr(import_module(project["entry-points"]["pytest11"]["seqpar"]), "rank_pool")


def test_names_are_loaded_when_asked_for_and_files_do_not_hide_them():
    code = """
import sys, seqpar
import seqpar.testing.ranks
assert "torch" not in sys.modules
from seqpar.linear.cross_entropy import linear_cross_entropy
import seqpar.multi_device.data_parallel
assert seqpar.linear_cross_entropy is linear_cross_entropy and callable(seqpar.data_parallel)
assert seqpar.core.chunks.rows_per_chunk and len({*seqpar.__all__}) == len(seqpar.__all__)
assert {*seqpar.__all__} <= {*dir(seqpar)} and not hasattr(seqpar, "nothing")
from seqpar import *
assert LossCompute is seqpar.LossCompute
assert "hypothesis" not in sys.modules and "seqpar.testing.gradients" not in sys.modules
assert seqpar.testing.plain_loss and seqpar.testing.assert_same_results
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
