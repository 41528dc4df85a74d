"""Fixtures of the tests of the testing kit."""

import pytest

from seqpar.testing import ranks as ranks_module


@pytest.fixture
def impatient_ranks(monkeypatch):
    """Ranks that wait three seconds for each other, for this test alone."""
    monkeypatch.setattr(ranks_module, "COLLECTIVE_TIMEOUT", 3.0)
    ranks_module.close_all()
    yield
    ranks_module.close_all()
