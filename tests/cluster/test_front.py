"""A front over replicas that fail: clients get whole answers, and nothing that is not for them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest
import trio

from tests.cluster.fake_replica import BODY, EVENTS, WHOLE, fake_replicas
from tests.cluster.served_front import WITH_SECRET, Answer, receive, served_front
from tgi_trio.cluster import relay
from tgi_trio.cluster.front import FrontSettings
from tgi_trio.cluster.members import MemberEvent, MemberState
from tgi_trio.cluster.relay import MOST_LOST

pytestmark = pytest.mark.trio

LINES = [0, *(len(b":i 0:%d\n" % (100 + n)) for n in range(7)), len(b":i 0:107!\n"), 0]
SENT = list(accumulate(len(e) + n for e, n in zip(EVENTS, LINES, strict=True)))  # bytes, ids too


async def test_a_stream_passes_without_what_is_for_the_front_alone() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        answer = await front.ask(
            "POST",
            "/generate_stream?a=b",
            BODY,
            x_request_id="mine",
            x_tgi_front="forged",
            x_tgi_emitted="0:1",
            authorization="Bearer theirs",
        )
        assert (answer.status, answer.body) == (200, WHOLE)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-request-id"] == "mine"
        (seen,) = replicas.all[0].seen
        assert (seen.path, seen.body) == ("/generate_stream?a=b", BODY)
        assert seen.headers["x-tgi-front"] == WITH_SECRET.secret.decode()
        assert "x-tgi-emitted" not in seen.headers
        assert seen.headers["authorization"] == "Bearer theirs"
        assert seen.headers["x-request-id"] == "mine"


# In the middle of the first event, at the end of some, in ids, in an event, before [DONE].


@pytest.mark.parametrize("cut", [0, 9, SENT[0], SENT[3], SENT[4] + 3, SENT[6] + 20, SENT[8]])
async def test_a_stream_goes_on_where_its_replica_was_lost(cut: int) -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses) as front:
        for each in replicas.all:
            each.cut_after = cut
        cutting = trio.Event()

        async def heal() -> None:
            """Only the first one to be asked cuts."""
            while not any(replicas.asked):
                await trio.sleep(0)
            for each in replicas.all:
                if not each.seen:
                    each.cut_after = None
            cutting.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(heal)
            answer = await front.ask("POST", "/generate_stream", BODY)
        assert not answer.cut
        assert answer.body == WHOLE
        assert front.count("lost") == 1
        assert front.count("resumed") == 1
        first, second = (each.seen[0] for each in replicas.all if each.seen)
        assert {first.headers["x-tgi-seed"]} == {second.headers["x-tgi-seed"]}
        assert front.front.running == 0


@pytest.mark.parametrize("alike", [True, False])
async def test_a_stream_goes_on_at_no_other_model(
    monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    if not alike:
        monkeypatch.setattr(relay, "RESUME_SECONDS", 0.5)
    async with fake_replicas(2) as replicas:
        for number, each in enumerate(replicas.all):
            each.info = {"model_id": "one" if alike else f"number {number}", "model_sha": None}
        async with served_front(replicas.addresses, WITH_SECRET) as front:
            for each in replicas.all:
                each.pause = 0.05
            answer = Answer(0, {})
            stream, connection = await front.open("POST", "/generate_stream", BODY)
            async with stream:
                await receive(stream, connection, answer, until=b"<5 0>")  # a token of this model
                next(each for each in replicas.all if each.seen).die()
                await receive(stream, connection, answer)
            assert (answer.body == WHOLE) == alike
            assert front.count("resumed") == alike
            assert (b"No replica could go on with it" in answer.body) != alike


async def test_without_a_secret_a_stream_that_began_ends_with_an_error() -> None:
    async with fake_replicas(2) as replicas:
        async with served_front(replicas.addresses, FrontSettings()) as front:
            for each in replicas.all:
                each.cut_after = len(EVENTS[0]) + len(EVENTS[1])  # no ids are sent
            answer = await front.ask("POST", "/generate_stream", BODY)
            *events, error = answer.body.split(b"\n\n")[:-1]
            assert events == [event.strip() for event in EVENTS[:2]]
            assert b"--cluster-secret-file" in error
            assert not answer.cut
            assert all("x-tgi-seed" not in seen.headers for r in replicas.all for seen in r.seen)


async def test_a_whole_answer_is_asked_for_again_with_the_same_seed() -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses) as front:
        texts = set()
        for _ in range(2):
            answer = await front.ask("POST", "/generate", b'{"inputs":"x"}')
            texts.add(answer.text)
        assert len(texts) == 2  # each request has a seed of its own
        replicas.all[0].die()  # found out by a poll, or by the next request
        answer = await front.ask("POST", "/generate", BODY)
        assert json.loads(answer.body)["text"].startswith("<5 0><5 1>")


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (replica,) = replicas.all
        for _ in range(3):
            assert (await front.ask("POST", "/generate_stream", BODY)).body == WHOLE
            assert (await front.ask("POST", "/generate", BODY)).status == 200
        assert replica.taken == 1  # that of the question how it is
        replica.hang_up()  # of which the front learns when it asks the next time
        assert (await front.ask("POST", "/generate_stream", BODY)).body == WHOLE
        assert (replica.taken, front.count("lost")) == (2, 0)


@pytest.mark.parametrize("unserved", [503, 529])
async def test_a_full_replica_is_passed_over_and_the_last_answer_is_passed_on(
    unserved: int,
) -> None:
    """Messages have 529 where all else has 503."""
    async with fake_replicas(3) as replicas, served_front(replicas.addresses) as front:
        replicas.all[0].status = 429
        replicas.all[1].status = unserved
        for _ in range(6):
            answer = await front.ask("POST", "/generate_stream", BODY)
            assert (answer.status, answer.body) == (200, WHOLE)
        replicas.all[2].status = unserved
        answer = await front.ask("POST", "/generate_stream", BODY)
        told = {"error": f"status 429 of {replicas.all[0].address}"}
        assert (answer.status, json.loads(answer.body)) == (429, told)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_replica_without_the_response_that_is_meant_is_passed_over(method: str) -> None:
    """Each replica keeps what it has answered itself."""
    async with fake_replicas(3) as replicas, served_front(replicas.addresses) as front:
        for each in replicas.all[:2]:
            each.status, each.elsewhere = 404, True
        body = BODY if method == "POST" else b""
        for _ in range(6):
            assert (await front.ask(method, "/v1/responses/resp_1", body)).status == 200
        replicas.all[2].status, replicas.all[2].elsewhere = 404, True
        answer = await front.ask(method, "/v1/responses/resp_1", body)
        assert answer.status == 404 and "x-tgi-elsewhere" not in answer.headers
        assert "status 404 of" in json.loads(answer.body)["error"]
        replicas.all[1].status = 429  # it may have it, and the client asks again
        assert (await front.ask(method, "/v1/responses/resp_1", body)).status == 429


@pytest.mark.parametrize("status", [400, 401, 404, 422, 424, 500])
async def test_other_errors_are_passed_on(status: int) -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses) as front:
        for each in replicas.all:
            each.status = status
        answer = await front.ask("POST", "/v1/chat/completions", b"{}")
        assert answer.status == status
        assert "status" in json.loads(answer.body)["error"]
        assert sum(replicas.asked) == 1


async def test_nobody_listens() -> None:
    async with served_front(["127.0.0.1:1"], up=False) as front:
        await front.until("127.0.0.1:1", MemberState.DEAD)
        answer = await front.ask("POST", "/v1/completions", b"{}")
        assert answer.status == 503
        assert "No replica is there" in json.loads(answer.body)["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        assert (await front.ask("GET", "/health")).status == 503


@pytest.mark.parametrize(
    ("event", "status"), [(MemberEvent.WELL, 200), (MemberEvent.SILENT, 503), (None, 503)]
)
async def test_a_request_waits_for_the_only_replica_while_it_may_live(
    event: MemberEvent | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which gets nothing before it has said how it is; one that is dead is not waited for."""
    if event is None:
        monkeypatch.setattr(relay, "WAIT_SECONDS", 0.05)
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        members, address = front.fleet.members, replicas.all[0].address

        async def tell() -> None:
            while not front.count("requests"):
                await trio.sleep(0.001)
            await trio.sleep(0.05)
            assert replicas.asked == [0]
            if event is not None:
                members.tell(address, event, trio.current_time())

        members.tell(address, MemberEvent.LATE, trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            answer = await front.ask("POST", "/generate", BODY)
        assert answer.status == status
        assert sum(replicas.asked) == (status == 200)
        front.fleet.check()


async def test_an_answer_that_was_cut_is_asked_for_again_where_there_is_one_replica() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (replica,) = replicas.all
        replica.cut_after = 90

        async def mend() -> None:
            while not front.count("lost"):
                await trio.sleep(0.001)
            replica.cut_after = None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(mend)
            answer = await front.ask("POST", "/generate", BODY)
        assert answer.status == 200
        assert replicas.asked in ([2], [3])  # it may be asked again before it is mended


async def test_a_request_that_ends_replicas_is_given_up() -> None:
    async with fake_replicas(MOST_LOST + 1) as replicas:
        async with served_front(replicas.addresses) as front:
            for each in replicas.all:
                each.cut_after = SENT[2]
            answer = await front.ask("POST", "/generate_stream", BODY)
            assert b"it is given up" in answer.body
            assert sum(replicas.asked) == MOST_LOST


async def test_a_silent_replica_is_left_and_another_goes_on() -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses, timeout=2) as front:
        for each in replicas.all:
            each.pause = 0.05
        async with trio.open_nursery() as nursery:

            async def silence() -> None:
                while not any(each.began.is_set() for each in replicas.all):
                    await trio.sleep(0.001)
                next(each for each in replicas.all if each.began.is_set()).silent.set()

            nursery.start_soon(silence)
            answer = await front.ask("POST", "/generate_stream", BODY)
        assert answer.body == WHOLE
        assert front.count("resumed") >= 1


