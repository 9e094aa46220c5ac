"""The first thing a shard does: make its death known to the router, and die with the router."""

from __future__ import annotations

from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.endpoints import ChannelSpec
from tgi_trio.ipc.parent import die_with_parent, guard_death_pipe


def start_shard_end(spec_text: str) -> ShardEnd:
    """Have this process die with the router, attach its channel, and take the alive mutex.

    To be called first, in the shard's main thread. Raises as `die_with_parent` and
    `ShardEnd.attach` do.
    """
    spec = ChannelSpec.parse(spec_text)
    die_with_parent(spec.router_pid)
    end = ShardEnd.attach(spec_text)
    guard_death_pipe(spec.death)
    end.hold_alive_mutex()
    return end
