"""What has been found out about adapters from their base's weights, for when they are loaded again.

An adapter that others have displaced is the same when it comes back, and so is the base. So the
norms of DoRA are kept in memory by the sha256 of an adapter's files, a number for each output.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final

from tgi_trio.shard.checkpoint.numbers import Floats

_MOST_BYTES: Final = 128 << 20  # of all adapters but the last; one of a Llama of 8B has 5.5 MB

Rows = tuple[str, int, int]  # a module, and some of its rows


class KnownNorms:
    """Norms by adapter; those of the least recently loaded ones are forgotten beyond a bound."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most_bytes
        self._by_adapter: OrderedDict[bytes, dict[Rows, Floats]] = OrderedDict()
        self._lock = Lock()

    def of(self, sha256: bytes) -> dict[Rows, Floats]:
        """Return what is known of an adapter, to be added to. Thread-safe."""
        with self._lock:
            found = self._by_adapter.setdefault(sha256, {})
            self._by_adapter.move_to_end(sha256)
            while len(self._by_adapter) > 1 and self._count() > self._most:
                self._by_adapter.popitem(last=False)
            return found

    def _count(self) -> int:
        """Return the bytes of all adapters but the last."""
        *before, _ = self._by_adapter.values()
        return sum(norms.nbytes for each in before for norms in each.copy().values())
