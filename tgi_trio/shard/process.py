"""The main function of a shard process: attach, serve, and end with a clear error if it fails."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from tgi_trio.errors import PeerGone, TgiTrioError
from tgi_trio.ipc.death import start_shard_end
from tgi_trio.ipc.endpoints import ChannelSpec
from tgi_trio.ipc.tcp import TcpShardEnd, TcpSpec
from tgi_trio.process import thread_limit
from tgi_trio.process.address_space import describe_failure
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.loop import worker
from tgi_trio.shard.loop.image_queue import ImageSource
from tgi_trio.shard.loop_channel import Channel
from tgi_trio.shard.ranks import follower
from tgi_trio.shard.runner import Runner


def serve(
    spec_text: str,
    factory: Callable[[], Runner],
    options: ShardOptions,
    *,
    world_size: int = 1,
    images: ImageSource | None = None,
    frames: str = "",
    dismiss: Callable[[], object] = lambda: None,
) -> int:
    """Serve the router at the other end of `spec_text` with the runner that `factory` returns.

    `images`: makes rank 0's image encoder; None: no images. `frames`: the spec of a connection to
    another machine, which replaces the rings of `spec_text`'s channel. `dismiss` is called before a
    process that has failed ends.

    Returns the exit code 0 after SHUTDOWN or when the router has died. Otherwise the process exits
    here, with code 1 and an error message on stderr, which the router shows. Main thread only.
    """
    # The router handles these, and drains first. It starts shards in a process group of their own,
    # but a service manager signals every process of a service.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    rank = 0
    try:
        rank = ChannelSpec.parse(spec_text).rank
        end = start_shard_end(spec_text)
        incarnation = end.page.incarnation
        channel: Channel = TcpShardEnd(TcpSpec.parse(frames), end.beat) if frames else end
        if rank == 0:
            worker.run(
                channel,
                factory,
                options,
                world_size=world_size,
                incarnation=incarnation,
                images=images,
            )
        else:
            follower.run(
                channel, factory, rank=rank, world_size=world_size, incarnation=incarnation
            )
    except PeerGone:
        return 0  # nobody is left to tell
    except TgiTrioError as error:
        _fail(rank, str(error), dismiss)
    except Exception as error:
        traceback.print_exc()
        known = describe_failure(error) or thread_limit.describe_failure(error)
        _fail(rank, known or f"{type(error).__name__}: {error}", dismiss)
    return 0


def _fail(rank: int, text: str, dismiss: Callable[[], object]) -> NoReturn:
    """Print why this process fails, and exit; called while the error is being handled.

    Exits without clean-up: freeing the memory of a lost device would end the process by SIGABRT,
    with a core dump instead of an exit code.
    """
    paragraph = " ".join(text.split())
    print(f"shard {rank} cannot go on: {paragraph}", file=sys.stderr, flush=True)
    dismiss()
    sys.stdout.flush()
    os._exit(1)
