"""Where a job's store listens, and over which interface."""

from __future__ import annotations

import socket

import pytest

from trainwright.distributed.network import interface_towards, listen_at, loopback_interface
from trainwright.errors import LaunchError


def test_a_listener_has_one_address() -> None:
    with listen_at("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(
            LaunchError, match=r"port \d+ of 127.0.0.1 cannot be listened on.*Set another port on every node"
        ):
            listen_at("127.0.0.1", listener.getsockname()[1])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"'192.0.2.77' is 192.0.2.77, which is not an address of this machine, but must"
    ):
        listen_at("192.0.2.77", 0)
    with listen_at("192.0.2.77", 0, else_everywhere=True) as listener:  # it may be translated on its way
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(LaunchError, match=r"main address 'no such host' is not known here.*pass the name or IP"):
        listen_at("no such host", 0)


def test_the_interface_towards_an_address_is_found() -> None:
    assert interface_towards("127.0.0.1") == loopback_interface()
    assert loopback_interface() in [name for _, name in socket.if_nameindex()]


def test_the_name_of_this_machine_is_not_taken_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]  # as Debian answers for a machine's name
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with listen_at("node01", 0, else_everywhere=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert interface_towards("node01") != loopback_interface()
    with listen_at("localhost", 0, else_everywhere=True) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"
