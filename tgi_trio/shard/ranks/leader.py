"""Rank 0's runner, which has the other ranks compute every step as well.

Rank 0 alone reads the router's ring, keeps the running batch, plans and samples. It sends the other
ranks orders over rings of the same kind: to warm up, to compute a plan. On devices a plan may have
tokens that only rank 0's device knows; the other devices receive them from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tgi_trio.ipc.adapters import AdapterOrder, encode_adapter, encode_drop
from tgi_trio.ipc.broadcast import Broadcast, PlanEnd
from tgi_trio.ipc.channel import LeaderEnd
from tgi_trio.ipc.frame_codec import encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.prefixes import (
    KeepOrder,
    PrefixReport,
    RestoreOrder,
    encode_keep,
    encode_restore,
)
from tgi_trio.ipc.startup import (
    Hello,
    ShardInfo,
    WarmupRequest,
    WarmupResult,
    encode_hello,
    encode_warmup,
)
from tgi_trio.ipc.tcp import TcpSpec, tcp_leader_end
from tgi_trio.ipc.transfers import Transfer, encode_transfers
from tgi_trio.shard.adapter_host import AdapterHost, LoadedAdapter
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.handshake import expect_hello
from tgi_trio.shard.loop.soundness import prove_by_step
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes
from tgi_trio.shard.ranks.plan_frames import encode_plan
from tgi_trio.shard.runner import (
    Drafter,
    GroupBroken,
    Pending,
    Runner,
)


class Followers:
    """Rank 0's ends to the other ranks."""

    def __init__(self, ends: ListLike[PlanEnd]) -> None:
        """Use `ends`, in rank order."""
        self._all = Broadcast(ends)

    @classmethod
    def attach(cls, specs: ListLike[str]) -> Followers:
        """Attach the channels whose specs the router has passed down; raises as LeaderEnd does."""
        return cls(
            [
                tcp_leader_end(spec) if TcpSpec.is_one(spec) else LeaderEnd.attach(spec)
                for spec in specs
            ]
        )

    def greet(self) -> None:
        """Exchange HELLO with every follower. Raises ProtocolMismatch, which names the rank."""
        ends = self._all.ends
        ours = Hello.of_this_process(0, 1 + len(ends), ends[0].incarnation)
        self._all.send(encode_hello(ours))
        for end in ends:
            expect_hello(end, end.describe_peer())

    def warm_up(self, request: WarmupRequest) -> None:
        """Have every follower warm up as this rank does now."""
        self._all.send(encode_warmup(0, request))

    def compute(self, plan: StepPlan) -> None:
        """Have every follower compute its part of a plan as this rank does now."""
        self._all.send(encode_plan(plan))

    def load_adapter(self, order: AdapterOrder) -> None:
        """Have every follower begin to load an adapter, or at the second call install it."""
        self._all.send(encode_adapter(0, order))

    def drop_adapter(self, number: int) -> None:
        """Have every follower forget an adapter."""
        self._all.send(encode_drop(0, number))

    def keep_prefixes(self, order: KeepOrder) -> None:
        """Have every follower write its file as this rank does now."""
        self._all.send(encode_keep(0, order))

    def restore_prefixes(self, order: RestoreOrder) -> None:
        """Have every follower read its file as this rank does now."""
        self._all.send(encode_restore(0, order))

    def transfer(self, transfers: ListLike[Transfer]) -> None:
        """Have every follower copy its part of blocks as this rank does now."""
        self._all.send(encode_transfers(0, transfers))

    def dismiss(self) -> None:
        """Have every follower end. Never blocks: the router kills one whose ring is full."""
        frame = encode(FrameKind.SHUTDOWN, {"command": 0}, {})
        for end in self._all.ends:
            end.try_send(frame)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise GroupBroken for whatever is raised inside: the others are in the middle of a step."""
    try:
        yield
    except Exception as error:
        raise GroupBroken("rank 0", f"a step failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """See `Pending`: rank 0's, of a step that all ranks compute."""

    own: Pending

    def proceed(self) -> None:
        with failing_together():
            self.own.proceed()

    def result(self) -> StepResult:
        with failing_together():
            return self.own.result()


