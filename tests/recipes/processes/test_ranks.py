"""Joining the other ranks, and telling them of an error, as far as one process can."""

from __future__ import annotations

import socket

import pytest

from recipes.translation.errors import ConfigError
from recipes.translation.processes.launch import launcher_words
from recipes.translation.processes.ranks import ALONE, _portable, join_ranks


@pytest.mark.parametrize("given", ["no address", "a port in use"])
def test_a_rank_that_cannot_join_says_what_to_set(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, number)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if given == "a port in use":
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with (
            pytest.raises(ConfigError, match=r"rank 0 of 2 could not join the others at .*; start every process with"),
            join_ranks(1.0),
        ):
            raise AssertionError


def test_a_process_alone_is_the_first_and_only_one_of_its_machine() -> None:
    assert ALONE.is_main
    assert (ALONE.rank, ALONE.world, ALONE.local_rank, ALONE.local_world) == (0, 1, 0, 1)


def test_an_error_that_its_message_alone_does_not_make_is_told_with_its_name() -> None:
    assert _portable(ConfigError("a is 3")) == (ConfigError, "a is 3")
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert _portable(error) == (RuntimeError, f"UnicodeDecodeError: {error}")


def test_a_launcher_that_has_ended_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr("os.getppid", lambda: 2**30)  # above the largest number of a process
    assert launcher_words() == []
