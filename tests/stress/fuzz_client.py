"""Carries attacks to a server and reads what it says."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from tests.stress.fuzz_attacks import Attack, draw

HANG = 120.0  # seconds without the answer that must come
WHIM = 0.05  # seconds given to a server that need not answer
_FILLER = b" " * (1 << 18)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST

Connect = Callable[[], Awaitable[trio.SocketStream]]


@dataclass
class Findings:
    """What a run has seen."""

    kinds: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)  # by status, "hung up", "left"
    violations: list[str] = field(default_factory=list)


def statuses(data: bytes) -> tuple[list[int], bool]:
    """Return the statuses of the responses in `data`, and whether the last one is whole."""
    found: list[int] = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end or not head.startswith(b"HTTP/1.1 "):
            return found, False
        status, lowered = int(head[9:12]), head.lower()
        if status == 100:
            data = rest
            continue
        found.append(status)
        if b"\r\ntransfer-encoding: chunked" in lowered:
            _, end, data = (b"\r\n" + rest).partition(b"\r\n0\r\n\r\n")
            if not end:
                return found, False
            continue
        length = lowered.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
        size = int(length or b"0")
        if len(rest) < size:
            return found, False
        data = rest[size:]
    return found, True


async def carry_out(attack: Attack, connect: Connect) -> tuple[list[int], str]:
    """Send one attack; returns the statuses that came and how it ended.

    Ends are "answered", "hung up" (the server closed), "left" (we did) and "silence".
    """
    stream = await connect()
    received = bytearray()
    ending = "silence"

    async def send() -> None:
        try:
            await stream.send_all(attack.data)
            for _ in range(attack.filler // len(_FILLER)):
                await stream.send_all(_FILLER)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the server has heard enough

    async with stream:
        if attack.leave:
            await send()
            if attack.leave == "reset":
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            return [], "left"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with trio.move_on_after(HANG if attack.answers else WHIM):
                while True:
                    found, whole = statuses(bytes(received))
                    if attack.answers and whole and len(found) >= attack.answers:
                        ending = "answered"
                        break
                    try:
                        data = await stream.receive_some(65536)
                    except trio.BrokenResourceError:
                        data = b""
                    if not data:
                        ending = "hung up"
                        break
                    received += data
            nursery.cancel_scope.cancel()
    return statuses(bytes(received))[0], ending


def judge(number: int, attack: Attack, found: list[int], ending: str, findings: Findings) -> None:
    """Count what came of an attack; a 5xx and a hang are violations."""
    findings.kinds[attack.kind] += 1
    findings.answers.update(str(status) for status in found)
    if ending != "answered":
        findings.answers[ending] += 1
    # 501 is HTTP's own word for a transfer coding that a server does not have.
    bad = [status for status in found if status >= 500 and status != 501]
    if bad or (ending == "silence" and attack.answers):
        findings.violations.append(f"#{number} {attack.kind}: {bad or ending}")


async def run(
    connect: Connect,
    count: int,
    seed: int,
    parallel: int,
    done: Callable[[], None] = lambda: None,
    findings: Findings | None = None,
) -> Findings:
    """Carry out the attacks 0 to `count` - 1 of a seed, `parallel` at a time.

    Returns `findings`, to which everything is added at once.
    """
    findings = findings or Findings()
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            attack = draw(seed, number)
            found, ending = await carry_out(attack, connect)
            judge(number, attack, found, ending, findings)
            done()

    async with trio.open_nursery() as nursery:
        for _ in range(parallel):
            nursery.start_soon(worker)
    return findings


def open_files(pid: int | str = "self") -> int:
    """Return how many descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))
