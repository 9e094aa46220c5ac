"""Keeps servers running on a Ray cluster; the only file that uses Ray.

Ray chooses the machine of each server, starts it there, and notices when it or its machine fails.
No request goes through Ray. Fronts learn the servers' addresses from a file (`--replicas-file`).
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
from tgi_trio.cluster.rank_processes import run_ranks
from tgi_trio.cluster.replica_host import Placed, ReplicaHost, ReplicaReport, Serves
from tgi_trio.cluster.replica_plan import Phase, ReplicaPlan, StartReplica, StopReplica
from tgi_trio.cluster.scaling import ReplicaLoad, Scaling
from tgi_trio.cluster.supervised_front import SupervisedFront
from tgi_trio.errors import ConfigurationError, tell_reason

log = logging.getLogger("tgi_trio.cluster.controller")

_ANSWER_S: Final = 10.0  # timeout of the first connection to a cluster
LOOK_S: Final = 0.25  # the most by which deaths, starts and signals are noticed late
PLACED_WITHIN_S: Final = 60.0  # after this the log warns that no machine has room


class _RayReplica(ReplicaHost):
    """Ray's actor class of a server: a `ReplicaHost` at the address of its node."""

    def serve(self, words: Sequence[str], divided: Divided | None) -> Iterator[ReplicaReport]:
        """Yield what `run` yields, at this node's address."""
        import ray

        yield from self.run(ray.util.get_node_ip_address(), words, divided)


class _RayRanks:
    """Ray's actor class of the ranks whose server runs on another node."""

    def serve(self, commands: Sequence[Sequence[str]]) -> Iterator[ReplicaReport]:
        """Run the ranks until one ends; yields once, when all are started."""
        for _ in run_ranks(commands):
            yield Placed()


