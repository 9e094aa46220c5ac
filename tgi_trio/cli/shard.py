"""`python -m tgi_trio shard`: computes for routers on other machines."""

from __future__ import annotations

import trio

from tgi_trio.cli.checks import find_secret
from tgi_trio.cli.computing import find_own_model, run_until_signalled
from tgi_trio.cli.files import check_cluster_secret
from tgi_trio.cli.options import HostOptions
from tgi_trio.logs import say, say_record
from tgi_trio.process.sockets import address_text, bind_sockets
from tgi_trio.router.shards.shard_host import ShardHost
from tgi_trio.settings.cluster_secret import read_cluster_secret


def run_shard(options: HostOptions) -> int:
    """Serve routers until SIGTERM or SIGINT, then return 0; main thread only.

    Raises ConfigurationError and ModelLoadError.
    """
    path = find_secret(options)
    check_cluster_secret(path)
    secret = read_cluster_secret(path)
    with bind_sockets((options.listen,), flag="--listen") as listeners:
        host = ShardHost(listeners, secret, find_own_model(options))
        address = address_text(listeners[0])

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(host.run)
                _announce(f"Waiting for a router at {address}", as_json=options.json_output)

        run_until_signalled(run)
    return 0


def _announce(line: str, *, as_json: bool) -> None:
    """Print the line for which scripts wait."""
    if as_json:
        say_record(line)
    else:
        say(line)
