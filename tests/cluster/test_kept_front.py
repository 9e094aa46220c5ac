"""The front that a cluster keeps: started again when it ends, told once to stop."""

from __future__ import annotations

import signal
import socket
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tgi_trio.cli.cluster import find_front
from tgi_trio.cli.options import ClusterOptions
from tgi_trio.cluster.supervised_front import BACK_OFF, SupervisedFront, front_words, start_front
from tgi_trio.errors import ConfigurationError
from tgi_trio.testing.ports import reserve_port


class Fake:
    def __init__(self) -> None:
        self.code: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)


def test_it_is_started_again_and_waits_longer_every_time() -> None:
    started: list[Fake] = []

    def start() -> Fake:
        started.append(Fake())
        return started[-1]

    front, now = SupervisedFront(start), 0.0
    front.look(now)
    for wait in BACK_OFF[1:]:
        started[-1].code = 1
        front.look(now)
        assert front.ended
        front.look(now + wait - 0.01)
        assert front.ended
        now += wait
        front.look(now)
        assert not front.ended
    now += 1000.0
    started[-1].code = 1
    front.look(now)  # it had run for long
    assert not front.ended
    front.close()
    front.close()
    assert started[-1].signals == [signal.SIGTERM]
    started[-1].code = 0
    front.look(now + 1000.0)
    assert front.ended and len(started) == len(BACK_OFF) + 1


def test_it_is_told_to_end_if_the_order_comes_while_it_is_started() -> None:
    """By the handler of a signal, which is called in the middle of anything."""
    started: list[Fake] = []

    def start() -> Fake:
        front.close()
        started.append(Fake())
        return started[-1]

    front = SupervisedFront(start)
    front.look(0.0)
    assert [each.signals for each in started] == [[signal.SIGTERM]]
    started[0].code = -signal.SIGTERM
    front.look(1.0)
    assert front.ended and len(started) == 1


@pytest.mark.system
def test_it_is_a_front_and_ends_when_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    file.write_text("")
    with reserve_port() as port:
        with socket.create_server(("127.0.0.1", port)):
            with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}"):
                find_front(ClusterOptions(front_bind=f"127.0.0.1:{port}"))
        front = SupervisedFront(partial(start_front, front_words(f"127.0.0.1:{port}", file, None)))
        front.look(0.0)
        end = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=30) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert time.monotonic() < end and not front.ended
                time.sleep(0.02)
        front.close()
        while not front.ended:
            assert time.monotonic() < end
            front.look(1.0)
            time.sleep(0.02)


def test_the_servers_secret_is_its_own(tmp_path: Path) -> None:
    assert find_front(ClusterOptions(no_front=True)) is None
    missing = str(tmp_path / "none")
    options = ClusterOptions(
        front_bind="127.0.0.1:0", server=("org/name", "--cluster-secret-file", missing)
    )
    with pytest.raises(ConfigurationError, match="--cluster-secret-file"):
        find_front(options)
    words = front_words("a:1", Path("r"), Path("s"))
    assert words == ["front", "--bind", "a:1", "--replicas-file", "r", "--cluster-secret-file", "s"]
