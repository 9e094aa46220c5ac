"""What holds a runner's LoRA adapters: as the loop sees it, whichever backend has them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tgi_trio.ipc.adapters import AdapterOrder


class LoadedAdapter(Protocol):
    """A LoRA adapter that has been read and packed, and takes part in no step yet."""

    @property
    def sha256(self) -> bytes: ...  # of its files
    @property
    def rank(self) -> int: ...  # the largest of its modules
    @property
    def nbytes(self) -> int: ...


class AdapterHost(Protocol):
    """The adapters of a runner; a row's is `SamplingParameters.adapter`."""

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        """Read and pack an adapter; may run in another thread, beside the steps.

        Raises ModelLoadError for one that cannot be served, or has changed since `order.sha256`.
        """
        ...

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        """Have steps compute with what this host's `load` returned; between two steps only."""
        ...

    def drop(self, number: int) -> None:
        """Forget an adapter that no sequence has; between two steps only. Unknown ones are fine."""
        ...


@runtime_checkable
class AnnouncingHost(AdapterHost, Protocol):
    """A host of several ranks: they load at the same time, so that none waits for another."""

    def announce(self, order: AdapterOrder) -> None:
        """Have the others begin what `load` is to be called with; between two steps only.

        `install` or `drop` of its number follows.
        """
        ...
