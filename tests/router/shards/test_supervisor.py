"""The supervisor with real shard processes (the fake model): start, crash, hang, give up, stop."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio

from tests.router.harness import byte_tokenizer, make_request
from tests.router.shards.supervisor_support import (
    Clients,
    FakeArgv,
    ids_of,
    make_supervisor,
    supervised,
    wait_for_spawned,
)
from tgi_trio.errors import CorruptFrame, GenerationError, PeerGone, ShardCannotStart
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.router.engine import engine as engines
from tgi_trio.router.engine.engine import Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.shards import handshake
from tgi_trio.router.shards import supervisor as supervisor_module
from tgi_trio.router.shards.group_states import ShardState
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.testing.fake_model import FakeSettings, continuation


@pytest.mark.trio
async def test_a_killed_shard_is_a_pause_for_32_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for as many that a death comes between two parts of a fan-out."""
    monkeypatch.setattr(engines, "FAN_OUT", 4)
    argv = FakeArgv()
    async with supervised(tmp_path, argv) as (engine, supervisor):
        clients, prompts = Clients(engine, tmp_path, 60), [f"stream {n}" for n in range(32)]
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(clients.run, prompt)
            for incarnation in (1, 2):
                await trio.sleep(0.05)
                while not (supervisor.ready and argv.spawned == incarnation):
                    await trio.sleep(0.01)
                os.kill(supervisor.pids[0], signal.SIGKILL)
        assert clients.results == clients.expect(argv.base, prompts)
        await wait_for_spawned(argv, 2)
        clients.check_that_all_is_free()


@pytest.mark.trio
async def test_a_shard_that_cannot_load_says_why(tmp_path: Path) -> None:
    argv = FakeArgv(plan=[{"load_error": "no such tensor: model.embed_tokens.weight"}])
    with pytest.RaisesGroup(ShardCannotStart) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(make_supervisor(argv).run)
    report = str(caught.value.exceptions[0])
    assert "no such tensor: model.embed_tokens.weight" in report
    assert "exited with code 1 in phase LOADING" in report


@pytest.mark.trio
async def test_a_crash_loop_ends_in_a_report_and_failed_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    argv = FakeArgv(plan=[{"crash_at_step": 3}, {"load_error": "gone"}, {"load_error": "gone"}])
    async with supervised(tmp_path, argv, limit=1) as (engine, supervisor):
        request = make_request(byte_tokenizer(tmp_path), "crash", 500)
        with engine.submit(request) as stream:
            with pytest.raises(GenerationError, match="crashed 2 times in a row"):
                await ids_of(stream)
        assert not supervisor.ready and supervisor.given_up
        # Clients are told no more than they need, operators everything.
        assert supervisor.why == "the shard crashed 2 times in a row and is not started again"
        assert "exited with code 70 in phase" in caplog.text and "gone" in caplog.text
        assert "--shard-restart-limit 1" in caplog.text


POISON = 3 + 255  # a token of the byte tokenizer that no text has


async def fail_alone(clients: Clients, argv: FakeArgv, count: int) -> None:
    """Serve `count` requests beside one that ends every shard: it alone fails."""
    answers = clients.expect(argv.base, (f"good {n}" for n in range(count)))
    # Not those that come upon the token by themselves.
    answers = {prompt: ids for prompt, ids in answers.items() if POISON not in ids}
    assert len(answers) > count // 2
    async with trio.open_nursery() as nursery:
        for prompt in answers:
            nursery.start_soon(clients.run, prompt)
        await trio.sleep(0.02)
        request = make_request(clients.tokenizer, "bad", 30)
        request.prompt_ids[1] = POISON
        with clients.engine.submit(request) as bad:
            with pytest.raises(GenerationError, match="ended again and again"):
                await ids_of(bad)
    assert clients.results == answers


@pytest.mark.trio
async def test_a_request_that_crashes_every_shard_fails_alone(tmp_path: Path) -> None:
    argv = FakeArgv(FakeSettings(vocab_size=259, step_ms=2, crash_token=POISON))
    async with supervised(tmp_path, argv, limit=2) as (engine, supervisor):
        clients = Clients(engine, tmp_path, 25)
        await fail_alone(clients, argv, 14)
        clients.check_that_all_is_free()
        while not supervisor.ready:
            await trio.sleep(0.01)
        await clients.run("after")
        assert len(clients.results["after"]) == clients.tokens


