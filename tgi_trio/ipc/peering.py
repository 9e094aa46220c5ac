"""Two machines prove to each other that they know the cluster's secret, before either obeys.

Both say a challenge: what they speak, and a number that nobody has used before. Then the caller
proves first, and who was called only to a caller that has. A proof is an HMAC-SHA256 over both
challenges and the side that gives it, so none can be played back, or reflected. What follows on the
connection is neither encrypted nor signed: machines meet on a network of their own.
"""

from __future__ import annotations

import enum
import hmac
import os
from typing import Final

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.frames import LAYOUT_HASH, VERSION

_MAGIC: Final = b"tgi-trio"
_SPEAKS: Final = _MAGIC + VERSION.to_bytes(8, "little") + LAYOUT_HASH.to_bytes(8, "little")
CHALLENGE_BYTES: Final = len(_SPEAKS) + 32
PROOF_BYTES: Final = 32


class Side(enum.Enum):
    """Who proves."""

    CALLER = b"caller"
    CALLED = b"called"


def make_challenge() -> bytes:
    """Return the first bytes that a side says: CHALLENGE_BYTES of them, never the same twice."""
    return _SPEAKS + os.urandom(CHALLENGE_BYTES - len(_SPEAKS))


def check_challenge(challenge: bytes, peer: str) -> None:
    """Raise ProtocolMismatch unless the other side speaks what this one does."""
    if not challenge.startswith(_MAGIC):
        raise ProtocolMismatch(peer, "it speaks another protocol: is it a tgi-trio?")
    if not challenge.startswith(_SPEAKS):
        raise ProtocolMismatch(
            peer,
            "it has frames of another layout: both machines need the same version of tgi-trio",
        )


def prove(secret: bytes, side: Side, caller: bytes, called: bytes) -> bytes:
    """Return what shows that `side` knows the secret, given both sides' challenges."""
    return hmac.digest(secret, side.value + caller + called, "sha256")


def check_proof(proof: bytes, secret: bytes, side: Side, caller: bytes, called: bytes) -> bool:
    """Return whether `side` knows the secret, in a time that does not tell how nearly."""
    return hmac.compare_digest(proof, prove(secret, side, caller, called))
