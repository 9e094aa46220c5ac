"""Commands for which the ring has no room, while nobody has anything to reply to."""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing

from tgi_trio.ipc.messages import PrefillRow
from tgi_trio.router.engine.shard_link import ShardLink, encode_command
from tgi_trio.router.scheduling.shard_commands import Command, Filter, Limits, Prefill


class FullChannel:
    """A channel to a shard that replies nothing, and makes room only when told to."""

    def __init__(self) -> None:
        self.room = 0
        self.sent: list[bytes] = []
        self.try_receive = lambda: None
        self.release = lambda: None
        self.describe_peer = lambda: "rank 0"

    def try_send(self, payload: bytes | memoryview) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.sent.append(bytes(payload))
        return True

    async def send(self, payload: bytes | memoryview, timeout: float) -> None:
        raise NotImplementedError

    async def wait(self) -> None:
        await trio.sleep_forever()


@pytest.mark.trio
async def test_what_found_no_room_is_sent_though_no_reply_comes(autojump_clock: object) -> None:
    """It was sent by another task, when whoever waits for replies slept already."""
    channel = FullChannel()
    link = ShardLink(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wait)
        nursery.start_soon(link.send_waiting)
        await trio.testing.wait_all_tasks_blocked()
        for wave in ([b"1", b"2", b"3"], [b"4", b"5"]):
            for frame in wave:
                link.send_frame(frame)
            for n in range(len(wave)):
                assert channel.sent[-1:] != wave[n : n + 1]
                channel.room = 1
                await trio.sleep(1)
                assert channel.sent[-1:] == wave[n : n + 1], "in order, one after the other"
        nursery.cancel_scope.cancel()
    assert channel.sent == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.trio
async def test_a_long_prompt_is_encoded_in_a_turn_of_its_own(autojump_clock: object) -> None:
    """Nothing overtakes it meanwhile."""
    channel = FullChannel()
    channel.room = 9
    link = ShardLink(channel)
    short, long = (Prefill(1 + n, [row(count)]) for n, count in enumerate((5, 200_000)))
    link.send(short)
    assert channel.sent == [encode_command(short)]
    behind: list[Command] = [Limits(3, 7), Filter(4, [1])]
    commands = [long, *behind]
    for command in commands:
        link.send(command)
    assert len(channel.sent) == 1, "not in this turn"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.send_waiting)
        await trio.sleep(1)
        assert channel.sent[1:] == [encode_command(each) for each in commands]
        link.send(Limits(5, 8))
        assert channel.sent[4:] == [encode_command(Limits(5, 8))]
        nursery.cancel_scope.cancel()


def row(tokens: int) -> PrefillRow:
    ids = np.arange(tokens, dtype=np.int32)
    return PrefillRow(tokens, ids, tokens, 0, [*range(1, 2 + tokens // 16)], 4)
