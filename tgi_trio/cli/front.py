"""`front`: one address for many replicas."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from tgi_trio.cli.files import check_key_file
from tgi_trio.cli.options import FrontOptions
from tgi_trio.cluster.front import FrontSettings
from tgi_trio.cluster.peers import bind_feed, split_peer
from tgi_trio.cluster.program import FrontProgram, ProgramSettings
from tgi_trio.process.descriptors import check_limit, raise_limit
from tgi_trio.process.signals import run_to_its_end
from tgi_trio.process.sockets import bind_sockets, check_certificate
from tgi_trio.process.stack_size import check_stack
from tgi_trio.settings.cluster_secret import read_cluster_secret
from tgi_trio.settings.keys import Keys

log = logging.getLogger(__name__)


def run_front(options: FrontOptions) -> int:
    """Run the front until a signal ends it, then return 0. Raises ConfigurationError."""
    check_limit()
    check_stack()
    check_key_file(options.api_key_file)
    settings = program_settings(options)
    raise_limit()
    check_certificate(options.ssl_certfile, options.ssl_keyfile)
    with ExitStack() as bound:
        sockets = bound.enter_context(bind_sockets(options.addresses))
        feed = None
        if options.peer:
            feed = bound.enter_context(bind_feed(options.peer_bind or options.addresses[0]))
        run_to_its_end(FrontProgram(settings, sockets, feed).run)
    return 0


def program_settings(options: FrontOptions) -> ProgramSettings:
    """Return the settings for the options. Raises ConfigurationError."""
    path, keys = options.cluster_secret_file, Keys(options.api_key, options.api_key_file)
    if path is None:
        log.warning(
            "without --cluster-secret-file a stream ends with its replica: replicas and front "
            "need the same one for streams to go on elsewhere"
        )
    return ProgramSettings(
        front=FrontSettings(
            secret=b"" if path is None else read_cluster_secret(path),
            api_keys=keys.read(),
            cors_allow_origin=options.cors_allow_origin,
            payload_limit=options.payload_limit,
            max_concurrent_requests=options.max_concurrent_requests,
        ),
        keys=keys,
        replicas=options.replica,
        replicas_file=options.replicas_file,
        replica_timeout=options.replica_timeout,
        graceful_timeout=options.graceful_termination_timeout,
        shutdown_delay=options.shutdown_delay,
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        json_output=options.json_output,
        peers=tuple(split_peer(each, "--peer") for each in options.peer),
        known_prefixes=options.known_prefixes,
    )
