"""Servers kept by Ray: the only file that knows it.

Ray says on which machine a server runs, starts it there and notices when it or its machine is gone.
No byte of a request goes through it. Fronts learn who serves from a file (`--replicas-file`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tgi_trio.cluster.divided import Divided
from tgi_trio.cluster.keeping import Keeping, Phase, Place, Stop
from tgi_trio.cluster.kept_front import KeptFront
from tgi_trio.cluster.rank_processes import run_ranks
from tgi_trio.cluster.replica_host import Placed, ReplicaHost, Said, Serves
from tgi_trio.cluster.scaling import ReplicaLoad, Scaling
from tgi_trio.errors import ConfigurationError

log = logging.getLogger("tgi_trio.cluster.keeper")

_ANSWER_S: Final = 10.0
LOOK_S: Final = 0.25  # the longest that a death or a start goes unnoticed, and a signal unheard
PLACED_WITHIN_S: Final = 60.0  # then the log says that no machine has room


class _RayReplica(ReplicaHost):
    """A host that asks Ray for its machine's address."""

    def serve(self, words: Sequence[str], divided: Divided | None) -> Iterator[Said]:
        """Be `run` at this machine's address."""
        import ray

        yield from self.run(ray.util.get_node_ip_address(), words, divided)


class _RayRanks:
    """Ranks of a server that is on another machine."""

    def serve(self, commands: Sequence[Sequence[str]]) -> Iterator[Said]:
        """Be `run_ranks`."""
        for _ in run_ranks(commands):
            yield Placed()