@dataclass(frozen=True, slots=True)
class _GroupLoaded:
    """An adapter as loaded by rank 0, with the order for the others."""

    order: AdapterOrder
    own: LoadedAdapter

    @property
    def sha256(self) -> bytes:
        return self.own.sha256

    @property
    def rank(self) -> int:
        return self.own.rank

    @property
    def nbytes(self) -> int:
        return self.own.nbytes


class GroupAdapters:
    """An `AdapterHost` for all ranks.

    The other ranks load while rank 0 does. Once rank 0 has found the adapter to be sound, it orders
    them to install it, before the first plan that uses it and with the sha256 of what it has read.
    A rank that cannot load these bytes ends the group.
    """

    def __init__(self, host: AdapterHost, followers: Followers) -> None:
        self._host = host
        self._followers = followers

    def announce(self, order: AdapterOrder) -> None:
        self._followers.load_adapter(order)

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        own = self._host.load(order)
        return _GroupLoaded(replace(order, sha256=own.sha256), own)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if not isinstance(loaded, _GroupLoaded):
            raise TypeError(f"{type(loaded).__name__} was loaded by another host")
        self._host.install(number, loaded.own)  # which may refuse
        self._followers.load_adapter(loaded.order)

    def drop(self, number: int) -> None:
        self._followers.drop_adapter(number)
        self._host.drop(number)


class GroupPrefixes:
    """The prefixes of all ranks, each of which has a file of its own."""

    def __init__(self, own: Prefixes, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def keep(self, order: KeepOrder, rank: int = 0) -> PrefixReport:
        self._followers.keep_prefixes(order)
        return self._own.keep(order, rank)

    def restore(self, order: RestoreOrder, rank: int = 0) -> PrefixReport:
        self._followers.restore_prefixes(order)
        return self._own.restore(order, rank)


class GroupCopies:
    """The host's memory of all ranks.

    Rank 0 knows only when its own copies are over. The others' devices wait for theirs before the
    first step that comes after them (`StepPlan.transfers`).
    """

    def __init__(self, own: HostCopies, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    @property
    def done(self) -> int:
        return self._own.done

    def launch(self, transfers: ListLike[Transfer]) -> None:
        self._followers.transfer(transfers)
        self._own.launch(transfers)

    def finish(self) -> None:
        self._own.finish()


class GroupRunner:
    """A `Runner` for all ranks: sends each order to the others, then runs this rank's own part."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        """`runner` holds rank 0's part of the model."""
        self._runner = runner
        self._followers = followers

    @property
    def info(self) -> ShardInfo:
        return self._runner.info

    @property
    def adapters(self) -> AdapterHost | None:
        host = self._runner.adapters
        return None if host is None else GroupAdapters(host, self._followers)

    @property
    def prefixes(self) -> Prefixes:
        return GroupPrefixes(self._runner.prefixes, self._followers)

    @property
    def host_copies(self) -> HostCopies | None:
        own = self._runner.host_copies
        return None if own is None else GroupCopies(own, self._followers)

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        self._followers.warm_up(request)
        return self._runner.warm_up(request)

    def step(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def runs_ahead(self, plan: StepPlan) -> bool:
        return self._runner.runs_ahead(plan)

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a plan on all ranks; what another runner's step raises is GroupBroken here."""
        self._followers.compute(plan)
        with failing_together():
            return _GroupStep(self._runner.launch(plan))

    def drafter(self, most: int) -> Drafter | None:
        return self._runner.drafter(most)

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self._runner.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self._runner.drop(sequence)

    def prove_sound(self) -> None:
        prove_by_step(self.step, self.info.vocab_size)
