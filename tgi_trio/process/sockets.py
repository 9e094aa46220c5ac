"""Addresses and certificates: what can go wrong with them is known before anything is loaded."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tgi_trio.errors import ConfigurationError, tell_reason
from tgi_trio.whole_files import SMALL, check_file

UNIX = "unix:"
_BOUND = ["00000000", "01"]  # flags without __SO_ACCEPTCON, not connected: /proc/net/unix


def bind(addresses: Sequence[str], flag: str = "") -> list[socket.socket]:
    """Bind each of `addresses`: `host:port`, `[host]:port` or `unix:path`. They do not listen yet.

    Raises ConfigurationError when an address cannot be had; it names the `flag` that they come
    from, or those of a server's address.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            if address.startswith(UNIX):
                sockets.append(_bind_unix(address.removeprefix(UNIX)))
            else:
                # Alone, `[::]` takes IPv4 as well; beside `0.0.0.0` it must not.
                sockets.append(_bind_tcp(address, len(addresses) == 1, flag))
    except BaseException:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def start_listening(listener: socket.socket, backlog: int) -> None:
    """Listen on a socket of `bind`. What it accepts shares its option, for the next server."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen(backlog)


@contextmanager
def bind_sockets(addresses: Sequence[str], flag: str = "") -> Iterator[list[socket.socket]]:
    """Keep `addresses` bound for the length of the block; raises ConfigurationError as `bind`."""
    sockets = bind(addresses, flag)
    files = {
        path: _inode(path)
        for path in (sock.getsockname() for sock in sockets if sock.family == socket.AF_UNIX)
    }
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()
        for path, inode in files.items():
            if _inode(path) == inode:  # not removed, and not another server's by now
                with suppress(FileNotFoundError):
                    os.unlink(path)


def address_text(sock: socket.socket) -> str:
    """Return what a socket is bound to, as `bind` reads it."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"{UNIX}{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{host}:{name[1]}"


def check_certificate(certfile: Path | str | None, keyfile: Path | str | None) -> None:
    """Raise ConfigurationError where a certificate is named that cannot be used."""
    if certfile is not None:
        tls_context(certfile, keyfile)
    elif keyfile is not None:
        raise ConfigurationError("--ssl-keyfile needs --ssl-certfile: a key alone is no use")


def tls_context(certfile: Path | str, keyfile: Path | str | None) -> ssl.SSLContext:
    """Return what serves TLS; raises ConfigurationError.

    Without `keyfile` the key is looked for in `certfile`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        for path in (certfile, keyfile or certfile):
            check_file(Path(path), SMALL)
        # An empty pass phrase: otherwise OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            f"cannot use the certificate {certfile} with key {keyfile or certfile}: {_why(error)}; "
            "see --ssl-certfile and --ssl-keyfile"
        ) from error
    return context


def _why(error: OSError | ValueError) -> str:
    """Return why a certificate or its key cannot be used, without the words of a library's code."""
    if not isinstance(error, ssl.SSLError):
        return tell_reason(error)
    if error.reason:
        return error.reason.replace("_", " ").lower()
    return "one of the files holds no such thing in PEM, or a key with a pass phrase"


def _bind_tcp(address: str, both_families: bool, flag: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigurationError(
            f"cannot listen on {address}: {flag or '--port'} must be 0 to 65535"
        )
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(
            host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(
            f"cannot listen on {address}: {tell_reason(error)}; {flag or '--hostname and --bind'} "
            "can be an address of this machine, such as 0.0.0.0 or 127.0.0.1"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both_families)
        listener.bind(found)
        # Two sockets with this option may be bound to one address until one of them listens, and
        # another server would learn of us only then. Without it we are in its way from now on.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {address}: {_advice(error, flag)}") from error
    listener.setblocking(False)
    return listener


def _advice(error: OSError, flag: str) -> str:
    ports, hosts = flag or "--port or --bind", flag or "--hostname and --bind"
    texts = {
        errno.EADDRINUSE: f"another program listens there; choose another with {ports}",
        errno.EACCES: f"ports below 1024 need privileges; choose a higher one with {ports}",
        errno.EADDRNOTAVAIL: f"this machine has no such address; see {hosts}",
    }
    return texts.get(error.errno or 0, os.strerror(error.errno or 0))


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        why = error.strerror or error  # a path that is too long has no errno
        raise ConfigurationError(f"cannot listen on {UNIX}{path}: {why}; see --bind") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that is no more; raises OSError if one still has it."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    if _is_bound(path):
        raise OSError(errno.EADDRINUSE, "another server has it, and will listen there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _is_bound(path: str) -> bool:
    """Return whether a process has bound a Unix socket without listening, as a server that loads.

    Connecting to it is refused, as to a file that was left behind. Those of other network
    namespaces are not seen (proc(5), /proc/net/unix).
    """
    try:
        rows = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return False
    fields = (row.split(maxsplit=7) for row in rows)
    # Who listens is found by connecting; connections have their listener's path as well.
    bound = (each[7] for each in fields if len(each) == 8 and each[3:6:2] == _BOUND)
    return os.path.realpath(path) in map(os.path.realpath, bound)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
