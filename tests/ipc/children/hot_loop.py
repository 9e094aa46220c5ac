"""Both ends spin in one exchange of argv[1] messages; what strace counts of it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from tgi_trio.ipc.channel import LeaderEnd, ShardEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.fence import choose_ordering
from tgi_trio.ipc.parent import die_with_parent

SPIN_US = 10_000_000

die_with_parent(os.getppid())  # strace's, which lets go of it when it is ended itself
# The fence is not put to the test: how often that asks after its process depends on the machine's
# other work, and would be counted.
ordering = choose_ordering()
with Endpoints.create(0, 1, spin_us=SPIN_US, ordering=ordering) as endpoints:
    spec = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
    if os.fork() == 0:
        die_with_parent(spec.router_pid)
        shard = ShardEnd.attach(spec.text())
        for _ in range(int(sys.argv[1])):
            while (frame := shard.try_receive()) is None:
                shard.wait(60)
            shard.send(frame)
            shard.release()
        os._exit(0)
    router = LeaderEnd.attach(spec.text())
    for _ in range(int(sys.argv[1])):
        router.send(b"x" * 1024)
        while router.try_receive() is None:
            router.wait(60)
        router.release()
    os.wait()
