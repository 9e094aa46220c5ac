"""Grammars are tried out in processes that may die of it: verdicts, limits, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.router.grammar_trials import (
    ENDLESS,
    MONSTER,
    ROOM,
    TOKENIZER,
    checker,
    children,
    wrong,
)
from tgi_trio.errors import Unavailable
from tgi_trio.router import grammar_checker
from tgi_trio.router.grammar_checker import GrammarChecker
from tgi_trio.router.sandbox_pool import Sandbox, SandboxPool
from tgi_trio.router.text import grammars


@pytest.mark.trio
async def test_good_grammars_pass_and_bad_ones_are_told_what_is_wrong() -> None:
    async with checker() as one:
        await one.check(grammars.json_schema({"type": "object"}))
        await one.check(grammars.regex("[a-z]+"))
        for grammar, words in [
            (grammars.json_schema({"type": "objekt"}), "Invalid type: objekt"),
            (grammars.json_schema({"properties": {"a": {"if": {}}}}), 'keys: ["if"]'),
            (grammars.json_schema({"type": "string", "pattern": "(["}), "unclosed character"),
            (grammars.regex("(?=a)b"), "look-around"),
            (grammars.lark("start: here nowhere"), 'at 1(8): unknown name: "here"'),
            (grammars.json_schema({"minimum": 3, "maximum": 1, "type": "integer"}), "minimum (3)"),
        ]:
            message = await wrong(one, grammar)
            assert message.startswith("grammar is not valid: ") and words in message, message
        await one.check(grammars.choice(["a", "é\n"]))


@pytest.mark.trio
async def test_long_grammars_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the size and the key of 10 MB takes 40 ms, for which every stream would wait."""
    read: list[bool] = []

    def note(grammar: str, most: int) -> None:
        read.append(threading.current_thread() is threading.main_thread())
        grammars.check_size(grammar, most)

    monkeypatch.setattr(grammar_checker, "check_size", note)
    texts = [f"é{number:09}" for number in range(6000)]
    async with checker(max_grammar_bytes=2**20, max_grammar_seconds=30) as one:
        await one.check(grammars.choice(texts[:3]))
        long = grammars.choice(texts)
        assert len(long) > 2**16
        await one.check(long)
        broken = grammars.lark("start: here /" + "é" * 2**16 + "/")
        assert "unknown name" in await wrong(one, broken)
    assert read == [True, False, False]
    async with checker(max_grammar_bytes=2**17) as one:
        assert "131072 are allowed" in await wrong(one, long + "x" * 2**17)


@pytest.mark.trio
async def test_a_monster_hits_the_time_limit_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However busy the machine is: a limit below the CPU time that moves a compilation to idle
    # cores, and patience.
    monkeypatch.setattr("tgi_trio.router.grammar_checker._SLOWDOWN", 1000.0)
    async with checker(max_grammar_seconds=0.08) as one:
        assert "more than 0.08 s (--max-grammar-seconds)" in await wrong(one, MONSTER)
        await one.check(grammars.regex("a"))
        await one.close()
        before = children()
        assert "more than 0.08 s" in await wrong(one, MONSTER)  # remembered, not tried again
        assert children() == before


@pytest.mark.trio
async def test_sizes_and_depths_have_limits() -> None:
    schema: grammars.Schema = {"type": "string"}
    for _ in range(130):
        schema = {"type": "array", "items": schema}
    async with checker(max_grammar_bytes=5000) as one:
        assert "recursion limit exceeded" in await wrong(one, grammars.json_schema(schema))
        assert "5000 are allowed (--max-grammar-bytes)" in await wrong(
            one, grammars.choice(["x" * 5000])
        )


@pytest.mark.trio
async def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_trio.router.grammar_checker._MEMORY", 2**20)
    async with checker(max_grammar_bytes=2**20, max_grammar_seconds=30.0) as one:
        message = await wrong(one, grammars.choice([f"{i:09}" for i in range(20_000)]))
        assert "takes more than 1 MiB of memory" in message


@pytest.mark.trio
async def test_a_client_that_leaves_ends_its_trial_and_leaves_the_process_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tgi_trio.router.grammar_checker._MEMORY", ROOM)
    before = children()
    async with checker(max_grammar_seconds=1e6) as one:
        await one.check(grammars.regex("a"))
        processes = children() - before
        with trio.move_on_after(0.2) as scope:
            await one.check(ENDLESS)
        assert scope.cancelled_caught
        await one.check(grammars.regex("b"))  # does not wait for the trial
        assert children() - before == processes


