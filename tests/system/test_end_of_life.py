"""SIGTERM, kill -9, and what is left afterwards: nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import httpx
import pytest
import trio

from tests.stress.chaos_faults import Victim
from tests.system.client import generate, get, open_session, post, post_stream, stream
from tests.system.server import alive, children, serving, wait_gone
from tgi_trio.testing.segments import names_in_shm, names_left

pytestmark = pytest.mark.system

PROMPTS = [f"Chapter {n}. Once upon a time" for n in range(32)]


@pytest.mark.trio
async def test_sigterm_lets_streams_finish_and_exits_0() -> None:
    with serving("--stall-timeout", "600", fake="{}") as server:
        events: list[dict[str, Any]] = []

        async def client() -> None:
            async for event in stream(session, server.url, PROMPTS[0], max_new_tokens=200):
                events.append(event)

        async with open_session() as session, trio.open_nursery() as nursery:
            with server.held():  # the stream cannot end before all has been asked
                nursery.start_soon(client)
                while server.metric("tgi_request_accepted") < 1:
                    await trio.sleep(0.01)
                server.signal(signal.SIGTERM)
                ready = await session.get(f"{server.url}/ready")
                while ready.status_code == 200:  # the signal is on its way
                    ready = await session.get(f"{server.url}/ready")
                assert (ready.status_code, ready.json()["why"]) == (503, "shutting down")
                refused = await session.post(f"{server.url}/generate", json={"inputs": "too late"})
                assert refused.status_code == 503
                assert (await session.get(f"{server.url}/live")).status_code == 200
        assert not any("error" in event for event in events)
        assert len(events) == 200 and events[-1]["generated_text"] is not None
        assert server.wait() == 0


def test_health_is_red_for_a_while_before_requests_are_refused() -> None:
    """A load balancer that asks no other server after a 503 has to know before the first one."""
    with serving("--shutdown-delay", "600", fake="{}") as server:
        server.signal(signal.SIGTERM)
        while get(f"{server.url}/ready").status_code == 200:  # the signal is on its way
            time.sleep(0.01)
        assert get(f"{server.url}/ready").json() == {"ready": False, "why": "shutting down"}
        assert generate(server.url, "still served", max_new_tokens=3)["generated_text"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with serving("--shutdown-delay", "0.2", fake="{}") as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("number", "pause"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 0.0005), (signal.SIGTERM, 0.004)]
)
def test_any_number_of_signals_is_as_good_as_two(number: int, pause: float) -> None:
    """They went on to raise SystemExit inside trio, and inside the clean-up."""
    with serving(fake="{}") as server:
        shards = server.shards()
        while server.process.poll() is None:
            server.signal(number)
            time.sleep(pause)
        assert server.wait() == 0, server.output
        assert "Traceback" not in server.output
        assert not any(map(alive, shards))


@pytest.mark.trio
async def test_streams_that_outlast_the_drain_end_with_one_error() -> None:
    with serving("--graceful-termination-timeout", "0.3", fake='{"step_ms": 20}') as server:
        errors = []
        async with open_session() as session:
            seen = 0
            async for event in stream(session, server.url, PROMPTS[0], max_new_tokens=900):
                seen += 1
                if seen == 3:
                    server.signal(signal.SIGTERM)
                if "error" in event:
                    errors.append(event)
        assert len(errors) == 1 and errors[-1] is event
        assert server.wait() == 0


@pytest.mark.trio
async def test_a_reader_that_has_stopped_reading_does_not_hold_the_drain() -> None:
    with serving("--graceful-termination-timeout", "1", fake="{}") as server:
        victim = Victim(server.process.pid, "127.0.0.1", server.port, random.Random(0))
        body = {"inputs": "x", "parameters": {"max_new_tokens": 1000, "top_n_tokens": 5}}
        stalled = [await victim.send(body, receive_buffer=4096) for _ in range(4)]
        while server.metric("tgi_request_accepted") < 4:
            await trio.sleep(0.02)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for stream in stalled:
            await stream.aclose()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_stops_at_once(number: int) -> None:
    """SIGHUP comes of a terminal that closes; it ended the server, and all streams with it."""
    with serving(fake='{"step_ms": 50}') as server:
        with post_stream(
            f"{server.url}/generate_stream",
            json={"inputs": "endless", "parameters": {"max_new_tokens": 900}},
        ) as reply:
            lines = reply.iter_lines()  # held: dropping it would close the stream
            next(lines)
            server.signal(number)
            time.sleep(0.5)
            assert server.process.poll() is None  # it drains
            server.signal(number)
            assert server.wait() == 0


def test_what_asks_other_servers_for_new_logs_ends_nothing() -> None:
    """SIGUSR1 ended the router or the shard, whichever it was sent to."""
    with serving("--cpu-threads", "1", cold=True) as server:  # what is inherited is the point
        for process in (server.process.pid, *children(server.process.pid)):
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(process, number)
        assert generate(server.url, "still served", max_new_tokens=3)["generated_text"]
        assert server.metric("tgi_shard_restarts") == 0
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.trio
async def test_a_shard_given_up_is_a_report_for_the_log_and_few_words_for_clients() -> None:
    why = "the shard crashed 1 times in a row and is not started again"
    with serving("--shard-restart-limit", "0", fake='{"step_ms": 20}') as server:
        async with open_session() as session:
            async for event in stream(session, server.url, PROMPTS[0], max_new_tokens=900):
                if event.get("index") == 3:
                    os.kill(server.shards()[0], signal.SIGKILL)
        assert event == {
            "error": f"Request failed during generation: {why}",
            "error_type": "generation",
        }
        late = post(f"{server.url}/generate", json={"inputs": "too late"})
        assert (late.status_code, late.json()["error"]) == (503, why)
        ready, live = (get(f"{server.url}/{path}") for path in ("ready", "live"))
        assert (ready.status_code, ready.json()["why"]) == (503, f"shard gone: {why}")
        assert (live.status_code, live.json()["why"]) == (503, why)
        assert "was ended by SIGKILL (Killed) in phase" in server.output
        assert "Likely cause: killed from outside" in server.output
        assert f"{why} (--shard-restart-limit 0)" in server.output
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("moment", [0.0, 0.3, 1.0, None])
def test_kill_9_of_the_server_leaves_nothing(moment: float | None) -> None:
    before = names_in_shm()
    with serving(ready=moment is None) as server:
        if moment is not None:
            time.sleep(moment)
        shards = server.shards()
        server.signal(signal.SIGKILL)
        server.wait()
        assert wait_gone(shards) == []
    assert not names_left(before)


def test_kill_9_of_the_server_ends_what_runs_in_the_background() -> None:
    """Nobody's connection holds it, so nothing else would end it."""
    before = names_in_shm()
    form = {"type": "json_schema", "name": "any", "schema": {"type": "string"}}
    asked = {"model": "tgi", "input": "Rain?", "background": True, "max_output_tokens": 900}
    with serving(fake='{"step_ms": 100}') as server:
        path = f"{server.url}/v1/responses"
        left = post(path, json=asked).json()  # whose client does not come back
        formed = post(path, json=asked | {"text": {"format": form}}).json()  # checked in a process
        with post_stream(path, json=asked | {"stream": True}) as followed:
            lines = followed.iter_lines()
            while not next(lines).startswith("event: response.output_text.delta"):
                pass
            for each in (left, formed):
                while get(f"{path}/{each['id']}").json()["status"] == "queued":
                    time.sleep(0.01)
                assert get(f"{path}/{each['id']}").json()["status"] == "in_progress"
            family = [pid for child in children(server.process.pid) for pid in descendants(child)]
            assert set(server.shards()) < set(family)  # what checks grammars as well
            server.signal(signal.SIGKILL)
            server.wait()
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert wait_gone(family) == []
    assert not names_left(before)
    with serving(fake="{}") as server:  # knows nothing of it
        found = get(f"{server.url}/v1/responses/{left['id']}")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "response_not_found")