@dataclass(frozen=True)
class Resources:
    """What Ray reserves for a server, in equal parts for each node if it is divided."""

    cpus: float = 1.0
    gpus: float = 0.0
    divided: Divided | None = None  # None: on one machine

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of each node's part, in Ray's form."""
        nodes = 1 if self.divided is None else self.divided.nodes
        return [{"CPU": self.cpus / nodes, "GPU": self.gpus / nodes} for _ in range(nodes)]


@dataclass
class _Replica:
    """A server, on one node or several."""

    actor: Any  # of the server itself
    since: float  # when it was requested, monotonic seconds
    group: Any = None  # Ray's placement group, if it is divided
    ranks: list[Any] = field(default_factory=list)  # actors of its other parts
    there: bool = False  # Ray has started it on a machine
    warned: bool = False  # that no machine has room


class Controller:
    """Carries out what `ReplicaPlan` decides."""

    def __init__(
        self,
        scaling: Scaling,
        words: Sequence[str],
        resources: Resources,
        replicas_file: Path,
        front: SupervisedFront | None = None,
    ) -> None:
        """`words`: the servers' arguments; `front`: the front to keep as well, or None."""
        self._front = front
        self._plan = ReplicaPlan(scaling)
        self._words = tuple(words)
        self._resources = resources
        self._file = replicas_file
        self._written: list[str] | None = None
        self._placed: dict[str, _Replica] = {}
        self._streams: dict[Any, str] = {}  # what an actor yields -> the name of its server

    def close(self) -> None:
        """Drain all servers; `run` returns once they have ended. Called by signal handlers."""
        self._plan.close()
        if self._front is not None:
            self._front.close()

    def run(self) -> None:
        """Keep servers until `close`. Raises OSError if the file cannot be written."""
        closed = False
        while not closed or self._placed or not (self._front is None or self._front.ended):
            for action in self._plan.decide(time.monotonic()):
                match action:
                    case StartReplica(name):
                        self._place(name)
                    case StopReplica(name):
                        self._stop(name)
            self._write()
            if self._front is not None:
                self._front.look(time.monotonic())
            self._hear()
            self._warn()
            closed = self._plan.closing

    def _place(self, name: str) -> None:
        from ray.util import placement_group

        divided, group = self._resources.divided, None
        if divided is not None:  # PACK: close together, since each step of a rank waits for all
            group = placement_group(self._resources.bundles, strategy="PACK", name=name)
        actor = self._actor(_RayReplica, group, 0)
        replica = self._placed[name] = _Replica(actor, time.monotonic(), group)
        self._listen(name, replica.actor, self._words, divided)
        log.info("%s is to be placed", name)

    def _place_ranks(self, name: str, leader: str) -> None:
        """Start the other parts of a divided server, whose ranks connect to `leader`."""
        replica, divided = self._placed[name], self._resources.divided
        for part in range(1, divided.nodes if divided else 1):
            actor = self._actor(_RayRanks, replica.group, part)
            replica.ranks.append(actor)
            self._listen(name, actor, divided.commands(part, leader) if divided else [])

    def _actor(self, kind: type, group: Any, part: int) -> Any:
        """Return a new actor for a part of a server; it is started once a machine has room."""
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
                max_concurrency=2,  # `stop` is called while `serve` runs
                scheduling_strategy=place,
            )
            .remote()
        )

    def _listen(self, name: str, actor: Any, *arguments: Any) -> None:
        """Call an actor's `serve`, whose reports `_hear` takes."""
        self._streams[actor.serve.options(num_returns="streaming").remote(*arguments)] = name

    def _stop(self, name: str) -> None:
        placed = self._placed[name]
        log.info("%s is told to stop", name)
        if placed.there:
            placed.actor.stop.remote()
        else:
            import ray

            ray.kill(placed.actor)  # calling `stop` would wait for a machine as well

    def _hear(self) -> None:
        """Wait up to LOOK_S for reports of any server, and handle them."""
        import ray

        if not self._streams:
            time.sleep(LOOK_S)
            return
        ready, _ = ray.wait(list(self._streams), timeout=LOOK_S, fetch_local=False)
        for stream in ready:
            name = self._streams.get(stream)
            if name is None:  # another part of the same server has just ended it
                continue
            try:
                self._take(name, ray.get(next(stream)))
            except StopIteration:
                self._end(name, "its server, or one of its ranks, has ended")
            except ray.exceptions.RayError as error:
                self._end(name, f"{type(error).__name__}")

    def _take(self, name: str, report: ReplicaReport) -> None:
        match report:
            case ReplicaLoad():
                self._plan.loaded(name, report)
            case Serves(address):
                log.info("%s serves at %s", name, address)
                self._plan.serves(name, address)
            case Placed(ranks_at):
                self._placed[name].there = True
                if ranks_at is not None:
                    self._place_ranks(name, ranks_at)
                if self._plan.phase(name) is Phase.STOPPING:  # decided before it was placed
                    self._placed[name].actor.stop.remote()

    def _end(self, name: str, why: str) -> None:
        """Forget a server, and kill what is left of it: no part is of use without the others."""
        import ray
        from ray.util import remove_placement_group

        self._streams = {stream: each for stream, each in self._streams.items() if each != name}
        log.warning("%s is gone: %s", name, why)
        replica = self._placed.pop(name)
        for actor in (replica.actor, *replica.ranks):
            ray.kill(actor)
        if replica.group is not None:
            remove_placement_group(replica.group)
        self._plan.ended(name, time.monotonic())

    def _warn(self) -> None:
        for name, placed in self._placed.items():
            waited = time.monotonic() - placed.since
            if not placed.there and not placed.warned and waited > PLACED_WITHIN_S:
                placed.warned = True
                bundles = self._resources.bundles
                log.warning(
                    "%s waits for room for %d times %g CPUs and %g GPUs, each on one machine: add "
                    "one, or ask for less with --replica-cpus and --replica-gpus",
                    name,
                    len(bundles),
                    bundles[0]["CPU"],
                    bundles[0]["GPU"],
                )

    def _write(self) -> None:
        """Write the serving addresses, atomically: fronts read the old list or the new one."""
        addresses = self._plan.addresses
        if addresses == self._written:
            return
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text("".join(f"{address}\n" for address in addresses))
        os.replace(new, self._file)
        self._written = addresses


def connect(address: str) -> None:
    """Join a Ray cluster. Raises ConfigurationError if Ray or the cluster is missing."""
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
            f"--address {address}: no Ray cluster can be joined there ({tell_reason(error)}); "
            "start one with `ray start --head`"
        ) from None


def _ask(address: str) -> None:
    """Raise OSError or ValueError if nobody listens at host:port; Ray would try for minutes."""
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
    front: SupervisedFront | None = None,
) -> None:
    """Keep servers, and perhaps a front, on the Ray cluster at `address` until SIGTERM or SIGINT.

    Raises ConfigurationError as `connect` does, and if the file cannot be written.
    """
    connect(address)
    controller = Controller(scaling, words, resources, replicas_file, front)
    for number in (signal.SIGTERM, signal.SIGINT):  # after `connect`: Ray installs handlers too
        signal.signal(number, lambda *_: controller.close())
    try:
        controller.run()
    except OSError as error:
        why = tell_reason(error, replicas_file)
        raise ConfigurationError(
            f"--replicas-file {replicas_file} cannot be written: {why}"
        ) from error
