"""Names that nobody answers for hold up neither each other nor anything else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator

import pytest
import trio
import trio.testing

from tgi_trio.process.name_lookups import MOST_OF_ONE, NameThreads, connect_by_name

REAL = socket.getaddrinfo
pytestmark = pytest.mark.trio


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Names that begin with `silent` are not answered; yields how often one was asked for."""
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def resolve(host: bytes | str, *rest: int) -> object:
        name = host.decode() if isinstance(host, bytes) else host
        if threading.current_thread() is threading.main_thread():  # whether it is an address
            return REAL(host, *rest)
        if not name.startswith("silent"):
            return REAL("127.0.0.1", *rest)
        asked.release()
        may_answer.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield asked
    may_answer.set()


async def give_up(names: Iterable[str], silence: threading.Semaphore, asked: int) -> None:
    """Look names up at the same time, until threads have `asked` for so many, and give them up."""
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(trio.socket.getaddrinfo, name, 80)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(asked):
            assert silence.acquire(timeout=60)
        nursery.cancel_scope.cancel()


async def test_one_that_is_not_answered_takes_two_threads(silence: threading.Semaphore) -> None:
    trio.socket.set_custom_hostname_resolver(NameThreads())
    others = trio.to_thread.current_default_thread_limiter()
    await give_up(["silent.example"] * 200, silence, MOST_OF_ONE)
    assert not silence.acquire(blocking=False)
    assert others.borrowed_tokens == 0
    with trio.fail_after(10):  # neither is another name kept waiting
        found = await trio.socket.getaddrinfo("known.example", 80, type=socket.SOCK_STREAM)
    assert [where for *_, where in found] == [("127.0.0.1", 80)]


async def test_many_that_are_not_answered_take_no_threads_of_others(
    silence: threading.Semaphore,
) -> None:
    threads = NameThreads()
    trio.socket.set_custom_hostname_resolver(threads)
    others = trio.to_thread.current_default_thread_limiter()
    names = [f"silent{n}.example" for n in range(int(others.total_tokens) + 8)]
    await give_up(names, silence, len(names))
    assert others.borrowed_tokens == 0
    assert await trio.to_thread.run_sync(lambda: "a turn") == "a turn"


async def test_a_name_is_asked_for_again_once_its_threads_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [socket.gaierror(socket.EAI_AGAIN, "not now") for _ in range(MOST_OF_ONE * 2)]

    def resolve(host: bytes, *rest: int) -> object:
        if threading.current_thread() is threading.main_thread():
            return REAL(host, *rest)
        if failures:
            raise failures.pop()
        return REAL("127.0.0.1", *rest)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    trio.socket.set_custom_hostname_resolver(NameThreads())
    for _ in range(MOST_OF_ONE * 2):
        with pytest.raises(socket.gaierror, match="not now"):
            await trio.socket.getaddrinfo("known.example", 80)
    with trio.fail_after(10):
        assert await trio.socket.getaddrinfo("known.example", 80)
    assert (await NameThreads().getnameinfo(("127.0.0.1", 80), socket.NI_NUMERICHOST))[0] == (
        "127.0.0.1"
    )


@pytest.mark.parametrize("name", ["a..b", f"{'a' * 64}.example", ".", "\u00e9..b"])
@pytest.mark.parametrize("own", [False, True], ids=["trio's threads", "ours"])
async def test_what_can_be_no_name_cannot_be_reached(name: str, own: bool) -> None:
    if own:
        trio.socket.set_custom_hostname_resolver(NameThreads())
    with pytest.raises(OSError, match="can be no name of a host") as raised:
        await connect_by_name(name, 80)
    assert raised.value.errno == socket.EAI_NONAME
