"""The address of the service."""

from __future__ import annotations

import pytest

from recipes.translation.errors import ConfigError
from recipes.translation.serve.server import bound


@pytest.mark.parametrize("host", ["no host", "a..b"])  # which the system's resolver refuses, and Python's encoding
def test_a_host_that_is_no_address_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--host {host} is not an address of this machine: "):
        bound(host, 0)


def test_a_port_in_use_is_one_line() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use: name another one with --port"):
            bound("127.0.0.1", port)


def test_an_address_of_another_machine_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 --port 0 cannot be used: "):
        bound("192.0.2.1", 0)
