"""The address of the service."""

from __future__ import annotations

import pytest

from recipes.translation.errors import ConfigError
from recipes.translation.serve.server import listening, names_of


@pytest.mark.parametrize("host", ["no host", "a..b", "a" * 70])  # the last of which Python cannot encode
def test_a_host_that_is_no_address_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--host {host} --port 0 cannot be used: ."):
        listening(host, 0)


def test_a_port_in_use_is_one_line() -> None:
    with listening("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--host 127.0.0.1 --port {port} cannot be used: it is in use: name another"
        ):
            listening("127.0.0.1", port)


def test_an_address_of_another_machine_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 --port 0 cannot be used: Cannot assign"):
        listening("192.0.2.1", 0)


def test_what_only_this_machine_can_reach_answers_only_to_its_names() -> None:
    for host, names in (("127.0.0.1", ["localhost", "127.0.0.1", "[::1]", "127.0.0.1"]), ("0.0.0.0", ["*"])):
        with listening(host, 0) as taken:
            assert names_of(taken) == names
