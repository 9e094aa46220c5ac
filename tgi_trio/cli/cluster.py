"""`cluster`: builds from flags the front and the division of servers over machines."""

from __future__ import annotations

from functools import partial

from tgi_trio.cli.files import check_cluster_secret
from tgi_trio.cli.options import ClusterOptions
from tgi_trio.cli.parser import parse
from tgi_trio.cluster.controller import Resources, keep
from tgi_trio.cluster.divided import Divided, find_problems
from tgi_trio.cluster.scaling import Scaling
from tgi_trio.cluster.supervised_front import SupervisedFront, front_words, start_front
from tgi_trio.errors import ConfigurationError
from tgi_trio.process.sockets import bind_sockets


def run_cluster(options: ClusterOptions) -> int:
    """Keep servers running until a signal; the exit code is 0. Raises ConfigurationError."""
    keep(
        options.address,
        Scaling(*(options.replicas or (1, 1))),
        options.server,
        Resources(options.replica_cpus, options.replica_gpus, find_division(options)),
        options.replicas_file,
        find_front(options),
    )
    return 0


def find_front(options: ClusterOptions) -> SupervisedFront | None:
    """Return the front to keep running, not yet started; None if none is asked for.

    Raises ConfigurationError if its address cannot be used here, or if the servers' secret, which
    is also the front's, cannot be read on this machine.
    """
    if options.no_front:
        return None
    with bind_sockets([options.front_bind]):
        pass  # checked now, as later only a background process would report it
    secret = parse(options.server, {}).options.cluster_secret_file
    check_cluster_secret(secret)
    more = ["--logger-level", options.logger_level]
    if options.json_output:
        more.append("--json-output")
    words = front_words(options.front_bind, options.replicas_file, secret, more)
    return SupervisedFront(partial(start_front, words))


def find_division(options: ClusterOptions) -> Divided | None:
    """Return how each server is divided over machines; None if it is on one.

    Without --num-shard, each machine has one rank. Raises ConfigurationError for an impossible
    division, and if ranks would have no secret by which to authenticate.
    """
    nodes = options.nodes_per_replica
    if nodes == 1:
        return None
    served = parse(options.server, {}).options
    ranks = nodes if served.num_shard is None else served.num_shard
    if problems := find_problems(nodes, ranks, options.replica_gpus):
        raise ConfigurationError(problems[0])
    if served.cluster_secret_file is None:
        raise ConfigurationError(
            "--nodes-per-replica needs --cluster-secret-file: ranks of other machines show that "
            "they know it"
        )
    words = ["--cluster-secret-file", str(served.cluster_secret_file)]
    for flag, value in (
        ("--model-id", served.model_id),
        ("--revision", served.revision),
        ("--mmproj", served.mmproj),
        ("--huggingface-hub-cache", served.huggingface_hub_cache),
    ):
        words += [] if value is None else [flag, str(value)]
    words += ["--no-mmproj"] if served.no_mmproj else []
    words += ["--trust-remote-code"] if served.trust_remote_code else []
    words += ["--logger-level", served.logger_level]
    words += ["--json-output"] if served.json_output else []
    return Divided(nodes, ranks, tuple(words))
