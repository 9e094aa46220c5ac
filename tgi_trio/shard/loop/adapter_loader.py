"""Loads a shard's adapters beside the steps, and installs them between two steps."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Set
from concurrent.futures import Future

from tgi_trio.errors import PeerError, TgiTrioError
from tgi_trio.ipc.adapters import AdapterOrder, AdapterReport
from tgi_trio.shard.adapter_host import AdapterHost, AnnouncingHost, LoadedAdapter
from tgi_trio.shard.adapters.loading_thread import LoadingThread

_NO_HOST = "this server was started without --lora-adapters and --adapter-updates"


class AdapterLoader:
    """Loads adapters, and keeps which are installed, are loading, or have failed and why."""

    def __init__(self, host: AdapterHost | None, cores: Set[int] | None = None) -> None:
        """`cores`: on which to load; None: the caller's."""
        self._host = host
        self._installed: set[int] = set()
        self._failed: dict[int, str] = {}  # number -> why, until ordered again or dropped
        self._loading: dict[int, Future[LoadedAdapter]] = {}
        self._thread = LoadingThread(cores)

    def order(self, order: AdapterOrder) -> None:
        """Begin to load an adapter."""
        self._failed.pop(order.number, None)
        if self._host is None:
            self._loading[order.number] = _failure(_NO_HOST)
        else:
            if isinstance(self._host, AnnouncingHost):
                self._host.announce(order)
            self._loading[order.number] = self._thread.load(self._host, order)

    def drop(self, number: int) -> None:
        """Forget an adapter, whether installed, loading or failed."""
        loading = self._loading.pop(number, None)
        if loading is not None:
            loading.cancel()
            self._rest()
        self._failed.pop(number, None)
        if self._host is not None and (loading is not None or number in self._installed):
            self._installed.discard(number)
            self._host.drop(number)  # other ranks may be loading it

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def finish(self, *, wait: bool = False) -> Iterator[AdapterReport]:
        """Install what has been loaded; yields a report for each. `wait`: for all orders.

        Between two steps only. Raises PeerError if another rank cannot be reached.
        """
        for number, loading in list(self._loading.items()):
            if wait or loading.done():
                del self._loading[number]
                report = self._settle(number, loading)
                if report.error and self._host is not None:
                    self._host.drop(number)  # other ranks may be loading it
                yield report
        self._rest()

    def refusal(self, number: int) -> str | None:
        """Return why a sequence cannot use an adapter; None if it can."""
        if not number or number in self._installed:
            return None
        why = self._failed.get(number, "it has not been loaded")
        return f"its adapter cannot be used: {why}"

    def close(self) -> None:
        """End without waiting for loads."""
        self._thread.close()

    def _rest(self) -> None:
        if not self._loading:
            self._thread.rest()

    def _settle(self, number: int, loading: Future[LoadedAdapter]) -> AdapterReport:
        try:
            loaded = loading.result()
            if self._host is None:
                raise ValueError("nothing could have loaded it")
            self._host.install(number, loaded)
        except PeerError:
            raise  # another rank has failed
        except Exception as error:
            self._failed[number] = why = _explain(error)
            return AdapterReport(number, why)
        self._installed.add(number)
        return AdapterReport(number, "", loaded.nbytes, loaded.rank, loaded.sha256)


def _explain(error: Exception) -> str:
    """Return why an adapter could not be loaded; prints the traceback of an unexpected error."""
    match error:
        case TgiTrioError():
            return str(error)
        case MemoryError():
            return "there is no memory for it"
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"


def _failure(why: str) -> Future[LoadedAdapter]:
    failed: Future[LoadedAdapter] = Future()
    failed.set_exception(TgiTrioError(why))
    return failed
