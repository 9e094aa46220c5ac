"""Two ranks behind one server: the tokens of one, and a group that lives and dies together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.system.client import generate, open_session, stream
from tests.system.golden import reference, tokenize
from tests.system.server import ServerProcess, serving, wait_gone
from tgi_trio.testing.checkpoints import make_checkpoint
from tgi_trio.testing.segments import names_in_shm, names_left

NEW_TOKENS = 24
pytestmark = pytest.mark.system

PROMPTS = ["Continuous batching is", "A ring buffer", "Tell me a story about a router"]


def by_rank(server: ServerProcess) -> list[int]:
    """Return the shards' process ids in the order of their ranks, in which they are started."""
    return sorted(server.shards(), key=lambda pid: (started(pid), pid))


def started(pid: int) -> int:
    """Return when a process was started, in ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def texts(server: ServerProcess) -> list[str]:
    sampled = {"do_sample": True, "seed": 7, "temperature": 0.9}
    greedy = [generate(server.url, p, max_new_tokens=NEW_TOKENS)["generated_text"] for p in PROMPTS]
    return [
        *greedy,
        generate(server.url, PROMPTS[2], max_new_tokens=NEW_TOKENS, **sampled)["generated_text"],
    ]


async def streamed(server: ServerProcess, harm: int, number: int) -> list[str]:
    """Return what all prompts are answered while a signal hits rank `harm` in mid-stream."""
    answers = [""] * len(PROMPTS)
    seen = 0

    async def client(session: httpx.AsyncClient, n: int) -> None:
        nonlocal seen
        async for event in stream(session, server.url, PROMPTS[n], max_new_tokens=NEW_TOKENS):
            assert "error" not in event, event
            seen += 1
            answers[n] = event["generated_text"] or ""

    victim = by_rank(server)[harm]
    async with open_session() as session, trio.open_nursery() as nursery:
        for n in range(len(PROMPTS)):
            nursery.start_soon(client, session, n)
        while seen < 4:
            await trio.sleep(0.005)
        os.kill(victim, number)
    assert wait_gone([victim]) == []
    return answers


@pytest.mark.trio
async def test_a_group_of_two_says_what_one_says_and_survives_the_loss_of_one(
    demo: ServerProcess,
) -> None:
    before = names_in_shm()
    expected = texts(demo)
    with serving("--num-shard", "2", "--speculate", "3", "--stall-timeout", "2") as server:
        assert len(server.shards()) == 2
        assert texts(server) == expected
        assert "the kernels do not do with heads that draft" in server.output  # torch does
        for restarts, number in enumerate([signal.SIGKILL, signal.SIGSTOP], start=1):
            assert await streamed(server, 1, number) == expected[: len(PROMPTS)]
            server.wait_metric("tgi_shard_restarts", restarts)
            server.wait_ready()
            assert server.metric("tgi_shard_restarts") == restarts
        server.wait_idle()
        assert "shard rank 1 (pid" in server.output and "was ended by SIGKILL" in server.output
        assert "rank 1 (pid" in server.output and "no heartbeat" in server.output
        assert len(server.shards()) == 2
    assert not names_left(before)


@pytest.mark.trio
@pytest.mark.parametrize("ranks", [2, 4], ids=["of a rank", "of two ranks"])
async def test_stages_say_what_one_process_says(demo: ServerProcess, ranks: int) -> None:
    """Alone and eight at once, sampled and not, in chunks and again, while another leaves; then a
    stage is killed in mid-stream.
    """
    flags = ("--num-shard", str(ranks), "--pipeline-stages", "2", "--cpu-threads", "1")
    cases: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 7, "top_p": 0.8, "repetition_penalty": 1.2},
        {"watermark": True, "do_sample": True, "seed": 9},
        {"grammar": {"type": "regex", "value": "[a-z ]{4,20}"}},
        {"frequency_penalty": 0.5, "top_n_tokens": 2},
        {"do_sample": True, "seed": 3, "typical_p": 0.7, "top_k": 9},
        {"do_sample": True, "seed": 5, "temperature": 0.6},
        {"stop": ["e"]},
        {},
    ]
    prompts = [*PROMPTS * 2, "a long prompt " * 40, "a long prompt " * 40 + "and its end"]

    async def answers(server: ServerProcess) -> list[str]:
        found = [""] * len(cases)

        async def client(session: httpx.AsyncClient, n: int) -> None:
            chosen = {"max_new_tokens": NEW_TOKENS - n, **cases[n]}
            events = stream(session, server.url, prompts[n], **chosen)
            async for event in events:
                assert "error" not in event, event
                found[n] = event["generated_text"] or ""

        async def leaver(session: httpx.AsyncClient) -> None:
            events = stream(session, server.url, "goes before its end", max_new_tokens=400)
            await anext(events)
            await events.aclose()

        async with open_session() as session, trio.open_nursery() as nursery:
            nursery.start_soon(leaver, session)
            for n in range(len(cases)):
                nursery.start_soon(client, session, n)
        return found

    expected, alone = await answers(demo), texts(demo)
    with serving(*flags, "--step-token-budget", "40", "--max-batch-size", "16") as server:
        assert texts(server) == alone
        assert await answers(server) == expected
        assert await answers(server) == expected  # with prefixes that are there already
        assert "one of 2 stages" in server.output  # the CPU kernels', not torch's
        assert await streamed(server, 1, signal.SIGKILL) == alone[: len(PROMPTS)]
        server.wait_metric("tgi_shard_restarts", 1)
        server.wait_ready()
        assert texts(server) == alone
        server.wait_idle()


@pytest.mark.trio
async def test_an_encoder_decoder_over_two_ranks(tmp_path: Path) -> None:
    """Alone and beside others, one of which leaves; the longest prompt comes in chunks."""
    folder = make_checkpoint(tmp_path, "t5")
    texts = [*PROMPTS, "a long prompt " * 12]
    flags = ("--model-id", str(folder), "--dtype", "float32", "--num-shard", "2")
    with serving(*flags, "--step-token-budget", "40", "--max-batch-size", "8") as server:
        ids = [tokenize(server, text) for text in texts]
        assert len(ids[-1]) > 40
        expected = reference(folder, ids, 8)
        sampled = {"do_sample": True, "seed": 3}
        alone = generate(server.url, texts[0], max_new_tokens=8, **sampled)["generated_text"]
        found: dict[int, list[int]] = {}

        async def client(session: httpx.AsyncClient, n: int) -> None:
            events = stream(session, server.url, texts[n], max_new_tokens=8)
            found[n] = [event["token"]["id"] async for event in events]

        async def again(session: httpx.AsyncClient) -> None:
            async for event in stream(session, server.url, texts[0], max_new_tokens=8, **sampled):
                text = event["generated_text"]
            assert text == alone

        async def leaver(session: httpx.AsyncClient) -> None:
            events = stream(session, server.url, "goes before its end", max_new_tokens=400)
            await anext(events)
            await events.aclose()

        async with open_session() as session, trio.open_nursery() as nursery:
            nursery.start_soon(leaver, session)
            nursery.start_soon(again, session)
            for n in range(len(texts)):
                nursery.start_soon(client, session, n)
        assert [found[n] for n in range(len(texts))] == expected
        server.wait_idle()


@pytest.mark.parametrize("moment", [0.5, None])
def test_kill_9_of_the_server_leaves_no_rank(moment: float | None) -> None:
    before = names_in_shm()
    with serving("--num-shard", "2", ready=moment is None) as server:
        if moment is not None:
            time.sleep(moment)
        shards = server.shards()
        server.signal(signal.SIGKILL)
        server.wait()
        assert wait_gone(shards) == []
    assert not names_left(before)
