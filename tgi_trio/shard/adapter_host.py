"""The loop's interface to a runner's LoRA adapters, for every backend."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tgi_trio.ipc.adapters import AdapterOrder


class LoadedAdapter(Protocol):
    """A LoRA adapter that has been read and packed, but not installed."""

    @property
    def sha256(self) -> bytes: ...  # of its files
    @property
    def rank(self) -> int: ...  # the largest rank of its modules
    @property
    def nbytes(self) -> int: ...


class AdapterHost(Protocol):
    """The adapters of a runner; a row's is `SamplingParameters.adapter`."""

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        """Read and pack an adapter; may run in another thread, beside the steps.

        Raises ModelLoadError if it cannot be served, or its files differ from `order.sha256`.
        """
        ...

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        """Make the result of `load` usable by steps; between two steps only."""
        ...

    def drop(self, number: int) -> None:
        """Forget an adapter that no sequence uses, if known; between two steps only."""
        ...


@runtime_checkable
class AnnouncingHost(AdapterHost, Protocol):
    """A host of several ranks, which load at the same time."""

    def announce(self, order: AdapterOrder) -> None:
        """Have the other ranks begin to load what `load` will load here; between two steps only.

        `install` or `drop` of its number follows.
        """
        ...