async def test_a_client_that_leaves_leaves_the_replica_too() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (replica,) = replicas.all
        replica.tokens, replica.pause = 10_000, 0.01
        stream, _ = await front.open("POST", "/generate_stream", BODY)
        await replica.began.wait()
        await stream.aclose()
        await replica.left.wait()
        while front.front.running:
            await trio.sleep(0.001)
        assert front.count("cancelled") == 1


async def test_keys_limits_and_what_is_not_served() -> None:
    settings = replace(WITH_SECRET, api_keys=("key",), payload_limit=100)
    async with fake_replicas(1) as replicas:
        async with served_front(replicas.addresses, settings) as front:
            assert (await front.ask("POST", "/v1/messages", b"{}")).status == 401
            assert (await front.ask("GET", "/info")).status == 200
            good = await front.ask("POST", "/generate_stream", BODY, x_api_key="key")
            assert good.body == WHOLE
            large = await front.ask("POST", "/generate", b"x" * 101, x_api_key="key")
            assert (large.status, "--payload-limit" in large.text) == (413, True)
            adapters = await front.ask("POST", "/v1/load_lora_adapter", b"{}", x_api_key="key")
            assert adapters.status == 501
            head = await front.ask("HEAD", "/info")
            assert (head.status, head.body) == (200, b"")


