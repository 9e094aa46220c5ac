"""Addresses to listen on, and errors that name the flag."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from tgi_trio.errors import ConfigurationError
from tgi_trio.process.sockets import bind, bind_sockets, check_certificate, start_listening
from tgi_trio.router.http.wire.server import listen
from tgi_trio.testing.ports import reserve_port

CERTIFICATE = Path(__file__).parent / "data" / "localhost.pem"
OTHER_KEY = CERTIFICATE.with_name("renewed.pem")  # a certificate, too


def test_a_port_in_use_names_the_flag():
    (first,) = listen(["127.0.0.1:0"])
    try:
        with pytest.raises(ConfigurationError, match="--port"):
            listen([f"127.0.0.1:{first.getsockname()[1]}"])
    finally:
        first.close()


def test_a_port_is_in_use_before_its_server_listens():
    with bind_sockets(["127.0.0.1:0"]) as (first,):
        address = f"127.0.0.1:{first.getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="another program listens there"):
                bind([address])
        start_listening(first, 8)
        with pytest.raises(ConfigurationError, match="another program listens there"):
            bind([address])


def test_a_port_is_free_when_its_server_has_ended():
    """Connections that the server has closed linger, and are in nobody's way."""
    with bind_sockets(["127.0.0.1:0"]) as (first,):
        start_listening(first, 8)
        address = first.getsockname()
        with socket.socket() as client:
            client.connect(address)
            first.setblocking(True)
            first.accept()[0].close()
            assert client.recv(1) == b""
    with bind_sockets([f"127.0.0.1:{address[1]}"]) as (second,):
        start_listening(second, 8)
        with socket.socket() as client:
            client.connect(address)


@pytest.mark.parametrize("bind", ["127.0.0.1:70000", "127.0.0.1:x", "no.such.host.invalid:0"])
def test_addresses_that_cannot_be_had(bind):
    with pytest.raises(ConfigurationError, match=r"--port|--hostname"):
        listen([bind])


def test_bound_sockets_refuse_until_they_listen(tmp_path):
    path = str(tmp_path / "s.sock")
    with bind_sockets(["127.0.0.1:0", f"unix:{path}"]) as (tcp, unix):
        for listener, family in ((tcp, socket.AF_INET), (unix, socket.AF_UNIX)):
            with socket.socket(family) as client, pytest.raises(ConnectionRefusedError):
                client.connect(listener.getsockname())
            start_listening(listener, 8)
            with socket.socket(family) as client:
                client.connect(listener.getsockname())
    assert not Path(path).exists()


def test_a_unix_socket_is_in_use_before_its_server_listens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a socket"
    with bind_sockets([f"unix:{path}"]) as (first,):
        for address in (f"unix:{path}", "unix:a socket"):
            with pytest.raises(ConfigurationError, match="another server has it"):
                bind([address])
        start_listening(first, 8)
        with pytest.raises(ConfigurationError, match="another server listens there"):
            bind([f"unix:{path}"])


def test_a_socket_file_that_was_left_behind_is_replaced(tmp_path):
    path = tmp_path / "s.sock"
    (dead,) = bind([f"unix:{path}"])
    dead.close()
    with bind_sockets([f"unix:{path}"]) as (listener,):
        start_listening(listener, 8)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_socket_file_of_another_server_is_left_alone(tmp_path):
    path = tmp_path / "s.sock"
    with bind_sockets([f"unix:{path}"]):
        path.rename(tmp_path / "old.sock")  # keeps the inode from being used again
        (other,) = bind([f"unix:{path}"])
    other.close()
    assert path.exists()


def test_one_address_that_cannot_be_had_frees_the_others(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        name = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigurationError, match="--bind"),
            bind_sockets(["127.0.0.1:0", f"unix:{tmp_path}/missing/s.sock"]),
        ):
            pass
        with pytest.raises(ConfigurationError, match=name), bind_sockets(["127.0.0.1:0", name]):
            pass


def test_a_name_that_nobody_knows_is_told_in_words(monkeypatch):
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    with pytest.raises(ConfigurationError, match="on nowhere:80: Name or service not known; "):
        bind(["nowhere:80"])


def test_both_families_share_a_port_when_both_are_named():
    with reserve_port() as port:
        sockets = bind([f"0.0.0.0:{port}", f"[::]:{port}"])
    assert [each.family for each in sockets] == [socket.AF_INET, socket.AF_INET6]
    for each in sockets:
        each.close()


def test_certificates_are_read_or_refused(tmp_path):
    for good in ((None, None), (CERTIFICATE, None), (CERTIFICATE, CERTIFICATE)):
        check_certificate(*good)
    with pytest.raises(ConfigurationError, match="needs --ssl-certfile"):
        check_certificate(None, CERTIFICATE)
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    none = tmp_path / "no.pem"
    for certificate, key, why in (
        (broken, None, "one of the files holds no such thing in PEM"),
        (CERTIFICATE, broken, "one of the files holds no such thing in PEM"),
        (CERTIFICATE, OTHER_KEY, "key values mismatch"),
        (none, None, f"No such file or directory: {none}"),
    ):
        with pytest.raises(ConfigurationError, match="cannot use the certificate") as error:
            check_certificate(certificate, key)
        assert f": {why}" in str(error.value) and "_ssl.c" not in str(error.value)
