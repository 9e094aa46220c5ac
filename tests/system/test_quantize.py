"""`--quantize eetq` from the command line to the tokens, before and after the death of a shard."""

from __future__ import annotations

import os
import signal

import pytest

from tests.system.client import generate, get
from tests.system.server import alive, serving

pytestmark = pytest.mark.system

PROMPT = "What is a KV cache?"


def test_a_replaced_shard_has_the_same_8_bit_weights() -> None:
    with serving("--quantize", "eetq") as server:
        assert get(f"{server.url}/info").json()["settings"]["quantize"] == "eetq"
        assert "int8 weights" in server.output
        before = generate(server.url, PROMPT, max_new_tokens=60)
        (shard,) = server.shards()
        os.kill(shard, signal.SIGKILL)
        assert generate(server.url, PROMPT, max_new_tokens=60) == before
        assert not alive(shard)
        assert server.metric("tgi_shard_restarts") == 1
