"""Tests of packages that no extra installs are collected where those can be imported; and ranks of a trainer's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import pytest

from seqpar.testing.ranks import Pool

PACKAGES = ("axolotl", "deepspeed", "eole", "nemo_automodel", "onmt", "prime_rl", "ray", "torchtitan", "xtuner")
NAMES = {name: name for name in PACKAGES} | {"ms_swift": "swift"}
collect_ignore = [f"test_{name}_itself.py" for name, package in NAMES.items() if find_spec(package) is None]


@pytest.fixture
def own_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As `ranks(world, function, *arguments)`, in processes of the test's own: a trainer leaves state behind in its."""
    with ExitStack() as pools:
        yield lambda world, *call: pools.enter_context(closing(Pool(world))).call(*call)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    """Two for all tests of a file, for the same reason."""
    with closing(Pool(2)) as pool:
        yield pool