async def test_metrics_of_its_own_and_of_all_replicas() -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses) as front:
        await front.ask("POST", "/generate_stream", BODY)
        own = (await front.ask("GET", "/metrics")).text
        assert "tgi_front_requests 1\n" in own
        assert 'tgi_front_replicas{state="up"} 2\n' in own
        both = (await front.ask("GET", "/metrics/replicas")).text
        assert both.count("# TYPE x counter\n") == 1
        for each in replicas.addresses:
            assert f'x{{replica="{each}",a="b"}} 1\n' in both


async def test_many_streams_lose_a_replica_together() -> None:
    async with fake_replicas(3) as replicas, served_front(replicas.addresses) as front:
        bodies = []
        for each in replicas.all:
            each.pause = 0.01

        async def client() -> None:
            bodies.append((await front.ask("POST", "/generate_stream", BODY)).body)

        async with trio.open_nursery() as nursery:
            for _ in range(24):
                nursery.start_soon(client)
            while not any(each.began.is_set() for each in replicas.all):
                await trio.sleep(0.001)
            next(each for each in replicas.all if each.began.is_set()).die()
        assert bodies == [WHOLE] * 24
        front.fleet.check()


async def test_the_time_that_a_request_has_had_goes_with_it() -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses) as front:
        for each in replicas.all:
            each.pause, each.cut_after = 0.06, SENT[1]

        async def heal() -> None:
            while not any(replicas.asked):
                await trio.sleep(0)
            for each in replicas.all:
                if not each.seen:
                    each.cut_after = None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(heal)
            assert (await front.ask("POST", "/generate_stream", BODY)).body == WHOLE
        first, then = sorted(
            int(each.seen[0].headers["x-tgi-waited"]) for each in replicas.all if each.seen
        )
        assert first < then and then >= 60
