"""Adapters of a rank that follows: loaded while rank 0 loads them, installed when it says so."""

from __future__ import annotations

from concurrent.futures import Future

from tgi_trio.errors import TgiTrioError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import AdapterHost, LoadedAdapter
from tgi_trio.shard.adapters.loading_thread import LoadingThread


class FollowedAdapters:
    """A follower's adapters, by the orders of rank 0's `GroupAdapters`."""

    def __init__(self, host: AdapterHost) -> None:
        self._host = host
        self._loading: dict[int, Future[LoadedAdapter]] = {}
        self._thread = LoadingThread()

    def order(self, order: AdapterOrder) -> None:
        """Begin to load an adapter, or install it at the second order of its number.

        Raises ModelLoadError if this rank cannot load the same bytes as rank 0.
        """
        loading = self._loading.pop(order.number, None)
        if loading is None:
            self._loading[order.number] = self._thread.load(self._host, order)
            return
        self._host.install(order.number, self._take(loading, order))
        self._rest()

    def drop(self, number: int) -> None:
        """Forget an adapter, whether loading, loaded or installed."""
        if (loading := self._loading.pop(number, None)) is not None:
            loading.cancel()
        self._host.drop(number)
        self._rest()

    def close(self) -> None:
        """End without waiting for loads."""
        self._thread.close()

    def _take(self, loading: Future[LoadedAdapter], order: AdapterOrder) -> LoadedAdapter:
        """Return the loaded adapter; loads it again if it differs from what rank 0 has read."""
        try:
            loaded = loading.result()
        except (TgiTrioError, MemoryError):
            return self._host.load(order)
        return loaded if loaded.sha256 == order.sha256 else self._host.load(order)

    def _rest(self) -> None:
        if not self._loading:
            self._thread.rest()
