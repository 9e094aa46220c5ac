"""Mutual authentication of two machines by the cluster's secret (challenge and response).

Both send a challenge: their protocol version and a nonce. Then the caller proves that it knows the
secret, and only if it does, so does the called side. A proof is an HMAC-SHA256 over both challenges
and the side that gives it, so proofs can be neither replayed nor reflected. What follows on the
connection is neither encrypted nor signed: the machines need a private network.
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
    """The side of the connection that gives a proof."""

    CALLER = b"caller"
    CALLED = b"called"


def make_challenge() -> bytes:
    """Return a new challenge of CHALLENGE_BYTES, the first bytes that a side sends."""
    return _SPEAKS + os.urandom(CHALLENGE_BYTES - len(_SPEAKS))


def check_challenge(challenge: bytes, peer: str) -> None:
    """Raise ProtocolMismatch unless the other side has the same protocol and version."""
    if not challenge.startswith(_MAGIC):
        raise ProtocolMismatch(peer, "it speaks another protocol: is it a tgi-trio?")
    if not challenge.startswith(_SPEAKS):
        raise ProtocolMismatch(
            peer,
            "it has frames of another layout: both machines need the same version of tgi-trio",
        )


def prove(secret: bytes, side: Side, caller: bytes, called: bytes) -> bytes:
    """Return the proof that `side` knows the secret, given both sides' challenges."""
    return hmac.digest(secret, side.value + caller + called, "sha256")


def check_proof(proof: bytes, secret: bytes, side: Side, caller: bytes, called: bytes) -> bool:
    """Return whether `side`'s proof is right, compared in constant time."""
    return hmac.compare_digest(proof, prove(secret, side, caller, called))
