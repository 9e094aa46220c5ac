"""How many bytes all requests may have in images as they came, before these are decoded.

They are kept as long as their request: after a crash of the shard an image is decoded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import GenerationError, Overloaded, ValidationError

_AGAIN_S: Final = 1.0  # when a client may come back: as soon as another request has ended


class ByteBudget:
    """The bytes of all requests under way."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of all images together (--max-image-bytes)."""
        self._most = most
        self.used = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """Give a request what it takes of the budget, for the block."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.used -= held.nbytes
            held.ended = True

    def take(self, held: HeldBytes, nbytes: int) -> None:
        """Add bytes to what a request holds; raises as `HeldBytes.take`."""
        if held.ended:
            raise GenerationError("the client has left")
        if held.nbytes + nbytes > self._most:
            raise ValidationError(
                f"the images of the prompt have more than {self._most} bytes together "
                "(--max-image-bytes)"
            )
        if self.used + nbytes > self._most:
            raise Overloaded("the images of all requests have too many bytes", _AGAIN_S)
        self.used += nbytes
        held.nbytes += nbytes


@dataclass(slots=True, eq=False)
class HeldBytes:
    """What the images of one request have taken so far."""

    _budget: ByteBudget
    nbytes: int = 0
    ended: bool = False  # what it took is given back

    def take(self, nbytes: int) -> None:
        """Take bytes that have come.

        Raises Overloaded while others have them, ValidationError where one request never can, and
        GenerationError where the request has ended.
        """
        self._budget.take(self, nbytes)
