"""The tokens are the model's tokens: the whole server against `transformers`, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
import trio

from tests.system.client import generate, open_session, stream
from tests.system.golden import reference, tokenize
from tests.system.server import serving
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

# One per way through the server: CPU kernels, with biases, torch, two stacks. What all other
# families compute is compared at the runner, in tests/shard.
FAMILIES = ("llama", "qwen2", "gpt2", "t5")
NEW_TOKENS = 24


def prompts() -> list[str]:
    """Return 16 prompts of mixed lengths."""
    rng = random.Random(7)
    words = "ring shard queue token block step client stream prefill decode".split()
    return [" ".join(rng.choices(words, k=1 + n * n // 3)) for n in range(16)]


@pytest.mark.sampled(3)
@pytest.mark.trio
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    texts = prompts()
    with serving("--model-id", str(tmp_path), "--dtype", "float32") as server:
        expected = reference(tmp_path, [tokenize(server, text) for text in texts], NEW_TOKENS)

        alone = []
        for text in texts[:4]:
            body = generate(server.url, text, max_new_tokens=NEW_TOKENS, details=True)
            alone.append([token["id"] for token in body["details"]["tokens"]])
        assert alone == expected[:4]

        together: dict[int, list[int]] = {}

        async def client(session: httpx.AsyncClient, n: int, delay: float) -> None:
            await trio.sleep(delay)
            ids: list[int] = []
            async for event in stream(session, server.url, texts[n], max_new_tokens=NEW_TOKENS):
                ids.append(event["token"]["id"])
            together[n] = ids

        async def passer_by(session: httpx.AsyncClient, n: int) -> None:
            events = stream(session, server.url, texts[n] + " and more", max_new_tokens=40)
            async for event in events:
                if event["index"] > n:
                    break
            await events.aclose()

        async with open_session() as session:
            async with trio.open_nursery() as nursery:  # all at once
                for n in range(16):
                    nursery.start_soon(client, session, n, 0.0)
            assert [together[n] for n in range(16)] == expected
            together.clear()
            async with trio.open_nursery() as nursery:  # while others join and leave
                for n in range(16):
                    nursery.start_soon(client, session, n, n * 0.01)
                    nursery.start_soon(passer_by, session, n)
            assert [together[n] for n in range(16)] == expected
        server.wait_idle()


@pytest.mark.trio
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_seed_has_the_same_tokens_and_log_probabilities_at_any_load(
    tmp_path: Path, dtype: str
) -> None:
    """Batch invariance of the CPU kernels, through the whole server: equal to the last bit."""
    make_checkpoint(tmp_path, "llama", hidden_size=128, head_dim=32)
    texts = prompts()[2:8]
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 5, "top_p": 0.9}
    flags = ("--model-id", str(tmp_path), "--dtype", dtype, "--cpu-backend", "kernels")
    with serving(*flags) as server:
        alone = {}
        for text in texts:
            body = generate(server.url, text, details=True, **asked)
            alone[text] = [(each["id"], each["logprob"]) for each in body["details"]["tokens"]]
        among: dict[str, list[tuple[int, float]]] = {}

        async def client(session: httpx.AsyncClient, text: str) -> None:
            tokens = [event["token"] async for event in stream(session, server.url, text, **asked)]
            among[text] = [(each["id"], each["logprob"]) for each in tokens]

        async with open_session() as session, trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(client, session, text)
        assert among == alone
        server.wait_idle()
