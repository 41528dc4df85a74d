"""A pytest plugin with one fixture, `rank_pool`: live ranks over gloo for the tests of your own losses.

    def work(rank, world, x):                    # module-level; runs in every rank
        ...

    def test_two_ranks_agree(rank_pool):
        first, second = rank_pool(2, work, x)    # what each rank returned; assert here, in the parent

It is loaded wherever seqpar is installed. A fixture of your own with that name goes before it. Nothing is imported and
no process is started before the first test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., list[Any]]]:
    """`rank_pool(world, function, *arguments, **keywords)`: the function's results in rank order.

    `seqpar.testing.ranks.ranks` says what it asks of the function. A rank that raises or dies fails the test with its
    traceback (`seqpar.testing.ranks.RankError`); the next call has new processes. They end with the session.
    """
    from seqpar.testing.ranks import close_all, ranks

    yield ranks
    close_all()
