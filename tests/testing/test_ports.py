"""A held port is there for the server, and for nobody else."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from tgi_trio.testing.ports import reserve_port

IP_LOCAL_PORT_RANGE = 51  # Linux 6.3; not in the socket module


def choose_among(only: int) -> socket.socket:
    """Return a socket for which the kernel may choose no other port than `only`."""
    found = socket.socket()
    try:
        ports = struct.pack("I", only << 16 | only)
        found.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, ports)
    except OSError:
        found.close()
        pytest.skip("needs Linux 6.3")
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_listens_there_again_and_again(host: str) -> None:
    with reserve_port() as port:
        for _ in range(2):
            with socket.create_server((host, port)) as server:
                with socket.create_connection(("127.0.0.1", port)):
                    server.accept()[0].close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("reuse", [0, 1])
def test_nobody_who_asks_for_any_port_gets_it(reuse: int) -> None:
    with reserve_port() as port, choose_among(port) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        with pytest.raises(OSError) as caught:
            other.bind(("127.0.0.1", 0))
    assert caught.value.errno == errno.EADDRINUSE


def test_no_connection_has_it_as_its_own_end() -> None:
    with reserve_port() as port, socket.create_server(("127.0.0.1", 0)) as server:
        with choose_among(port) as client, pytest.raises(OSError) as caught:
            client.connect(server.getsockname())
    assert caught.value.errno == errno.EADDRNOTAVAIL
