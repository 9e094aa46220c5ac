"""The signals that end a program, and those that it has been told to let be."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence

import pytest
import trio

from tgi_trio.process.signals import received_signals, run_to_its_end


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in received_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert received_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_names_that_nobody_answers_take_no_threads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, may_answer, taken = socket.getaddrinfo, threading.Event(), []

    def resolve(host: bytes | str, *rest: int) -> object:
        if threading.current_thread() is threading.main_thread():  # whether it is an address
            return real(host, *rest)
        may_answer.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def look_names_up(early: Sequence[int]) -> None:
        with trio.move_on_after(0.05) as patience:
            await trio.socket.getaddrinfo("replica.example", 80)
        assert patience.cancelled_caught
        taken.append(trio.to_thread.current_default_thread_limiter().borrowed_tokens)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    before = {number: signal.getsignal(number) for number in received_signals()}
    try:
        run_to_its_end(look_names_up)
    finally:
        may_answer.set()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert taken == [0]
