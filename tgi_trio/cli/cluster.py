"""`cluster`: from flags to the front before its servers, and to how these are divided."""

from __future__ import annotations

from functools import partial

from tgi_trio.cli.files import check_cluster_secret
from tgi_trio.cli.options import ClusterOptions
from tgi_trio.cli.parser import parse
from tgi_trio.cluster.divided import Divided, find_problems
from tgi_trio.cluster.kept_front import KeptFront, front_words, start_front
from tgi_trio.errors import ConfigurationError
from tgi_trio.sockets import bind_sockets


def find_front(options: ClusterOptions) -> KeptFront | None:
    """Return the front to keep, which is not started yet; None: none is asked for.

    Raises ConfigurationError for an address that cannot be used here, and where the servers'
    secret, which is the front's as well, cannot be read on this machine.
    """
    if options.no_front:
        return None
    with bind_sockets([options.front_bind]):
        pass  # later it would be told by a process that nobody looks at
    secret = parse(options.server, {}).options.cluster_secret_file
    check_cluster_secret(secret)
    more = ["--logger-level", options.logger_level]
    if options.json_output:
        more.append("--json-output")
    words = front_words(options.front_bind, options.replicas_file, secret, more)
    return KeptFront(partial(start_front, words))


def find_division(options: ClusterOptions) -> Divided | None:
    """Return how each server is divided over machines; None: it is on one.

    Without --num-shard each machine has one rank. Raises ConfigurationError for what cannot be
    divided so, and where ranks could not prove whose they are.
    """
    nodes = options.nodes_per_replica
    if nodes < 1:
        raise ConfigurationError(f"--nodes-per-replica must be >= 1. Given: {nodes}")
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
        ("--huggingface-hub-cache", served.huggingface_hub_cache),
    ):
        words += [] if value is None else [flag, str(value)]
    words += ["--trust-remote-code"] if served.trust_remote_code else []
    words += ["--logger-level", served.logger_level]
    words += ["--json-output"] if served.json_output else []
    return Divided(nodes, ranks, tuple(words))
