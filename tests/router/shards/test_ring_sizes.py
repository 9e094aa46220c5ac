"""Rings of a fixed size, through which the largest frames go: prompts as long as a server takes."""

from __future__ import annotations

import numpy as np
import pytest

from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES, Endpoints
from tgi_trio.ipc.frame_codec import Frame, frame_bytes
from tgi_trio.ipc.frames import SPECS, FrameKind
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, decode_prefill, encode_prefill
from tgi_trio.ipc.ring import RingReader, RingWriter
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.hunyuan_vl import MOST_PARTS
from tgi_trio.router.shards.ring_sizes import (
    most_plan_bytes,
    plan_ring_bytes,
)


def request(tokens: int, rows: int = 8) -> WarmupRequest:
    return WarmupRequest(
        max_prefill_tokens=4096,
        max_total_tokens=tokens,
        max_batch_size=rows,
        max_batch_total_tokens=0,
    )


def longest_prompt(tokens: int) -> bytes:
    """Return the frame of such a prompt, with a grammar as long as any is taken to be."""
    sampling = SamplingParameters(grammar="g" * 400_000, logit_bias=((5, 1.0),) * 2000)
    blocks = range(1, 2 + tokens // BLOCK_SIZE)
    row = PrefillRow(1, np.arange(tokens, dtype=np.int32), tokens, 0, blocks, 1, sampling=sampling)
    return encode_prefill(1, [row])


@pytest.mark.parametrize("ring", [4096, DEFAULT_RING_BYTES])
@pytest.mark.parametrize("tokens", [2, 4096, 131_072, 1_000_000, 10_000_000])
def test_the_longest_prompt_goes_through_any_ring(tokens: int, ring: int) -> None:
    frame = longest_prompt(tokens)
    with Endpoints.create(0, 1, request_bytes=ring) as ends:
        memory = ends.page.ring("request")
        writer = RingWriter(memory, None, lambda: "a test")
        reader = RingReader(memory, None, lambda: "a test")
        looks = 0
        while not writer.try_write(frame):
            assert reader.try_read() is None
            looks += 1
        assert looks <= len(frame) // (ring // 4 - 64)
        view = reader.try_read()
        assert view is not None and bytes(view) == frame
        (row,) = decode_prefill(Frame(view))
        reader.release()
        assert len(row.token_ids) == tokens and row.token_ids[-1] == tokens - 1
        assert reader.empty() and writer.free == ring


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("tokens", [4096, 262_144, 10_000_000])
def test_rings_of_plans_are_bounded(tokens: int, rows: int) -> None:
    asked = request(tokens, rows)
    size = plan_ring_bytes(asked)
    assert DEFAULT_RING_BYTES <= size <= 1 << 24
    assert size == 1 << 24 or size >= 4 * most_plan_bytes(asked)


def test_a_plan_whose_tokens_turn_by_the_most_parts_is_within_the_bound() -> None:
    asked = request(4096)
    tokens, entries = asked.max_prefill_tokens, 8 * 4096 // BLOCK_SIZE
    rotary = np.zeros((MOST_PARTS, tokens), np.int64)
    counts = dict.fromkeys(SPECS[FrameKind.PLAN].counts, 0)
    counts |= {"rows": 8, "tokens": tokens, "entries": entries, "rotary": rotary.size}
    counts |= dict.fromkeys(("unknown", "features", "limits"), tokens)
    assert frame_bytes(FrameKind.PLAN, **counts) <= most_plan_bytes(asked)


def test_usual_plans_go_in_one_piece() -> None:
    assert plan_ring_bytes(request(4096)) == DEFAULT_RING_BYTES
    assert most_plan_bytes(request(262_144, rows=64)) < plan_ring_bytes(request(262_144, 64)) // 2
