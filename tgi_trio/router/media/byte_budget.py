"""A limit on the bytes of all requests' media before decoding.

Encoded media are kept as long as their request, since after a crash of the shard they are decoded
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import GenerationError, Overloaded, ValidationError

_RETRY_AFTER_S: Final = 1.0  # retry-after: as soon as another request has ended


class ByteBudget:
    """The bytes of media of all running requests."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of all media together (--max-image-bytes)."""
        self._most = most
        self.used = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """Give a request its part of the budget, for the block."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.used -= held.nbytes
            held.ended = True

    def take(self, held: HeldBytes, nbytes: int) -> None:
        """Add bytes to a request's part. Raises as `HeldBytes.take`."""
        if held.ended:
            raise GenerationError("the client has left")
        if held.nbytes + nbytes > self._most:
            raise ValidationError(
                f"the images of the prompt have more than {self._most} bytes together "
                "(--max-image-bytes)"
            )
        if self.used + nbytes > self._most:
            raise Overloaded("the images of all requests have too many bytes", _RETRY_AFTER_S)
        self.used += nbytes
        held.nbytes += nbytes


@dataclass(slots=True, eq=False)
class HeldBytes:
    """The part of one request's media in the budget."""

    _budget: ByteBudget
    nbytes: int = 0
    ended: bool = False  # its bytes have been released

    def take(self, nbytes: int) -> None:
        """Take bytes that have been received.

        Raises Overloaded if other requests have too many, ValidationError if a single request can
        never have so many, and GenerationError if the request has ended.
        """
        self._budget.take(self, nbytes)
