"""The shard's first act: tie its life to the router's, both ways."""

from __future__ import annotations

from tgi_trio.ipc.channel import ChannelSpec, ShardEnd
from tgi_trio.ipc.parent import die_with_parent, guard_death_pipe


def start_shard_end(spec_text: str) -> ShardEnd:
    """Bind this process to the router's life, attach its channel and show that it lives.

    What a shard's `main` does first, from its main thread. Raises as `die_with_parent` and
    `ShardEnd.attach` do.
    """
    spec = ChannelSpec.parse(spec_text)
    die_with_parent(spec.router_pid)
    end = ShardEnd.attach(spec_text)
    guard_death_pipe(spec.death)
    end.hold_alive_mutex()
    return end
