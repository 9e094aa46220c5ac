"""Checks of the options of commands beside `serve`, by their values alone.

Each raises ConfigurationError with a sentence that names the flag. What depends on the machine, as
files and addresses do, is checked by the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tgi_trio.cli.options import (
    BatchOptions,
    BenchOptions,
    ChatOptions,
    ClusterOptions,
    DoctorOptions,
    FrontOptions,
    HostOptions,
    QuantizeOptions,
    RankOptions,
)
from tgi_trio.errors import ConfigurationError
from tgi_trio.whole_files import resolve_links

SHORTEST_TIMEOUT: Final = 0.5  # seconds of silence of a replica
_BITS: Final = 4  # of weights that `quantize` writes as GPTQ
_UNIX: Final = "unix:"


def check_nothing(options: Any) -> None:
    """Accept all options: a command whose values are all right once they are read."""


def check_chat(options: ChatOptions) -> None:
    """Raise for answers without tokens and temperatures below 0."""
    _check_least(options, 1, "max_tokens")
    _check_least(options, 0, "temperature")


def check_bench(options: BenchOptions) -> None:
    """Raise for loads without requests."""
    _check_least(options, 1, "requests", "clients", "words", "max_tokens")
    if options.rate and (slowest := min(options.rate)) <= 0:
        raise ConfigurationError(f"--rate must be > 0. Given: {slowest:g}")


def check_batch(options: BatchOptions) -> None:
    """Raise for requests that nobody asks, or that have no time, and for one file for both."""
    _check_least(options, 1, "clients", "timeout")
    if resolve_links(options.input) == resolve_links(options.output):
        raise ConfigurationError("OUTPUT must be another file than INPUT")


def check_quantize(options: QuantizeOptions) -> None:
    """Raise for weights that are not written, and for a calibration without text."""
    if options.bits != _BITS:
        raise ConfigurationError(f"--bits must be {_BITS}. Given: {options.bits}")
    if options.groupsize != -1 and (options.groupsize < 8 or options.groupsize % 8):
        raise ConfigurationError(
            f"--groupsize must be -1 or a multiple of 8. Given: {options.groupsize}"
        )
    _check_least(options, 1, "samples", "sample_tokens")


def check_cluster(options: ClusterOptions) -> None:
    """Raise for less than a machine for a server, and less than nothing of one."""
    _check_least(options, 1, "nodes_per_replica")
    _check_least(options, 0, "replica_cpus", "replica_gpus")


def check_doctor(options: DoctorOptions) -> None:
    """Raise for what is no port."""
    _check_port(options.port)


def check_rank(options: RankOptions) -> None:
    """Raise unless it is said whose rank runs here."""
    find_leader(options)


def find_leader(options: RankOptions) -> tuple[str, int, Path]:
    """Return the leader's host:port, which of its ranks this one is, and the secret's file.

    Raises ConfigurationError.
    """
    leader, rank, secret = options.leader, options.rank, options.cluster_secret_file
    if leader is None or rank is None or secret is None:
        raise ConfigurationError(
            "--leader, --rank and --cluster-secret-file say whose rank runs here"
        )
    if leader.startswith(_UNIX):
        raise ConfigurationError(f"--leader must be host:port or [host]:port. Given: {leader}")
    _check_least(options, 0, "rank")
    return leader, rank, secret


def check_shard(options: HostOptions) -> None:
    """Raise unless it is said where and for whom the shard computes."""
    find_secret(options)
    if options.listen.startswith(_UNIX):
        raise ConfigurationError(
            f"--listen must be host:port or [host]:port. Given: {options.listen}"
        )


def find_secret(options: HostOptions) -> Path:
    """Return the file of the secret that routers know. Raises ConfigurationError."""
    if options.cluster_secret_file is None:
        raise ConfigurationError(
            "--cluster-secret-file says which routers may use this shard: give it the same one"
        )
    return options.cluster_secret_file


def check_front(options: FrontOptions) -> None:
    """Raise for a front without replicas, for flags that need others, and numbers out of range."""
    if not (options.replica or options.replicas_file or options.cluster_secret_file):
        raise ConfigurationError(
            "the front has no replica: name some with --replica or --replicas-file, or give a "
            "--cluster-secret-file, with which they are named while it runs"
        )
    _check_least(options, SHORTEST_TIMEOUT, "replica_timeout")
    _check_peers(options)
    _check_port(options.port)
    _check_least(options, 1, "payload_limit", "max_concurrent_requests", "known_prefixes")
    _check_least(options, 0, "graceful_termination_timeout", "shutdown_delay")


def _check_peers(options: FrontOptions) -> None:
    if options.peer and options.cluster_secret_file is None:
        raise ConfigurationError(
            "--peer needs --cluster-secret-file: what fronts tell each other is signed with it"
        )
    if options.peer_bind is not None and not options.peer:
        raise ConfigurationError("--peer-bind needs --peer: without other fronts nobody is heard")
    if options.peer and options.peer_bind is None and options.addresses[0].startswith(_UNIX):
        raise ConfigurationError(
            f"--peer needs --peer-bind host:port where the front serves at {options.addresses[0]}"
        )


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"--port must be 0 to 65535. Given: {port}")


def _check_least(options: Any, least: float, *names: str) -> None:
    """Raise for a number, or one of several, that is less; None is none."""
    for name in names:
        given = getattr(options, name)
        lowest = min(given) if isinstance(given, tuple) else given
        if lowest is not None and lowest < least:
            flag = name.replace("_", "-")
            raise ConfigurationError(f"--{flag} must be >= {least:g}. Given: {lowest:g}")
