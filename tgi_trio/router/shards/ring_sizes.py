"""How large the rings of a shard group are.

Rings are made before the model is loaded, when nobody knows how much can be in a frame. So they
have room for what is usual, and what is longer goes through them in parts.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES
from tgi_trio.ipc.frame_codec import frame_bytes
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.hunyuan_vl import MOST_PARTS

_PLANS_IN_A_RING: Final = 4  # a follower is at most one step behind; the rest is for wrapping
_MOST_RING_BYTES: Final = 1 << 24  # of plans: 64 rows of 262,144 tokens in one piece
_DEEP_LAYERS: Final = 64  # more than any model's images add features to


def most_plan_bytes(request: WarmupRequest) -> int:
    """Return a bound of the bytes of a step's plan."""
    rows, tokens = request.max_batch_size, max(request.max_prefill_tokens, request.max_batch_size)
    entries = rows * -(-request.max_total_tokens // BLOCK_SIZE)
    images = {"features": tokens, "layers": _DEEP_LAYERS, "limits": tokens}
    images |= {"rotary": MOST_PARTS * tokens}
    images |= {"images": rows * request.max_images}  # that layers attend to
    return frame_bytes(
        FrameKind.PLAN,
        rows=rows,
        tokens=tokens,
        entries=entries,
        unknown=tokens,
        states=rows,
        **images,
    )


def plan_ring_bytes(request: WarmupRequest) -> int:
    """Return the size in bytes of a ring with room for a few of the largest plans, if usual."""
    wanted = _power_of_two(_PLANS_IN_A_RING * most_plan_bytes(request))
    return min(_MOST_RING_BYTES, max(DEFAULT_RING_BYTES, wanted))


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (size - 1).bit_length()
