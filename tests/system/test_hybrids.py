"""A model whose layers keep states behind a whole server: the tokens are transformers'."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.shard.speculation.mtp_support import add_layers
from tests.system.client import generate, get, open_session, stream
from tests.system.golden import reference, tokenize
from tests.system.server import serving
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

NEW_TOKENS = 16
SYSTEM = "A ring between a router and a shard, and a token for every client that waits. " * 2
PROMPTS = [SYSTEM + f"Client {n} asks: what is a step?" for n in range(14)] + ["Why", "A ring"]
# Too little memory for all at once: some may be pushed out and computed again.
SMALL = ["--max-batch-total-tokens", "768", "--max-total-tokens", "512"]
SMALL += ["--max-batch-prefill-tokens", "768", "--max-input-tokens", "256"]


def test_sixty_four_clients_share_slots_for_six() -> None:
    """The made-up shard fails whoever finds another's states in a slot of its own."""
    fake = json.dumps({"state_slots": 13, "blocks": 64})
    with serving("--speculate", "2", "--max-total-tokens", "512", fake=fake) as server:

        def ask(n: int) -> str:
            body = generate(server.url, PROMPTS[n % 8], max_new_tokens=40 + n % 8)
            return str(body["generated_text"])

        alone = [ask(n) for n in range(8)]
        with ThreadPoolExecutor(64) as pool:
            assert list(pool.map(ask, range(64))) == alone * 8
        server.wait_idle()
        assert server.metric("tgi_state_slots_total") == 12


# Which the CPU kernels compute; the second by drafts of a layer of its own.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 128},
    "qwen3_5_text": dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32),
    "zamba2": {"hidden_size": 128, "mamba_d_state": 32, "adapter_rank": 32},
}


@pytest.mark.sampled(2)
@pytest.mark.trio
@pytest.mark.parametrize("family", HYBRIDS)
async def test_a_hybrid_says_what_transformers_says_whatever_happens_to_it(
    family: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **HYBRIDS[family])
    if own := family == "qwen3_5_text":
        add_layers(tmp_path)
    flags = ("--model-id", str(tmp_path), "--dtype", "float32", "--speculate", "2", *SMALL)
    with serving(*flags) as server:
        settings = get(f"{server.url}/info").json()["settings"]
        assert settings["drafter"] == ("mtp" if own else "ngram")
        served = settings["serving"]
        assert "path: decoder" in served and "CPU kernels: yes" in served
        expected = reference(tmp_path, [tokenize(server, text) for text in PROMPTS], NEW_TOKENS)

        def ask(n: int) -> list[int]:
            body = generate(server.url, PROMPTS[n], max_new_tokens=NEW_TOKENS, details=True)
            return [token["id"] for token in body["details"]["tokens"]]

        assert [ask(0), ask(14)] == [expected[0], expected[14]]
        hits = server.metric("tgi_prefix_cache_hit_tokens")
        assert ask(0) == expected[0]
        assert server.metric("tgi_prefix_cache_hit_tokens") >= hits + 64

        found: dict[int, list[int]] = {}
        streaming = trio.Event()

        async def client(session: httpx.AsyncClient, n: int) -> None:
            ids: list[int] = []
            async for event in stream(session, server.url, PROMPTS[n], max_new_tokens=NEW_TOKENS):
                assert "error" not in event, event
                ids.append(event["token"]["id"])
                streaming.set()
            found[n] = ids

        async with open_session() as session, trio.open_nursery() as nursery:
            for n in range(len(PROMPTS)):
                nursery.start_soon(client, session, n)
            await streaming.wait()
            os.kill(server.shards()[0], signal.SIGKILL)
        assert found == dict(enumerate(expected))
        server.wait_idle()
        assert server.metric("tgi_state_slots_total") > 0
        assert server.metric("tgi_batch_draft_tokens") > 0 or not own
