"""Fake shards in threads that end when they are told, over rings or over a connection."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.endpoints import ChannelSpec, Endpoints
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.tcp import TcpShardEnd, TcpSpec
from tgi_trio.ipc.tcp_router_end import TcpRouterEnd
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.adapter_host import AdapterHost, LoadedAdapter
from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.loop import worker
from tgi_trio.testing.fake_model import FakeCrash, FakeRunner, FakeSettings
from tgi_trio.testing.fake_shard import FakeShard

_LONGEST_LOAD_S: Final = 0.004  # of an adapter
_FAILING: Final = 0.05  # share of adapters' loads, and of installations
_SMALL: Final = 4096  # bytes that a connection's kernel holds


@dataclass(frozen=True, slots=True)
class _Loaded:
    sha256: bytes = bytes(32)
    rank: int = 1
    nbytes: int = 1


class UnsureHost:
    """Adapters that take a while, and may fail."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        time.sleep(_LONGEST_LOAD_S * self._rng.random())
        self._fail("it cannot be read")
        return _Loaded()

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        self._fail("there is no room")

    def drop(self, number: int) -> None:
        return None

    def _fail(self, why: str) -> None:
        if self._rng.random() < _FAILING:
            raise ModelLoadError(why)


class _MortalRunner(FakeRunner):
    """Ends with the next step once it is told."""

    def __init__(self, settings: FakeSettings, host: AdapterHost, dying: threading.Event) -> None:
        super().__init__(settings, in_thread=True)
        self._host = host
        self._dying = dying

    @property
    def adapters(self) -> AdapterHost | None:
        return self._host

    def step(self, plan: StepPlan) -> StepResult:
        if self._dying.is_set():
            raise FakeCrash
        return super().step(plan)


class ThreadShard(FakeShard):
    """See the module's docstring."""

    def __init__(
        self,
        spec: ChannelSpec,
        settings: FakeSettings,
        host: AdapterHost,
        connection: socket.socket | None = None,
    ) -> None:
        """`connection`: for frames; None: they go over the rings of `spec`."""
        super().__init__(spec, settings)
        self.dying = threading.Event()  # set: the next step ends it
        self._host = host
        self._connection = connection

    def _load(self) -> FakeRunner:
        self.runner = _MortalRunner(self.settings, self._host, self.dying)
        if self._end.stopping.is_set():  # stop() has not seen the runner
            self.runner.released.set()
        return self.runner

    def _main(self) -> None:
        if self._connection is None:
            super()._main()
            return
        end, incarnation = self._end, self._end.page.incarnation
        own = TcpSpec(self._connection.detach(), 0, incarnation)
        channel = TcpShardEnd(own, end.beat)
        options = ShardOptions(speculate=self.settings.speculate)
        try:
            worker.run(channel, self._load, options, incarnation=incarnation)
        except FakeCrash:
            return
        except BaseException as error:
            self.error = error
        finally:
            channel.close()
            end.close()


@contextmanager
def thread_shard(
    settings: FakeSettings,
    host: AdapterHost,
    incarnation: int,
    rings: tuple[int, int] | None,
    spin_us: int = 0,
) -> Iterator[tuple[ThreadShard, CommandChannel]]:
    """Run a shard for the block; yields it and the router's end.

    `rings`: bytes of that of commands and that of replies; None: a connection whose buffers are
    small.
    """
    with ExitStack() as stack:
        bell = stack.enter_context(ReplyBell(spin_us=spin_us, poll_us=spin_us))
        commands, replies = rings or (_SMALL, _SMALL)
        endpoints = stack.enter_context(
            Endpoints.create(
                0, incarnation, reply_bell=bell.fd, request_bytes=commands, reply_bytes=replies
            )
        )
        if rings is not None:
            shard = ThreadShard(endpoints.spec, settings, host)
            stack.enter_context(shard)
            yield shard, stack.enter_context(RouterEnd(endpoints, bell))
            return
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL)
        shard = ThreadShard(endpoints.spec, settings, host, theirs)
        stack.enter_context(shard)
        end = TcpRouterEnd(ours.detach(), lambda: "the shard")
        yield shard, stack.enter_context(closing(end))
