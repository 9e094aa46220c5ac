"""However a shard cuts its tokens into steps, the answer is that of one token a step."""

from __future__ import annotations

import codecs
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tests.support.step_frames import encode_report
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.request import FinishReason, Outcome, Request, Token
from tgi_trio.router.scheduling.shard_commands import Command, Prefill
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.tokenizer import Tokenizer

BEGIN, EOS = 0, 2  # special tokens of the harness, `<s>` and `</s>`
TEXTS = ["a", "b", "<", "/", "s", ">", "Ã", "©"]  # the last two are the bytes of one letter


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return byte_tokenizer(Path(folder))


@cache
def token_ids() -> list[int]:
    return [BEGIN, *(tokenizer().token_id(text) or 0 for text in TEXTS)]


def bytes_of(id: int) -> bytes:
    """Return what a token adds to the text: none for special ones."""
    return (
        b"" if id in tokenizer().special_ids else TEXTS[token_ids().index(id) - 1].encode("latin-1")
    )


class Scripted:
    """A link to a shard that says given tokens, so many a step, and several steps at once."""

    def __init__(self, ids: list[int], limit: int, cuts: list[int], together: int) -> None:
        self._ids, self._limit = ids[:limit], limit
        self._cuts = iter(cuts)
        self._together = together
        self._said = 0
        self._prompt = 0
        self._sequence: int | None = None
        self._number = 0

    def send_frame(self, frame: bytes) -> None:
        """No adapters are loaded here."""

    def send(self, command: Command) -> None:
        self._number = command.number
        if isinstance(command, Prefill):
            (row,) = command.rows
            self._sequence, self._prompt = row.sequence, len(row.token_ids)

    def flush(self) -> None: ...

    def replies(self) -> Iterator[Frame]:
        for _ in range(self._together):
            if self._sequence is None or self._said == len(self._ids):
                return
            (frame,) = encode_report(self._step(), 1 << 16)
            yield Frame(memoryview(frame))

    def _step(self) -> StepReport:
        said = self._ids[self._said : self._said + next(self._cuts, 1)]
        self._said += len(said)
        finish = Finish.NONE
        if self._said == self._limit:
            finish = Finish.LENGTH
        elif said[-1] == EOS:
            finish = Finish.EOS
        return StepReport(
            step=self._said,
            acknowledged=self._number,
            sequence=[self._sequence or 0],
            computed=[self._prompt + self._said - 1],
            token_count=[len(said)],
            prompt_count=[0],
            finish=[finish],
            token_ids=said,
            logprobs=[-0.5] * len(said),
            top_count=[0] * len(said),
        )

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()


async def run(request: Request, link: Scripted) -> tuple[list[Token], Outcome]:
    engine = Engine(AdmissionLimits(1), scheduling_limits(), tokenizer(), Metrics())
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.serve, cast("ShardLink", link))
            with engine.submit(request) as stream:
                tokens = [token async for some in stream for token in some]
            nursery.cancel_scope.cancel()
    return tokens, stream.outcome


def definition(request: Request, ids: list[int]) -> tuple[FinishReason, int]:
    """Why a generation ends and after how many tokens: length, EOS, stop strings, in that order."""
    stopping, text = request.stopping, ""
    stops, expressions = stopping.stop, [re.compile(each.text) for each in stopping.stop_regex]
    for count, id in enumerate(ids, start=1):
        special = id in tokenizer().special_ids
        plain = b"".join(bytes_of(each) for each in ids[:count])
        # Without the bytes of a letter that is not whole yet; those that none can follow are there.
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(plain)
        name = tokenizer().token_text(id)
        named = special and any(
            stop.endswith(name) and text.endswith(stop[: len(stop) - len(name)]) for stop in stops
        )
        if count == request.stopping.max_new_tokens:
            return FinishReason.LENGTH, count
        if id == EOS:
            return FinishReason.EOS_TOKEN, count
        if named or any(stop in text for stop in stops) or id in stopping.stop_ids:
            return FinishReason.STOP_SEQUENCE, count
        if any(expression.search(text) for expression in expressions):
            return FinishReason.STOP_SEQUENCE, count
    raise AssertionError("a generation has an end")


@given(
    ids=st.lists(st.sampled_from(range(len(TEXTS) + 1)), max_size=12),
    limit=st.integers(1, 13),
    stops=st.lists(
        st.sampled_from(["a", "ab", "bb", "</s>", "<s>", "b<s>", "a</s>", ">", "/", "é", "s>b"]),
        max_size=3,
    ),
    regexes=st.lists(st.sampled_from(["ab+[^b]", "a.*é", "<?/>?s", "[ab]{3,4}/"]), max_size=2),
    stop_ids=st.frozensets(st.sampled_from(range(len(TEXTS) + 1)), max_size=1),
    keep=st.booleans(),
    cuts=st.lists(st.integers(1, 6), max_size=12),
    together=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
@example([2, 7, 7, 0], 5, ["b<s>"], [], frozenset(), False, [], 1)
def test_cuts_change_nothing(
    ids: list[int],
    limit: int,
    stops: list[str],
    regexes: list[str],
    stop_ids: frozenset[int],
    keep: bool,
    cuts: list[int],
    together: int,
) -> None:
    said = [*(token_ids()[i] for i in ids), EOS]
    request = make_request(
        tokenizer(),
        "x",
        limit,
        stop=tuple(stops),
        keep_stop=keep,
        stop_regex=tuple(regexes),
        stop_ids=frozenset(token_ids()[i] for i in stop_ids),
    )
    tokens, outcome = trio.run(run, request, Scripted(said, limit, [], 1))
    assert (outcome.reason, len(tokens)) == definition(request, said)
    assert outcome.generated_tokens == len(tokens)
    match outcome.reason:
        case FinishReason.LENGTH:
            assert outcome.matched is None
        case FinishReason.EOS_TOKEN:
            assert outcome.matched == EOS
        case FinishReason.STOP_SEQUENCE:
            entries = {*stops, *regexes, *request.stopping.stop_ids}
            assert outcome.matched in entries
    cut = trio.run(run, replace(request), Scripted(said, limit, cuts, together))
    assert cut == (tokens, outcome)