@pytest.mark.trio
async def test_a_device_that_breaks_is_a_pause_for_all_streams(tmp_path: Path) -> None:
    """Not one of them is blamed, though every row of every step fails until the shard ends."""
    argv = FakeArgv(plan=[{"break_at_step": 6}, {"break_at_step": 15}])
    async with supervised(tmp_path, argv) as (engine, _):
        clients, prompts = Clients(engine, tmp_path, 40), [f"stream {n}" for n in range(5)]
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(clients.run, prompt)
        assert clients.results == clients.expect(argv.base, prompts)
        assert argv.spawned == 3
        clients.check_that_all_is_free()


@pytest.mark.trio
@pytest.mark.parametrize("streams", [1, 4])
async def test_a_device_that_stays_broken_ends_at_the_restart_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streams: int
) -> None:
    broken = tmp_path / "broken"
    argv = FakeArgv(FakeSettings(vocab_size=259, step_ms=2, broken_while=str(broken)))
    async with supervised(tmp_path, argv, limit=2) as (engine, supervisor):
        tokenizer = byte_tokenizer(tmp_path)

        async def client(n: int) -> None:
            with engine.submit(make_request(tokenizer, f"stream {n}", 3000)) as stream:
                with pytest.raises(GenerationError, match="crashed 3 times in a row"):
                    await ids_of(stream)

        with trio.fail_after(240):
            async with trio.open_nursery() as nursery:
                for n in range(streams):
                    nursery.start_soon(client, n)
                await trio.sleep(0.1)
                broken.touch()
        assert supervisor.given_up and not supervisor.ready
        assert argv.spawned == 3
        assert "cannot go on: the model cannot compute a single token any more" in caplog.text


@pytest.mark.trio
async def test_a_request_that_breaks_the_device_is_found(tmp_path: Path) -> None:
    """It is the row that does it, each time: the others go on, and restarts are not counted."""
    argv = FakeArgv(FakeSettings(vocab_size=259, step_ms=2, break_token=POISON))
    async with supervised(tmp_path, argv, limit=2) as (engine, supervisor):
        clients = Clients(engine, tmp_path, 25)
        await fail_alone(clients, argv, 6)
        assert not supervisor.given_up


@pytest.mark.trio
async def test_a_hung_shard_turns_health_red_and_is_replaced(tmp_path: Path) -> None:
    argv = FakeArgv(plan=[{"hang_at_step": 5}])
    async with supervised(tmp_path, argv, stall=2.0) as (engine, supervisor):
        tokenizer = byte_tokenizer(tmp_path)
        with engine.submit(make_request(tokenizer, "hang", 20)) as stream:
            seen: set[ShardState] = set()

            async def watch() -> None:
                while True:
                    seen.add(supervisor.state)
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                ids = await ids_of(stream)
                nursery.cancel_scope.cancel()
        prompt = tokenizer.encode_ids("hang", False).tolist()
        assert ids == continuation(argv.base, prompt, 20)
        assert ShardState.STALLED in seen
        assert argv.spawned == 2


@pytest.mark.trio
async def test_a_stopped_shard_is_noticed_even_when_idle_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, seen = LocalGroup.vitals, set[tuple[int, int]]()

    def note(group: LocalGroup, rank: int) -> Vitals:
        vitals = look(group, rank)
        seen.add((vitals.step, vitals.phase))
        return vitals

    monkeypatch.setattr(LocalGroup, "vitals", note)
    argv = FakeArgv()
    async with supervised(tmp_path, argv, stall=2.0) as (engine, supervisor):
        with engine.submit(make_request(byte_tokenizer(tmp_path), "one step", 1)) as stream:
            await ids_of(stream)
        while (1, Phase.IDLE) not in seen:
            await trio.sleep(0.01)
        os.kill(supervisor.pids[0], signal.SIGSTOP)
        with trio.fail_after(120):
            while supervisor.state is not ShardState.STALLED:
                await trio.sleep(0.01)
        assert f"rank 0 (pid {supervisor.pids[0]}" in supervisor.why
        assert "phase IDLE, step 1" in supervisor.why and "no heartbeat" in supervisor.why
        os.kill(supervisor.pids[0], signal.SIGCONT)
        with trio.fail_after(120):
            while not supervisor.ready:
                await trio.sleep(0.01)
        assert argv.spawned == 1