@pytest.mark.trio
async def test_a_grammar_that_finds_no_cpu_time_is_told_so_and_costs_nobody_else_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tgi_trio.router.grammar_checker._SLOWDOWN", 1e-6)  # 1 s
    monkeypatch.setattr("tgi_trio.router.grammar_checker._MEMORY", ROOM)
    before = children()
    async with checker(max_grammar_seconds=1e6) as one:
        await one.check(grammars.regex("a"))
        processes = children() - before
        with pytest.raises(Unavailable) as caught:
            await one.check(ENDLESS)
        assert "1e+06 s of CPU time (--max-grammar-seconds) were not to be had" in str(caught.value)
        assert 0 < caught.value.retry_after <= 30
        await one.check(grammars.regex("b"))
        assert children() - before == processes  # the same process, which has its tokenizer
        await one.close()
        with pytest.raises(Unavailable):  # remembered: nothing is tried
            await one.check(ENDLESS)
        assert children() == before


@pytest.mark.trio
async def test_what_found_no_cpu_time_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_trio.router.grammar_checker._SLOWDOWN", 2e-7)
    monkeypatch.setattr("tgi_trio.router.grammar_checker._AGAIN_S", 0.0)
    monkeypatch.setattr("tgi_trio.router.grammar_checker._MEMORY", ROOM)
    before = children()
    async with checker(max_grammar_seconds=1e6) as one:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await one.check(ENDLESS)
            assert children() != before
            await one.close()


@pytest.mark.trio
async def test_a_monster_holds_up_only_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_trio.router.grammar_checker._MEMORY", ROOM)
    async with checker(workers=2, max_grammar_seconds=30.0) as one, trio.open_nursery() as nursery:
        nursery.start_soon(one.check, MONSTER)
        await trio.testing.wait_all_tasks_blocked()
        for i in range(3):
            await one.check(grammars.choice([str(i)]))
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_grammar_that_many_ask_for_at_once_is_tried_by_one() -> None:
    """And what is wrong with it is told to all of them."""
    good, bad = grammars.regex("[a-z]+"), grammars.regex("([")
    before = children()
    async with checker(workers=3) as one:
        for grammar, ask in ((good, one.check), (bad, partial(wrong, one))):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask, grammar)
            assert len(children() - before) == 1


@pytest.mark.trio
async def test_whoever_tries_a_grammar_for_others_may_leave() -> None:
    async with checker() as one, trio.open_nursery() as nursery:
        trying = trio.CancelScope()

        async def leave() -> None:
            with trying:
                await one.check(grammars.regex("a"))

        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one.check, grammars.regex("a"))
        await trio.testing.wait_all_tasks_blocked()
        trying.cancel()


@pytest.mark.trio
async def test_all_who_wait_for_a_grammar_are_told_that_it_cannot_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once: none of them stands in line on its own then."""
    asked = 0

    async def refuse(*args: object, **options: object) -> None:
        nonlocal asked
        asked += 1
        await trio.testing.wait_all_tasks_blocked()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    told: list[Unavailable] = []

    async def ask(one: GrammarChecker) -> None:
        with pytest.raises(Unavailable, match="cannot be tried out") as caught:
            await one.check(grammars.regex("a"))
        told.append(caught.value)

    async with checker() as one:
        with monkeypatch.context() as full:
            full.setattr(trio.lowlevel, "open_process", refuse)
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask, one)
        assert asked == 1
        # One error for each: several tasks that raise the same one add to each other's traceback.
        assert len({id(each) for each in told}) == 3
        assert {each.retry_after for each in told} == {30.0}
        await one.check(grammars.regex("a"))


@pytest.mark.trio
async def test_grammars_are_tried_with_the_tokenizer_of_an_adapter(tmp_path: Path) -> None:
    """Which may know a special token that the model's does not, in as many files as there are."""
    whole = json.loads(TOKENIZER.read_text())
    grammar = grammars.lark("start: <|own|>")
    files, before = [], children()
    for i in range(6):  # more than are kept
        mark = {**whole["added_tokens"][-1], "id": 2054, "content": "<|own|>", "special": True}
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps({**whole, "added_tokens": [*whole["added_tokens"], mark]}))
    async with checker() as one:
        assert "<|own|>" in await wrong(one, grammar)
        for file in (*files, files[0]):
            await one.check(grammar, file)
        with pytest.raises(Unavailable, match="the file of the tokenizer is gone"):
            await one.check(grammars.regex("a"), tmp_path / "none.json")
        await one.check(grammars.regex("a"))
        assert len(children() - before) == 1  # one process has tried them all


