"""Rings in which the largest frames fit: prompts as long as a server takes them."""

from __future__ import annotations

import numpy as np
import pytest

from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES, Endpoints
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, encode_prefill
from tgi_trio.ipc.ring import RingWriter
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.router.shards.ring_sizes import command_ring_bytes, plan_ring_bytes


def request(tokens: int, rows: int = 8) -> WarmupRequest:
    return WarmupRequest(
        max_prefill_tokens=4096,
        max_total_tokens=tokens,
        max_batch_size=rows,
        max_batch_total_tokens=0,
    )


@pytest.mark.parametrize("tokens", [2, 4096, 131_072, 262_144, 1_000_000])
def test_the_longest_prompt_fits_wherever_the_ring_stands(tokens: int) -> None:
    """With a grammar that is as long as any is taken to be."""
    sampling = SamplingParameters(grammar="g" * 400_000, logit_bias=((5, 1.0),) * 2000)
    blocks = range(1, 2 + tokens // BLOCK_SIZE)
    row = PrefillRow(1, np.arange(tokens, dtype=np.int32), tokens, 0, blocks, 1, sampling=sampling)
    frame = encode_prefill(1, [row])
    with Endpoints.create(0, 1, request_bytes=command_ring_bytes(request(tokens))) as ends:
        writer = RingWriter(ends.page.ring("request"), None, lambda: "a test")
        assert len(frame) <= writer.max_payload


def test_short_prompts_take_no_more_than_the_usual_ring() -> None:
    assert command_ring_bytes(request(65_536)) == DEFAULT_RING_BYTES
    assert command_ring_bytes(request(1_000_000)) == 1 << 24


def test_plans_of_many_long_rows_have_room() -> None:
    assert plan_ring_bytes(request(4096)) == DEFAULT_RING_BYTES
    assert plan_ring_bytes(request(1_000_000, rows=64)) >= 4 * 64 * 62_500 * 4
