"""`python -m tgi_trio rank`: from flags to the program that runs one rank for another machine."""

from __future__ import annotations

import signal
from pathlib import Path

import trio

from tgi_trio.cli.files import check_cluster_secret
from tgi_trio.cli.options import RankOptions
from tgi_trio.errors import ConfigurationError, TgiTrioError
from tgi_trio.router.shards.rank_host import RankHost, RankPlace
from tgi_trio.settings.cluster_secret import read_cluster_secret


def run_rank(options: RankOptions) -> None:
    """Run a rank until SIGTERM or SIGINT; main thread only. Raises ConfigurationError."""
    host = RankHost(find_place(options))

    async def run() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:

                async def obey() -> None:
                    await anext(aiter(signals))
                    nursery.cancel_scope.cancel()

                nursery.start_soon(obey)
                await host.run()

    try:
        trio.run(run)
    except BaseExceptionGroup as group:
        ours, _ = group.split(TgiTrioError)
        if ours is None:
            raise
        raise _first_leaf(ours) from group


def find_place(options: RankOptions) -> RankPlace:
    """Return which rank of whose group is to run; raises ConfigurationError."""
    leader, rank, secret = options.leader, options.rank, options.cluster_secret_file
    if leader is None or rank is None or secret is None:
        raise ConfigurationError(
            "--leader, --rank and --cluster-secret-file say whose rank runs here"
        )
    host, _, port = leader.rpartition(":")
    if leader.startswith("unix:"):
        raise ConfigurationError(f"--leader must be host:port or [host]:port. Given: {leader}")
    check_cluster_secret(secret)
    model = _find_model(options)
    known = read_cluster_secret(secret)
    trusts_code = options.trust_remote_code
    return RankPlace(host.strip("[]"), int(port), rank, known, model, trusts_code)


def _find_model(options: RankOptions) -> Path | None:
    if options.model_id is None:
        return None
    from tgi_trio.hub import resolve_served  # heavy, and not always needed

    found = resolve_served(
        options.model_id,
        options.revision,
        cache_dir=options.huggingface_hub_cache,
        trust_remote_code=options.trust_remote_code,
        progress=not options.json_output,
        own_tokenizer=False,
    )
    return found.model


def _first_leaf(group: BaseExceptionGroup[TgiTrioError]) -> TgiTrioError:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
