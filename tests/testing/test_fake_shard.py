"""The fake shard: its answers, its misbehaviour, and that it never brings torch in."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.shard.loop.scripted_router import BLOCK, channel, fake_shard, row
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.frames import Finish, FrameKind
from tgi_trio.ipc.spawn import spawn_shard
from tgi_trio.testing.fake_model import CRASH_EXIT_CODE, FakeSettings, continuation


def run_process(settings: dict[str, object], *, crash: bool = False) -> tuple[int, list[int], str]:
    """Generate 6 tokens in a fake shard process; return exit code, tokens and stderr."""
    with channel() as (endpoints, router):
        argv = [sys.executable, "-m", "tgi_trio.testing.fake_shard", endpoints.spec.text()]
        pipe = subprocess.PIPE
        with spawn_shard([*argv, json.dumps(settings)], endpoints, stderr=pipe) as child:
            assert child.process.stderr is not None
            if settings.get("load_error"):
                router.hello()
            else:
                router.start()
                router.prefill(row(1, [5, 6, 7], 6))
                if not crash:
                    router.finished(1)
                    router.send(FrameKind.SHUTDOWN)
            code = child.process.wait(timeout=120)
            return code, router.tokens(1), child.process.stderr.read().decode()


def test_a_process_answers_and_ends_with_0_on_shutdown() -> None:
    settings = FakeSettings(block_size=BLOCK)
    code, tokens, errors = run_process({"block_size": BLOCK})
    assert (code, errors) == (0, "")
    assert tokens == continuation(settings, [5, 6, 7], 6)


def test_a_script_answers_what_stands_in_a_prompt() -> None:
    script = [[[8, 9], [50, 51]], [[9], [60]], [[], [70]]]
    settings = FakeSettings.parse(json.dumps({"script": script}))
    end = settings.eos_id
    assert continuation(settings, [7, 8, 9, 7], 9) == [50, 51, end]  # the first row that fits
    assert continuation(settings, [9, 8], 9) == [60, end]
    assert continuation(settings, [8], 9) == [70, end]
    assert continuation(FakeSettings.parse(json.dumps({"script": script[:2]})), [8], 3) == (
        continuation(FakeSettings(), [8], 3)
    )


def test_a_process_that_cannot_load_says_why_in_one_paragraph() -> None:
    code, _, errors = run_process({"load_error": "no weights in /nowhere;\npass --model-id"})
    assert code == 1
    assert errors == "shard 0 cannot go on: no weights in /nowhere; pass --model-id\n"


def test_a_process_crashes_at_the_given_step() -> None:
    code, _, _ = run_process({"block_size": BLOCK, "crash_at_step": 2}, crash=True)
    assert code == CRASH_EXIT_CODE


def test_a_thread_crashes_at_the_given_step_and_lets_its_mutex_go() -> None:
    with fake_shard(crash_at_step=2) as (router, shard):
        router.prefill(row(1, [5, 6, 7], 6))
        assert router.end.page.alive_mutex().wait_for_owner(120.0)
        router.acknowledged(router.command)
        assert len(router.tokens(1)) == 1
        shard.stop()
        assert not shard.alive


def test_a_hung_shard_stands_still_and_can_be_stopped() -> None:
    with fake_shard(hang_at_step=3) as (router, shard):
        router.prefill(row(1, [5, 6, 7], 6))
        router.until(lambda report: report.step == 2)
        while router.end.vitals.step < 3:
            time.sleep(0.001)
        assert not router.end.wait(0.1)
        assert shard.alive
        assert router.end.vitals.step == 3


def test_replies_are_chosen_by_the_prompt_and_end_with_eos() -> None:
    replies = ((11, 12, 13), (21, 22))
    with fake_shard(replies=replies) as (router, _):
        prompts = {i: [i, i + 1] for i in range(1, 9)}
        router.prefill(*(row(i, prompt, 9) for i, prompt in prompts.items()))
        router.finished(*prompts)
    answers = {tuple(router.tokens(i)) for i in prompts}
    assert answers == {(11, 12, 13, 2), (21, 22, 2)}
    assert {router.finish(i) for i in prompts} == {Finish.EOS}


def test_eos_after_counts_generated_tokens_across_a_replay() -> None:
    settings = FakeSettings(block_size=BLOCK, eos_after=3)
    whole = continuation(settings, [5, 6, 7], 9)
    assert len(whole) == 4 and whole[-1] == settings.eos_id
    with fake_shard(eos_after=3) as (router, _):
        router.prefill(row(1, [5, 6, 7, *whole[:2]], 7, prompt_length=3))
        router.finished(1)
    assert router.tokens(1) == whole[2:]


def test_blocks_that_another_sequence_wrote_to_are_noticed() -> None:
    with fake_shard() as (router, _):
        router.prefill(
            row(1, [5, 6, 7], 9, blocks=[1, 2, 3]), row(2, [8, 9, 10], 9, blocks=[4, 2, 5])
        )
        router.finished(1, 2)
    assert router.fault(1) == "KV of position 4 is not this sequence's (block 2)"
    assert len(router.tokens(2)) == 9


def test_a_cached_prefix_is_read_from_the_blocks_of_another_sequence() -> None:
    prompt = list(range(10, 20))
    with fake_shard() as (router, shard):
        router.prefill(row(1, prompt, 2, blocks=[1, 2, 3]))
        router.finished(1)
        router.prefill(row(2, prompt, 2, blocks=[1, 2, 9], cached=8))
        router.finished(2)
        assert router.tokens(2) == continuation(shard.settings, prompt, 2)
        router.prefill(row(3, [1, *prompt], 2, blocks=[1, 2, 9], cached=8))
        router.finished(3)
    assert "KV of position 0" in (router.fault(3) or "")


def test_settings_with_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"step_msec.*step_ms"):
        FakeSettings.parse('{"step_msec": 1}')


def test_neither_torch_nor_trio_comes_in() -> None:
    code = (
        "import sys, tgi_trio.testing.fake_shard, tgi_trio.shard.__main__;"
        "print(sorted({'torch', 'transformers', 'trio', 'hypercorn', 'quart'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
