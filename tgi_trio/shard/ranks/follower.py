"""The loop of every rank but 0: computes rank 0's plans; it neither samples nor replies.

Tokens come from rank 0: with the next plan or, if that is made before they are known, from rank 0's
device. So ranks agree by construction, and followers need neither sampler nor grammars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tgi_trio.errors import PeerGone, ProtocolMismatch
from tgi_trio.ipc.adapters import decode_adapter
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind, Phase
from tgi_trio.ipc.prefixes import decode_keep, decode_restore
from tgi_trio.ipc.startup import Hello, decode_warmup, encode_hello
from tgi_trio.ipc.transfers import decode_transfers
from tgi_trio.shard.contract import Choices, ShardSequence
from tgi_trio.shard.handshake import expect_hello
from tgi_trio.shard.loop_channel import BEAT_S, Channel
from tgi_trio.shard.ranks.followed_adapters import FollowedAdapters
from tgi_trio.shard.ranks.plan_frames import decode_plan
from tgi_trio.shard.runner import Pending, Runner

if TYPE_CHECKING:
    from tgi_trio.shard.sampling.logits_processors import Scores


class NoSampler:
    """The sampler of a rank that does not sample."""

    def choose(self, logits: Scores, rows: list[ShardSequence]) -> Choices:
        return Choices.none(len(rows))

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None:
        return None


def run(
    channel: Channel,
    factory: Callable[[], Runner],
    *,
    rank: int,
    world_size: int,
    incarnation: int = 0,
) -> None:
    """Follow rank 0 until it sends SHUTDOWN or the router dies.

    Raises ProtocolMismatch if rank 0 has another wire format, and whatever `factory` and the runner
    raise: the group ends with any of its ranks.
    """
    try:
        channel.beat(0, Phase.LOADING)
        channel.send(encode_hello(Hello.of_this_process(rank, world_size, incarnation)))
        expect_hello(channel, "rank 0")
        _follow(channel, factory(), rank)
    except PeerGone:
        return  # nobody is left to follow


def _follow(channel: Channel, runner: Runner, rank: int) -> None:
    """Launch plan after plan; wait for a step once the next is launched, or if none comes.

    Waiting earlier would delay the next plan; without waiting, a failed device would go unnoticed.
    """
    step = 0
    flying: Pending | None = None
    adapters = None if runner.adapters is None else FollowedAdapters(runner.adapters)
    channel.beat(step, Phase.IDLE)
    while True:
        view = channel.try_receive()
        if view is None:
            if not channel.wait(BEAT_S) and flying is not None:
                flying.result()
                flying = None
            channel.beat(step, Phase.IDLE)
            continue
        frame = Frame(view)
        if frame.kind is FrameKind.PLAN:
            plan = decode_plan(frame)
            step += 1
            channel.beat(step, Phase.DECODE)
            before, flying = flying, runner.launch(plan)
            if before is not None:
                before.result()
        elif frame.kind is FrameKind.WARMUP:
            channel.beat(step, Phase.WARMING)
            runner.warm_up(decode_warmup(frame))
        elif frame.kind is FrameKind.LOAD_ADAPTER and adapters is not None:
            adapters.order(decode_adapter(frame))
        elif frame.kind is FrameKind.DROP_ADAPTER and adapters is not None:
            adapters.drop(frame.word("adapter"))
        elif frame.kind is FrameKind.KEEP:
            if runner.host_copies is not None:  # this rank's own, of which rank 0 knows nothing
                runner.host_copies.finish()
            runner.prefixes.keep(decode_keep(frame), rank)
        elif frame.kind is FrameKind.RESTORE:
            runner.prefixes.restore(decode_restore(frame), rank)
        elif frame.kind is FrameKind.TRANSFER and runner.host_copies is not None:
            runner.host_copies.launch(decode_transfers(frame))
        elif frame.kind is FrameKind.SHUTDOWN:
            if adapters is not None:
                adapters.close()
            return
        else:
            raise ProtocolMismatch("rank 0", f"{frame.kind.name} is nothing to follow")
        del frame, view
        channel.release()
