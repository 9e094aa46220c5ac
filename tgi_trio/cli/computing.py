"""Shared by `rank` and `shard`: the machine's own model, and running until a signal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from tgi_trio.cli.options import HostOptions, RankOptions
from tgi_trio.errors import TgiTrioError, find_first_leaf
from tgi_trio.process.signals import received_signals, run_to_its_end
from tgi_trio.router.shards.rank_incarnation import OwnModel


def find_own_model(options: RankOptions | HostOptions) -> OwnModel:
    """Return the model of this machine; downloads what is missing. Raises ModelLoadError."""
    if options.model_id is None:
        return OwnModel(None, options.trust_remote_code)
    from tgi_trio.hub.projectors import want_projector  # heavy, and not always needed
    from tgi_trio.hub.resolve import resolve_served

    found = resolve_served(
        options.model_id,
        options.revision,
        cache_dir=options.huggingface_hub_cache,
        trust_remote_code=options.trust_remote_code,
        progress=not options.json_output,
        own_tokenizer=False,
        projector=want_projector(options.mmproj, options.no_mmproj),
    )
    return OwnModel(found.model, options.trust_remote_code)


def run_until_signalled(run: Callable[[], Awaitable[None]]) -> None:
    """Run a program until a signal of `received_signals`; main thread only.

    Raises its first TgiTrioError.
    """

    async def main(early: Sequence[int]) -> None:
        with trio.open_signal_receiver(*received_signals()) as signals:
            if early:
                return
            async with trio.open_nursery() as nursery:

                async def obey() -> None:
                    await anext(aiter(signals))
                    nursery.cancel_scope.cancel()

                nursery.start_soon(obey)
                await run()

    try:
        run_to_its_end(main)
    except BaseExceptionGroup as group:
        ours, _ = group.split(TgiTrioError)
        if ours is None:
            raise
        raise find_first_leaf(ours) from group