@pytest.mark.trio
@pytest.mark.parametrize("error", [PeerGone("rank 0", "is gone"), CorruptFrame("no such kind")])
async def test_a_link_that_breaks_while_it_serves_ends_the_incarnation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    serve, failed = Engine.serve, trio.Event()

    async def fail_once(engine: Engine, link: ShardLink) -> None:
        if not failed.is_set():
            failed.set()
            raise error
        await serve(engine, link)

    monkeypatch.setattr(Engine, "serve", fail_once)
    argv = FakeArgv()
    async with supervised(tmp_path, argv) as (engine, _):
        await failed.wait()
        clients = Clients(engine, tmp_path, 5)
        await clients.run("again")
        assert clients.results == clients.expect(argv.base, ["again"])
        assert argv.spawned == 2


@dataclass
class RefusedArgv(FakeArgv):
    """The machine refuses the process of these incarnations (from 0), as `fork` does."""

    refused: set[int] = field(default_factory=set)

    def __call__(self, spec: str, settings: str) -> list[str]:
        line = super().__call__(spec, settings)
        if self.spawned - 1 in self.refused:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return line


@pytest.mark.trio
async def test_a_machine_that_refuses_a_process_for_a_while_is_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACK_OFF", (0.0, 0.01))
    argv = RefusedArgv(refused={1})
    async with supervised(tmp_path, argv) as (engine, supervisor):
        clients = Clients(engine, tmp_path, 30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clients.run, "go on")
            await trio.sleep(0.05)
            os.kill(supervisor.pids[0], signal.SIGKILL)
        assert clients.results == clients.expect(argv.base, ["go on"])
        await wait_for_spawned(argv, 3)
    assert caplog.text.count("cannot be started: no more threads or processes") == 1


@pytest.mark.trio
async def test_whoever_follows_is_asked_for_what_the_first_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, not as a user's limit that memory may be too small for."""
    asked: list[tuple[WarmupRequest, WarmupResult]] = []
    warm_up = handshake.warm_up

    async def note(end: CommandChannel, request: WarmupRequest) -> WarmupResult:
        asked.append((request, await warm_up(end, request)))
        return asked[-1][1]

    monkeypatch.setattr(handshake, "warm_up", note)
    argv = FakeArgv(plan=[{"blocks": 77, "state_slots": 9}, {"blocks": 1000, "state_slots": 9}])
    async with supervised(tmp_path, argv) as (_, supervisor):
        os.kill(supervisor.pids[0], signal.SIGKILL)
        while len(asked) < 2:
            await trio.sleep(0.01)
    (first, found), (second, again) = asked
    assert (first.blocks, first.state_slots) == (0, 0)
    assert second == replace(first, blocks=77, state_slots=9)
    assert (again.blocks, again.state_slots) == (found.blocks, found.state_slots) == (77, 9)


@pytest.mark.trio
async def test_a_first_process_that_the_machine_refuses_ends_the_start() -> None:
    supervisor = make_supervisor(RefusedArgv(refused={0}))
    with pytest.raises(ShardCannotStart, match=r"cannot be started: no more .*ulimit -u"):
        await supervisor.run()
    assert supervisor.ended.is_set() and supervisor.state is ShardState.GONE


@pytest.mark.trio
async def test_a_shard_that_does_not_exit_is_killed_after_the_time_it_has() -> None:
    supervisor = make_supervisor(FakeArgv(), stop=0.2)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        (pid,) = supervisor.pids
        os.kill(pid, signal.SIGSTOP)
        supervisor.stop()
        await supervisor.ended.wait()
    assert supervisor._trouble == "did not exit within 0.2 s of being told to; killed"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.trio
async def test_stopping_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    supervisor = make_supervisor(FakeArgv(FakeSettings(vocab_size=259, load_ms=60_000)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        while supervisor.state is not ShardState.LOADING:
            await trio.sleep(0.01)
        supervisor.stop()
        await supervisor.ended.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(supervisor.pids[0], 0)