@dataclass(frozen=True)
class Resources:
    """What Ray sets aside for a server, in equal parts where it is divided."""

    cpus: float = 1.0
    gpus: float = 0.0
    divided: Divided | None = None  # None: on one machine

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each part has, as Ray says it."""
        nodes = 1 if self.divided is None else self.divided.nodes
        return [{"CPU": self.cpus / nodes, "GPU": self.gpus / nodes} for _ in range(nodes)]


@dataclass
class _Replica:
    """A server, wherever its parts are."""

    actor: Any  # of the server itself
    since: float
    group: Any = None  # Ray's placement group of a divided one
    ranks: list[Any] = field(default_factory=list)  # actors of its other parts
    there: bool = False  # on a machine
    warned: bool = False


class Keeper:
    """Does what `Keeping` decides, until told to stop."""

    def __init__(
        self,
        scaling: Scaling,
        words: Sequence[str],
        resources: Resources,
        replicas_file: Path,
        front: KeptFront | None = None,
    ) -> None:
        """`words`: of the servers; `front`: before them, None: somebody else has one."""
        self._front = front
        self._keeping = Keeping(scaling)
        self._words = tuple(words)
        self._resources = resources
        self._file = replicas_file
        self._written: list[str] | None = None
        self._placed: dict[str, _Replica] = {}
        self._streams: dict[Any, str] = {}  # of what each server yields: its name

    def close(self) -> None:
        """Have every server finish what it has, and `run` return once they all have."""
        self._keeping.close()
        if self._front is not None:
            self._front.close()

    def run(self) -> None:
        """Keep servers; returns after `close`. Raises OSError if the file cannot be written."""
        closed = False
        while not closed or self._placed or not (self._front is None or self._front.ended):
            for action in self._keeping.decide(time.monotonic()):
                match action:
                    case Place(name):
                        self._place(name)
                    case Stop(name):
                        self._stop(name)
            self._write()
            if self._front is not None:
                self._front.look(time.monotonic())
            self._hear()
            self._warn()
            closed = self._keeping.closing

    def _place(self, name: str) -> None:
        from ray.util import placement_group

        divided, group = self._resources.divided, None
        if divided is not None:  # close together: each step of a rank waits for all
            group = placement_group(self._resources.bundles, strategy="PACK", name=name)
        actor = self._actor(_RayReplica, group, 0)
        replica = self._placed[name] = _Replica(actor, time.monotonic(), group)
        self._listen(name, replica.actor, self._words, divided)
        log.info("%s is to be placed", name)

    def _place_ranks(self, name: str, leader: str) -> None:
        """Start the parts of a divided server that call the one at `leader`."""
        replica, divided = self._placed[name], self._resources.divided
        for part in range(1, divided.nodes if divided else 1):
            actor = self._actor(_RayRanks, replica.group, part)
            replica.ranks.append(actor)
            self._listen(name, actor, divided.commands(part, leader) if divided else [])

    def _actor(self, kind: type, group: Any, part: int) -> Any:
        """Return a new actor for a part of a server."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._resources.bundles[part]
        place = "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, part)
        return (
            ray.remote(kind)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle["GPU"],
                max_restarts=0,
                max_concurrency=2,  # `stop` while `serve` runs
                scheduling_strategy=place,
            )
            .remote()
        )

    def _listen(self, name: str, actor: Any, *told: Any) -> None:
        """Have an actor serve, and hear what it says."""
        self._streams[actor.serve.options(num_returns="streaming").remote(*told)] = name

    def _stop(self, name: str) -> None:
        placed = self._placed[name]
        log.info("%s is told to stop", name)
        if placed.there:
            placed.actor.stop.remote()
        else:
            import ray

            ray.kill(placed.actor)  # a call would wait for a machine, too

    def _hear(self) -> None:
        """Wait a moment for news of any server, and take them."""
        import ray

        if not self._streams:
            time.sleep(LOOK_S)
            return
        ready, _ = ray.wait(list(self._streams), timeout=LOOK_S, fetch_local=False)
        for stream in ready:
            name = self._streams.get(stream)
            if name is None:  # it was another part of a server that is gone
                continue
            try:
                self._take(name, ray.get(next(stream)))
            except StopIteration:
                self._end(name, "its server, or one of its ranks, has ended")
            except ray.exceptions.RayError as error:
                self._end(name, f"{type(error).__name__}")

    def _take(self, name: str, said: Said) -> None:
        match said:
            case ReplicaLoad():
                self._keeping.loaded(name, said)
            case Serves(address):
                log.info("%s serves at %s", name, address)
                self._keeping.serves(name, address)
            case Placed(ranks_at):
                self._placed[name].there = True
                if ranks_at is not None:
                    self._place_ranks(name, ranks_at)
                if self._keeping.phase(name) is Phase.STOPPING:  # told so before it was anywhere
                    self._placed[name].actor.stop.remote()

    def _end(self, name: str, why: str) -> None:
        """Forget a server, and end what is left of it: no part is of use without the others."""
        import ray
        from ray.util import remove_placement_group

        self._streams = {stream: each for stream, each in self._streams.items() if each != name}
        log.warning("%s is gone: %s", name, why)
        replica = self._placed.pop(name)
        for actor in (replica.actor, *replica.ranks):
            ray.kill(actor)
        if replica.group is not None:
            remove_placement_group(replica.group)
        self._keeping.ended(name, time.monotonic())

    def _warn(self) -> None:
        for name, placed in self._placed.items():
            waited = time.monotonic() - placed.since
            if not placed.there and not placed.warned and waited > PLACED_WITHIN_S:
                placed.warned = True
                bundles = self._resources.bundles
                log.warning(
                    "%s waits for room for %d times %g CPUs and %g GPUs, each on one machine: add "
                    "one, or ask for less with --replica-cpus and --replica-gpus",
                    *(name, len(bundles), bundles[0]["CPU"], bundles[0]["GPU"]),
                )

    def _write(self) -> None:
        """Write who serves; a front that reads meanwhile has the old list or the new one."""
        addresses = self._keeping.addresses
        if addresses == self._written:
            return
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text("".join(f"{address}\n" for address in addresses))
        os.replace(new, self._file)
        self._written = addresses


def connect(address: str) -> None:
    """Join a Ray cluster; ConfigurationError where Ray is not installed or not there."""
    try:
        import ray
    except ImportError:
        raise ConfigurationError(
            "`cluster` needs Ray: install it with pip install 'tgi-trio[ray]'"
        ) from None
    try:
        _ask(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"--address {address}: no Ray cluster can be joined there ({error}); "
            "start one with `ray start --head`"
        ) from None


def _ask(address: str) -> None:
    """Raise OSError or ValueError where nobody listens at host:port; Ray would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            pass


def keep(
    address: str,
    scaling: Scaling,
    words: Sequence[str],
    resources: Resources,
    replicas_file: Path,
    front: KeptFront | None = None,
) -> None:
    """Keep servers on the Ray cluster at `address`, and a front, until SIGTERM or SIGINT.

    Raises ConfigurationError as `connect` does, and for a file that cannot be written.
    """
    connect(address)
    keeper = Keeper(scaling, words, resources, replicas_file, front)
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets its own
        signal.signal(number, lambda *_: keeper.close())
    try:
        keeper.run()
    except OSError as error:
        raise ConfigurationError(
            f"--replicas-file {replicas_file} cannot be written: {error}"
        ) from error
