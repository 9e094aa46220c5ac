"""`cluster`: the front before its servers."""

from __future__ import annotations

from functools import partial

from tgi_trio.cli.files import check_cluster_secret
from tgi_trio.cli.options import ClusterOptions
from tgi_trio.cli.parser import parse
from tgi_trio.cluster.kept_front import KeptFront, front_words, start_front
from tgi_trio.router.http.wire.sockets import bind_sockets


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
