"""The least that receiving a body costs: a thread that does nothing else with what it reads."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_BUFFER: Final = 1 << 18  # bytes read at once, all of them to the same place
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BareReceiver:
    """Reads bodies to their end, of one connection after the other, and answers nothing."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.cpu = 0.0  # seconds of its thread so far
        self._listener = listener

    def run(self) -> None:
        """Serve until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                began = time.thread_time()
                _read_request(connection)
                connection.sendall(_ANSWER)
            self.cpu += time.thread_time() - began


def _read_request(connection: socket.socket) -> None:
    buffer = bytearray(_BUFFER)
    head = connection.recv(_BUFFER)
    while b"\r\n\r\n" not in head:
        head += connection.recv(_BUFFER)
    head, _, begun = head.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    left = (int(length[1]) if length else 0) - len(begun)
    while left > 0 and (count := connection.recv_into(buffer)):
        left -= count


@contextmanager
def bare_receiver() -> Iterator[BareReceiver]:
    """Run one for the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = BareReceiver(listener)
        threading.Thread(target=receiver.run, daemon=True).start()
        try:
            yield receiver
        finally:
            listener.shutdown(socket.SHUT_RDWR)
