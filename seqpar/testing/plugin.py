"""Provide pytest with one fixture, `rank_pool`: live ranks over gloo for the tests of your own losses.

    def work(rank, world, x):                    # module-level; runs in every rank
        ...

    def test_two_ranks_agree(rank_pool):
        first, second = rank_pool(2, work, x)    # the ranks' results; assert here, in the parent

pytest loads this wherever seqpar is installed. Your own fixture with that name overrides it. Nothing is imported and no
process is started before the first test that uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., list[Any]]]:
    """Return `rank_pool(world, function, *arguments, **keywords)`, which returns the function's results in rank order.

    See `seqpar.testing.ranks.ranks` for its arguments. If a rank raises an error or dies, the test fails with its
    traceback (`seqpar.testing.ranks.RankError`), and the next call starts new processes. They end with the session.
    """
    from seqpar.testing.ranks import close_all, ranks

    yield ranks
    close_all()
