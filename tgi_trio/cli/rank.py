"""`python -m tgi_trio rank`: runs one rank of a server on another machine."""

from __future__ import annotations

from tgi_trio.cli.checks import find_leader
from tgi_trio.cli.computing import find_own_model, run_until_signalled
from tgi_trio.cli.files import check_cluster_secret
from tgi_trio.cli.options import RankOptions
from tgi_trio.router.shards.rank_host import RankHost, RankPlace
from tgi_trio.settings.cluster_secret import read_cluster_secret


def run_rank(options: RankOptions) -> int:
    """Run a rank until SIGTERM or SIGINT, then return 0; main thread only.

    Raises ConfigurationError.
    """
    run_until_signalled(RankHost(find_place(options)).run)
    return 0


def find_place(options: RankOptions) -> RankPlace:
    """Return which rank of which server is to run. Raises ConfigurationError."""
    leader, rank, secret = find_leader(options)
    host, _, port = leader.rpartition(":")
    check_cluster_secret(secret)
    known = read_cluster_secret(secret)
    return RankPlace(host.strip("[]"), int(port), rank, known, find_own_model(options))
