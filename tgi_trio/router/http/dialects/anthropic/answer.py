"""Answers for Anthropic's clients: a message, or the events of a stream.

| event | when | what it has |
|---|---|---|
| `message_start` | first | the message without content, with what is known of its usage |
| `content_block_start` | a block begins | its `index` and, empty, the block |
| `content_block_delta` | a piece of it came | `thinking_delta`, `text_delta`, `input_json_delta` |
| `content_block_delta` | a thought ends | `signature_delta` |
| `content_block_stop` | a block ends | its `index` |
| `message_delta` | all blocks ended | why it ended, and the whole usage |
| `message_stop` | last | |
| `error` | instead of the last two | Anthropic's error |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec
import orjson
from msgspec.json import encode

from tgi_trio.router.http.dialects.anthropic import replies
from tgi_trio.router.http.dialects.anthropic.request import CALL_PREFIX
from tgi_trio.router.http.dialects.blocks import Block, BlockChange, BlockKind, Blocks
from tgi_trio.router.http.dialects.thought_codec import encode_thought
from tgi_trio.router.http.messages.error_shapes import ANTHROPIC, anthropic_error
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.messages.render import text_json
from tgi_trio.router.http.messages.tool_calls import AnswerReader
from tgi_trio.router.request import FinishReason, Outcome, Token

# Clients send it back with the thought, and some drop a thought without one; it is not checked.
SIGNATURE: Final = "unsigned"


class AnswerEnd:
    """Determines why an answer ended, and its usage."""

    def __init__(self, prompt_tokens: int, clipped: bool) -> None:
        """`clipped`: fewer tokens were possible than the client asked for."""
        self._prompt_tokens = prompt_tokens
        self._clipped = clipped

    def start_usage(self) -> replies.MessageUsage:
        """Return the usage before the first token; cached tokens are only known at the end."""
        return replies.MessageUsage(self._prompt_tokens, 0)

    def usage(self, outcome: Outcome) -> replies.MessageUsage:
        """Return the usage of the whole; input tokens that were not cached were computed."""
        cached = outcome.cached_tokens
        thoughts = 0 if outcome.answer is None else outcome.answer.thought_tokens
        return replies.MessageUsage(
            input_tokens=self._prompt_tokens - cached,
            output_tokens=outcome.generated_tokens,
            cache_read_input_tokens=cached,
            output_tokens_details=replies.MessageTokensDetails(thoughts),
        )

    def reason(self, outcome: Outcome, called: bool) -> tuple[replies.StopReason, str | None]:
        """Return why it ended, and the stop sequence, if any; `called`: with complete calls."""
        if outcome.reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._clipped else "max_tokens", None
        if called:
            return "tool_use", None
        if outcome.reason is FinishReason.STOP_SEQUENCE:
            return "stop_sequence", None if outcome.matched is None else str(outcome.matched)
        return "end_turn", None


# ---- bodies ------------------------------------------------------------------------------------


def message(
    id: str,
    model: str,
    reader: AnswerReader,
    tokens: Iterable[Token],
    outcome: Outcome,
    end: AnswerEnd,
    *,
    show_thoughts: bool,
) -> bytes:
    """Return a whole answer as a body."""
    blocks = Blocks()
    for token in tokens:
        for _ in blocks.take(reader.take(token)):
            pass
    for _ in blocks.take(reader.end(outcome.tail)):
        pass
    reason, sequence = end.reason(outcome, reader.called_tools(outcome))
    content = [_content_block(block, show_thoughts) for block in blocks.all]
    return encode(replies.MessageReply(id, model, content, reason, sequence, end.usage(outcome)))


def drop_token(outcome: Outcome) -> Outcome:
    """Return the outcome of a prompt that was only to be computed; its one token is not shown."""
    end = FinishReason.LENGTH
    return replace(outcome, reason=end, generated_tokens=0, tail="", matched=None, answer=None)


def _content_block(block: Block, show_thoughts: bool) -> replies.Content:
    match block.kind:
        case BlockKind.THOUGHT:
            shown = block.text if show_thoughts else ""
            return replies.ThinkingContent(shown, _signature(block, show_thoughts))
        case BlockKind.TEXT:
            return replies.TextContent(block.text)
        case BlockKind.CALL:
            return replies.ToolUseContent(CALL_PREFIX + block.call_id, block.name, _input(block))


def _signature(thought: Block, shown: bool) -> str:
    """Return the signature of a thought; of one that is not shown it has the thought itself."""
    return SIGNATURE if shown else encode_thought(thought.text)


def _input(block: Block) -> dict[str, Any]:
    """Return the arguments of a call; empty if it was cut off."""
    try:
        found = msgspec.json.decode(block.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- streams -----------------------------------------------------------------------------------

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
)
_DELTAS: Final = {
    BlockKind.THOUGHT: b'{"type":"thinking_delta","thinking":%b}',
    BlockKind.TEXT: b'{"type":"text_delta","text":%b}',
    BlockKind.CALL: b'{"type":"input_json_delta","partial_json":%b}',
}


class MessageEvents:
    """Events of /v1/messages."""

    def __init__(
        self, id: str, model: str, reader: AnswerReader, end: AnswerEnd, *, show_thoughts: bool
    ) -> None:
        self._show_thoughts = show_thoughts
        self._start = _event(
            "message_start",
            message=replies.MessageReply(id, model, [], None, None, end.start_usage()),
        )
        self._reader = reader
        self._blocks = Blocks()
        self._end = end

    def step(self, tokens: list[Token]) -> bytes:
        """Return the events of tokens; the first time after `message_start`."""
        start, self._start = self._start, b""
        for token in tokens:
            delta = self._reader.take(token)
            if (more := self._blocks.extend(delta)) is not None:
                start += self._piece(*more)
            elif delta:
                start += b"".join([self._render(*news) for news in self._blocks.take(delta)])
        return start

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        """Return the last events."""
        events = [self.step(tokens)]
        told = self._blocks.take(self._reader.end(outcome.tail))
        events += [self._render(*news) for news in told]
        events += [self._render(*news) for news in self._blocks.close()]
        reason, sequence = self._end.reason(outcome, self._reader.called_tools(outcome))
        delta = replies.MessageEnd(reason, sequence)
        events.append(_event("message_delta", delta=delta, usage=self._end.usage(outcome)))
        events.append(_event("message_stop"))
        return b"".join(events)

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        """Return the events of the last tokens, then that of the error."""
        error = anthropic_error(problem, ANTHROPIC.status(problem))
        return self.step(tokens) + b"event: error\ndata: %b\n\n" % orjson.dumps(error)

    def _piece(self, block: Block, text: str) -> bytes:
        """Written by template, since streams mostly consist of this."""
        if block.kind is BlockKind.THOUGHT and not self._show_thoughts:
            return b""
        return _DELTA % (block.index, _DELTAS[block.kind] % text_json(text))

    def _render(self, change: BlockChange, block: Block, text: str) -> bytes:
        """Return the events for a change."""
        match change:
            case BlockChange.MORE:
                return self._piece(block, text)
            case BlockChange.OPEN:
                return _event("content_block_start", index=block.index, content_block=_empty(block))
            case BlockChange.CLOSE:
                stop = _event("content_block_stop", index=block.index)
                if block.kind is not BlockKind.THOUGHT:
                    return stop
                text = _signature(block, self._show_thoughts)
                signature = b'{"type":"signature_delta","signature":%b}' % text_json(text)
                return _DELTA % (block.index, signature) + stop


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), encode({"type": type, **fields}))


def _empty(block: Block) -> replies.Content:
    match block.kind:
        case BlockKind.THOUGHT:
            return replies.ThinkingContent("", "")
        case BlockKind.TEXT:
            return replies.TextContent("")
        case BlockKind.CALL:
            return replies.ToolUseContent(CALL_PREFIX + block.call_id, block.name, {})