@pytest.mark.trio
async def test_a_tokenizer_that_cannot_be_used_refuses_all_grammars(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    async with checker(file=file) as one:
        message = await wrong(one, grammars.regex("a"))
    assert message.startswith("grammar is not supported: ") and str(file) in message


@pytest.mark.trio
async def test_a_tokenizer_that_is_gone_for_a_while_is_nothing_of_the_client_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokenizer.json"
    async with checker(file=file) as one:
        with pytest.raises(Unavailable, match="the file of the tokenizer is gone") as caught:
            await one.check(grammars.regex("a"))
        assert str(tmp_path) not in str(caught.value) and str(file) in caplog.text
        file.write_bytes(TOKENIZER.read_bytes())
        await one.check(grammars.regex("a"))


@pytest.mark.trio
async def test_a_machine_without_room_for_a_process_says_nothing_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    good = grammars.json_schema({"type": "integer"})
    async with checker() as one:
        with monkeypatch.context() as full, pytest.raises(Unavailable, match="cannot be tried out"):
            full.setattr(trio.lowlevel, "open_process", refuse)
            await one.check(good)
        await one.check(good)


@pytest.mark.trio
async def test_a_process_that_is_killed_is_replaced() -> None:
    async with checker() as one:
        before = children()
        await one.check(grammars.regex("a"))
        (pid,) = children() - before
        pidfd = os.pidfd_open(pid)
        os.kill(pid, 9)
        await trio.lowlevel.wait_readable(pidfd)
        os.close(pidfd)
        await one.check(grammars.regex("b"))


@pytest.mark.trio
@pytest.mark.parametrize(("number", "whole"), [(9, False), (15, False), (9, True)])
async def test_a_trial_that_somebody_kills_says_nothing_of_the_grammar(
    number: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does where memory is short."""
    monkeypatch.setattr("tgi_trio.router.grammar_checker._MEMORY", ROOM)
    monkeypatch.setattr("tgi_trio.router.grammar_checker._AGAIN_S", 0.0)
    before = children()
    async with checker(max_grammar_seconds=30.0) as one, trio.open_nursery() as nursery:

        async def kill() -> None:
            await one.check(grammars.regex("a"))
            (process,) = children() - before
            listed = Path(f"/proc/{process}/task/{process}/children")
            while listed.read_text():
                await trio.sleep(0.01)  # the first trial's child has answered, and ends
            nursery.start_soon(endless)
            while not (jobs := listed.read_text().split()):
                await trio.sleep(0.01)
            os.kill(process if whole else int(jobs[0]), number)

        async def endless() -> None:
            with pytest.raises(Unavailable, match="has ended before"):
                await one.check(ENDLESS)
            await one.check(grammars.regex("b"))

        nursery.start_soon(kill)


TALKS = """
import json, sys
print("loading it", file=sys.stderr, flush=True)
print('{"value": null}', flush=True)
for line in iter(sys.stdin.readline, ""):
    grammar = sys.stdin.read(json.loads(line)["bytes"])
    print("a panic\\nwithout an end", end="", file=sys.stderr, flush=True)
    if grammar == "die":
        raise RuntimeError("gone")
    print('{"value": null}', flush=True)
"""


@pytest.mark.trio
async def test_what_its_processes_print_is_logged_line_by_line(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with checker() as one:
        one._pool = SandboxPool(Sandbox("grammars", [sys.executable, "-c", TALKS], 1), "busy")
        await one.check("{}")
        with pytest.raises(Unavailable, match="has ended before"):
            await one.check("die")
    said = [line for line in caplog.messages if line.startswith("grammars | ")]
    assert said[:4] == [
        "grammars | loading it",
        "grammars | a panic",
        "grammars | without an enda panic",
        "grammars | without an endTraceback (most recent call last):",
    ]
    assert said[-1] == "grammars | RuntimeError: gone"
    assert capfd.readouterr().err == ""


@pytest.mark.trio
async def test_a_keyboards_interrupt_is_the_servers_to_obey(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = children()  # a test before this one may have left a server of its own
    async with checker() as one:
        await one.check(grammars.regex("a"))
        (process,) = children() - before
        os.kill(process, signal.SIGINT)
        await one.check(grammars.regex("b"))
        assert children() - before == {process}
    assert not caplog.messages
