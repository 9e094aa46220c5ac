"""A whole shard over a stand-in device: sequences that join, leave, wait for blocks and come back,
and a device that is lost, say what the CPU says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.device_kinds import KINDS, SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, prompts

need_triton()

from tests.shard.loop.scripted_router import ScriptedRouter, row  # noqa: E402  (Triton)
from tests.shard.torch_backend.stand_in_shard import device_shard  # noqa: E402
from tests.shard.torch_backend.stand_in_support import TakingTurns, drive, start  # noqa: E402
from tgi_trio.ipc.messages import PrefillRow  # noqa: E402
from tgi_trio.ipc.transfers import Transfer, encode_transfers  # noqa: E402
from tgi_trio.shard.loop.soundness import RunnerBroken  # noqa: E402

TEXTS = prompts(3, longest=20)
NEW = 8


@pytest.fixture
def folder(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Path:
    """A small Llama, or the family that a test asks for."""
    from tgi_trio.shard.torch_backend.attention.paged import split_kv

    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    family = getattr(request, "param", "llama")
    return checkpoint(family, **(SMALL if family == "llama" else {}))


def answers(folder: Path, asked: list[dict[str, Any]]) -> list[list[int]]:
    """Return what the CPU says."""
    return drive(start(folder, "cpu", grammars=TakingTurns()), TEXTS, asked, NEW).tokens


def prefill(
    text: int,
    asked: list[dict[str, Any]],
    said: Sequence[int] = (),
    *,
    new_id: int | None = None,
    blocks: int = 4,
) -> PrefillRow:
    """Return a row of one of the texts that has said something already."""
    sequence = text if new_id is None else new_id
    first = 1 + 4 * (sequence % 8)
    return row(
        sequence,
        [*TEXTS[text], *said],
        NEW - len(said),
        blocks=range(first, first + blocks),
        prompt_length=len(TEXTS[text]),
        seed=text,
        **asked[text],
    )


def until_said(router: ScriptedRouter, count: int, *sequences: int) -> None:
    router.until(lambda _: all(len(router.tokens(s)) >= count for s in sequences))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("folder", "kind", "speculate"),
    [
        *(("llama", "penalties", 0), ("llama", "grammar", 0), ("llama", "plain", 2)),
        ("deepseek_v4", "plain", 2),  # which makes keys of runs of tokens again
        ("deepseek_v32", "plain", 2),  # with an index, which sees each draft's own tokens
    ],
    indirect=["folder"],
)
def test_preempted_sequences_go_on_where_they_were(folder: Path, kind: str, speculate: int) -> None:
    asked = KINDS[kind]
    expected = answers(folder, asked)
    with device_shard(folder, (2, 4, 12), speculate=speculate) as (router, shard):
        router.prefill(prefill(0, asked), prefill(1, asked))
        until_said(router, 2, 1)
        router.acknowledged(router.filter(1))
        said = router.tokens(1)
        filled = -(-len(TEXTS[2]) // BLOCK)
        router.prefill(prefill(2, asked, blocks=filled))  # waits for more than its prompt takes
        router.prefill(prefill(1, asked, said, new_id=5))
        if BLOCK * filled - len(TEXTS[2]) < NEW - 1:
            router.until(lambda report: report.stalled_rows > 0)
        router.extend(2, 20, 21)
        router.finished(0, 2, 5)
        assert [router.tokens(0), said + router.tokens(5), router.tokens(2)] == expected
        assert 2 <= len(said) < NEW and not router.faults
        assert not shard.device.counts.waits and shard.device.counts.replays > NEW
    assert shard.error is None


def test_a_lost_device_ends_the_shard_and_another_goes_on(folder: Path) -> None:
    """Its error is of every step from then on: no sequence is blamed for it."""
    asked = KINDS["penalties"]
    expected = answers(folder, asked)
    with device_shard(folder, (4,)) as (router, shard):
        router.prefill(*(prefill(i, asked) for i in range(3)))
        until_said(router, 2, 0, 1, 2)
        shard.device.lose()
        shard.wait()
        assert isinstance(shard.error, RunnerBroken)
        assert "CUDA error: an illegal memory access" in str(shard.error)
        assert not shard.device.counts.unpinned  # which would have ended the process, not a word
        router.keep_rest()
        said = [router.tokens(i) for i in range(3)]
        assert not router.faults
    with device_shard(folder, (4,), incarnation=2) as (router, shard):
        left = [i for i in range(3) if len(said[i]) < NEW]
        assert left
        router.prefill(*(prefill(i, asked, said[i]) for i in left))
        router.finished(*left)
        assert [said[i] + router.tokens(i) for i in range(3)] == expected
    assert shard.error is None


def copy(router: ScriptedRouter, *transfers: Transfer) -> None:
    router.command += 1
    router.end.send(encode_transfers(router.command, transfers))


def test_prefixes_go_to_the_host_and_back_beside_steps_that_wait_for_nothing(folder: Path) -> None:
    text = [3 + 5 * i % 400 for i in range(2 * BLOCK + 3)]
    alone = drive(start(folder, "cpu"), [text], [{}], 4, late=0).tokens[0]
    other = drive(start(folder, "cpu"), [[7, 8, 9]], [{}], 40, late=0).tokens[0]
    with device_shard(folder, (2, 4), prefix_cache_host_bytes=1 << 20) as (router, shard):
        router.prefill(row(1, text, 4, blocks=[1, 2, 3]))
        router.finished(1)
        router.prefill(row(2, [7, 8, 9], 40, blocks=range(10, 13)))
        until_said(router, 2, 2)
        copy(router, Transfer(1, 5, False), Transfer(2, 6, False))
        router.prefill(row(3, text[::-1], 2, blocks=[1, 2, 3]))  # over what is copied out
        router.finished(3)
        copy(router, Transfer(20, 5, True), Transfer(21, 6, True))
        router.prefill(row(4, text, 4, blocks=[20, 21, 3], cached=2 * BLOCK))
        router.finished(2, 4)
        assert router.tokens(1) == router.tokens(4) == alone
        assert router.tokens(2) == other and not router.faults
        assert not shard.device.counts.waits
        assert not shard.device.counts.unpinned
    assert shard.error is None
