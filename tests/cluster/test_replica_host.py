"""A server is started, watched and stopped; a program of a few lines stands in for it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tgi_trio.cluster import replica_host
from tgi_trio.cluster.divided import Divided
from tgi_trio.cluster.replica_host import Placed, ReplicaHost, Serves
from tgi_trio.cluster.scaling import ReplicaLoad

SERVER = """#!{python}
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

words = sys.argv
Path({words!r}).write_text(" ".join(words[1:]))
if "--broken" in words:
    sys.exit(1)
port = int(words[words.index("--port") + 1])
try:
    socket.socket().bind(("127.0.0.1", port))
except OSError as error:
    Path({words!r}).with_name("taken").write_text(error.strerror)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"tgi_queue_size 3\\ntgi_kv_blocks_total 4\\ntgi_kv_blocks_free 3\\n")


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def words_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have a stand-in started instead of Python; yields where it writes its words."""
    path, program = tmp_path / "words", tmp_path / "server"
    program.write_text(SERVER.format(python=sys.executable, words=str(path)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(replica_host, "LOOK_S", 0.02)
    monkeypatch.setattr(replica_host, "LOAD_S", 0.02)
    yield path


def test_an_address_comes_first_then_loads_and_the_end(words_file: Path) -> None:
    host = ReplicaHost()
    saying = host.run("127.0.0.1", ["--model-id", "a/b"])
    assert next(saying) == Placed()
    serves = next(saying)
    assert isinstance(serves, Serves) and serves.address.startswith("127.0.0.1:")
    port = serves.address.rpartition(":")[2]
    assert words_file.read_text() == (
        f"-m tgi_trio.cluster.kept_server {os.getpid()} "
        f"serve --hostname 127.0.0.1 --port {port} --model-id a/b"
    )
    assert words_file.with_name("taken").read_text() == "Address already in use"  # for others
    assert next(saying) == ReplicaLoad(waiting=3, running=0, kv_used=0.25)
    host.stop()
    assert all(isinstance(said, ReplicaLoad) for said in saying)  # and then no more


def test_a_server_that_does_not_start_says_nothing(words_file: Path) -> None:
    assert list(ReplicaHost().run("127.0.0.1", ["--broken"])) == [Placed()]


def test_a_server_that_is_told_to_stop_before_it_is_started_ends(words_file: Path) -> None:
    """It is told once, and its machine may just have been found."""
    host = ReplicaHost()
    saying = host.run("127.0.0.1", [])
    assert next(saying) == Placed()
    host.stop()
    assert [said for said, _ in zip(saying, range(9), strict=False)] == []


def test_the_server_of_a_divided_one_says_where_its_ranks_are_waited_for(words_file: Path) -> None:
    divided = Divided(nodes=2, ranks=4)
    placed, *_ = ReplicaHost().run("127.0.0.1", ["--broken"], divided)
    assert isinstance(placed, Placed) and placed.ranks_at is not None
    assert words_file.read_text().endswith(
        f"--broken --num-shard 4 --remote-ranks 2 --rank-address {placed.ranks_at}"
    )


def test_nobody_listens_any_more_and_the_server_ends(words_file: Path) -> None:
    host = ReplicaHost()
    saying = host.run("127.0.0.1", [])
    assert [type(next(saying)) for _ in range(2)] == [Placed, Serves]
    server = host._server
    assert server is not None and server.poll() is None
    saying.close()  # type: ignore[attr-defined]
    assert server.poll() is not None


@pytest.mark.parametrize(
    "begun", [b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ntgi"]
)
def test_a_page_that_breaks_off_is_none(begun: bytes) -> None:
    """A server that is killed while it says what load it has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(begun)

        thread = threading.Thread(target=answer)
        thread.start()
        assert replica_host._get(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics") is None
        thread.join()
