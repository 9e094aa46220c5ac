"""The other rank: reads plans and says so: `python -m bench.ranks.follower SPEC [HOST PORT]`."""

from __future__ import annotations

import socket
import sys

from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.death import start_shard_end
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.tcp import TcpShardEnd, TcpSpec, prepare_connection
from tgi_trio.shard.ranks.plan_frames import decode_plan


def follow(spec: str, address: tuple[str, int] | None) -> None:
    """Answer every plan with a frame of one word, until told to end."""
    own = start_shard_end(spec)
    end: ShardEnd | TcpShardEnd = own
    if address is not None:
        connection = socket.create_connection(address)
        prepare_connection(connection)
        end = TcpShardEnd(TcpSpec(connection.detach(), 1, 1, 2**26), own.beat)
    done = encode(FrameKind.SHUTDOWN, {"command": 0}, {})
    while True:
        view = end.try_receive()
        if view is None:
            end.wait(None)
            continue
        frame = Frame(view)
        if frame.kind is FrameKind.SHUTDOWN:
            return
        decode_plan(frame)
        del frame, view
        end.release()
        end.send(done)


if __name__ == "__main__":
    follow(sys.argv[1], (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else None)