def descendants(pid: int) -> list[int]:
    return [pid, *(each for child in children(pid) for each in descendants(child))]


@pytest.mark.trio
async def test_kill_9_of_the_shard_under_32_streams_is_a_pause() -> None:
    def parameters(n: int) -> dict[str, Any]:
        sampled = {"do_sample": True, "seed": n, "temperature": 0.9} if n % 2 else {}
        return {"max_new_tokens": 120, **sampled}

    before = names_in_shm()
    with serving("--dtype", "float32") as server:
        alone = [
            generate(server.url, PROMPTS[n], **parameters(n))["generated_text"] for n in range(4)
        ]
        (shard,) = server.shards()
        texts: dict[int, str] = {}
        ids: dict[int, list[int]] = {}

        async def client(session: httpx.AsyncClient, n: int) -> None:
            async for event in stream(session, server.url, PROMPTS[n], **parameters(n)):
                assert "error" not in event, event
                ids.setdefault(n, []).append(event["index"])
                texts[n] = event["generated_text"] or ""

        async with open_session() as session:
            async with trio.open_nursery() as nursery:
                for n in range(32):
                    nursery.start_soon(client, session, n)
                while sum(map(len, ids.values())) < 100:
                    await trio.sleep(0.01)
                os.kill(shard, signal.SIGKILL)
        assert [texts[n] for n in range(4)] == alone
        for indexes in ids.values():  # no token is lost or doubled
            assert indexes == list(range(1, len(indexes) + 1))
        server.wait_metric("tgi_shard_restarts", 1)
        assert server.shards() != [shard] and not alive(shard)
        assert server.metric("tgi_shard_restarts") == 1
        server.wait_idle()
    assert not names_left(before)
