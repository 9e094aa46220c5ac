"""Reads N streams and throws them away: `python -m bench.step_gap.sink PORT N [CPU]`."""

from __future__ import annotations

import json
import os
import select
import socket
import sys

BODY = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 39_000}}).encode()
HEAD = b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def main() -> None:
    """Open the streams, then read until every connection is closed."""
    port, streams = int(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        os.sched_setaffinity(0, {int(sys.argv[3])})
    poller = select.epoll()
    connections = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        connection.setblocking(False)
        connections[connection.fileno()] = connection
        poller.register(connection.fileno(), select.EPOLLIN)
    received = 0
    while connections:
        for fd, _ in poller.poll():
            data = connections[fd].recv(1 << 18)
            if not data:
                poller.unregister(fd)
                connections.pop(fd).close()
            received += data.count(b"data:")
    print(received)


if __name__ == "__main__":
    main()
