"""How large the rings of a shard group are: its largest frames must fit."""

from __future__ import annotations

from typing import Final

from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES
from tgi_trio.ipc.frame_codec import frame_bytes
from tgi_trio.ipc.frames import WORD, Kind
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest

_PLANS_IN_A_RING: Final = 4  # a follower is at most one step behind; the rest is for wrapping
_DEEP_LAYERS: Final = 64  # more than any model's images add features to
_BESIDE_TOKENS: Final = 2**19  # bytes for a row's grammar, biases and images


def command_ring_bytes(request: WarmupRequest) -> int:
    """Return the size in bytes of a ring in which the longest prompt fits.

    Between twice and four times of it: a frame may take half of a ring.
    """
    tokens = request.max_total_tokens
    counts = dict.fromkeys(
        ("biases", "gap_ends", "saves", "grammar_chars", "ends", "tokenizer_chars"), 0
    )
    blocks = 1 + -(-tokens // BLOCK_SIZE)
    counts |= {"rows": 1, "tokens": tokens, "blocks": blocks, "images": 0, "image_runs": 0}
    largest = frame_bytes(Kind.PREFILL, **counts) + _BESIDE_TOKENS
    return max(DEFAULT_RING_BYTES, _power_of_two(2 * (largest + WORD)))


def plan_ring_bytes(request: WarmupRequest) -> int:
    """Return the size in bytes of a ring with room for a few of the largest plans."""
    rows, tokens = request.max_batch_size, max(request.max_prefill_tokens, request.max_batch_size)
    entries = rows * -(-request.max_total_tokens // BLOCK_SIZE)
    images = {"features": tokens, "layers": _DEEP_LAYERS, "rotary": 3 * tokens, "limits": tokens}
    images["images"] = rows * request.max_images  # that layers attend to
    largest = frame_bytes(
        Kind.PLAN, rows=rows, tokens=tokens, entries=entries, unknown=tokens, states=rows, **images
    )
    return max(DEFAULT_RING_BYTES, _power_of_two(_PLANS_IN_A_RING * largest))


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (size - 1).bit_length()
