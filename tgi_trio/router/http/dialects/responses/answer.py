"""Answers for clients of OpenAI's Responses: a response, or the events of a stream.

Each event has a `sequence_number`; `*`: any number of times.

| of | events, all of which begin with `response.` |
|---|---|
| the response | `created`, `in_progress`, then the items in order, then one of the last row |
| a thought | `output_item.added`, `content_part.added`, `reasoning_text.delta`*, |
| | `reasoning_text.done`, `content_part.done`, `output_item.done` |
| its summary, if asked for | `output_item.added`, `reasoning_summary_part.added`, |
| | `reasoning_summary_text.delta`*, `reasoning_summary_text.done`, |
| | `reasoning_summary_part.done`, `output_item.done` |
| a text | `output_item.added`, `content_part.added`, `output_text.delta`*, |
| | `output_text.done`, `content_part.done`, `output_item.done` |
| a call | `output_item.added`, `function_call_arguments.delta`*, |
| | `function_call_arguments.done`, `output_item.done` |
| that of a custom tool | `output_item.added`, `custom_tool_call_input.delta`, |
| | `custom_tool_call_input.done`, `output_item.done` |
| that of the local shell | `output_item.added`, `output_item.done` |
| the end | `completed`, `incomplete` or `failed` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec.json import encode

from tgi_trio.router.http.dialects.blocks import Block, BlockChange, BlockKind, Blocks
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.text_logprobs import TextLogprobs
from tgi_trio.router.http.dialects.responses.tools import Way
from tgi_trio.router.http.dialects.responses.writing import ItemWriter, ResponseWriter
from tgi_trio.router.http.messages.blame import describe_length, find_code
from tgi_trio.router.http.messages.error_shapes import ResponsesShape
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.messages.render import text_json
from tgi_trio.router.http.messages.tool_calls import AnswerReader
from tgi_trio.router.request import FinishReason, Outcome, Token

# Takes a response that has ended, as clients get it, and its items.
Keep = Callable[[bytes, Sequence[replies.OutputItem]], None]


def count_usage(outcome: Outcome) -> replies.ResponseUsage:
    """Return the tokens of an answer and of its prompt."""
    thought_tokens = 0 if outcome.answer is None else outcome.answer.thought_tokens
    return replies.ResponseUsage(
        input_tokens=outcome.prompt_tokens,
        input_tokens_details=replies.InputTokensDetails(outcome.cached_tokens),
        output_tokens=outcome.generated_tokens,
        output_tokens_details=replies.OutputTokensDetails(thought_tokens),
        total_tokens=outcome.prompt_tokens + outcome.generated_tokens,
    )


class _Fold:
    """Collects an answer's deltas into blocks."""

    def __init__(self, reader: AnswerReader, logprobs: TextLogprobs | None) -> None:
        self._reader = reader
        self._logprobs = logprobs
        self.blocks = Blocks()

    def take(self, token: Token) -> Iterable[tuple[BlockChange, Block, str]]:
        """Return the changes by a token."""
        delta = self._reader.take(token)
        if self._logprobs is not None:
            return self._logprobs.follow(token, self.blocks.take(delta))
        if (more := self.blocks.extend(delta)) is not None:
            return ((BlockChange.MORE, *more),)
        return self.blocks.take(delta) if delta else ()

    def end(self, outcome: Outcome) -> Iterator[tuple[BlockChange, Block, str]]:
        """Yield the changes at the end."""
        changes = self.blocks.take(self._reader.end(outcome.tail))
        yield from changes if self._logprobs is None else self._logprobs.follow(None, changes)
        yield from self.blocks.close()


def _statuses(blocks: Blocks, outcome: Outcome) -> list[replies.ItemStatus]:
    """Return the status of each block; only the last can be incomplete."""
    found: list[replies.ItemStatus] = ["completed" for _ in blocks.all]
    if found and outcome.reason is FinishReason.LENGTH:
        found[-1] = "incomplete"
    return found


def _status(outcome: Outcome) -> replies.ResponseStatus:
    return "incomplete" if outcome.reason is FinishReason.LENGTH else "completed"


# ---- bodies ------------------------------------------------------------------------------------


def response(
    writer: ResponseWriter,
    items: ItemWriter,
    reader: AnswerReader,
    tokens: Iterable[Token],
    outcome: Outcome,
    now: Callable[[], int],
) -> tuple[bytes, list[replies.OutputItem]]:
    """Return a whole answer as a body, and its items: what a `Keep` takes."""
    fold = _Fold(reader, items.logprobs)
    for token in tokens:
        for _ in fold.take(token):
            pass
    for _ in fold.end(outcome):
        pass
    statuses = _statuses(fold.blocks, outcome)
    output = [items.item(*each) for each in zip(fold.blocks.all, statuses, strict=True)]
    usage = count_usage(outcome)
    return writer.json(_status(outcome), output, usage, completed=now()), output


# ---- streams -----------------------------------------------------------------------------------

_SUMMARY: Final = (b"response.reasoning_summary_text.delta", b',"summary_index":0')
_DELTAS: Final = {
    BlockKind.THOUGHT: (b"response.reasoning_text.delta", b',"content_index":0'),
    BlockKind.TEXT: (b"response.output_text.delta", b',"content_index":0'),
    BlockKind.CALL: (b"response.function_call_arguments.delta", b""),
}


ERRORS: Final = ResponsesShape(
    frozenset(schema.ResponsesRequest.__struct_fields__),
    {
        "inputs": "input",
        "messages": "input",
        "max_new_tokens": "max_output_tokens",
        "top_n_tokens": "top_logprobs",
        "adapter_id": "model",
    },
)


def _code_of(problem: Problem) -> str:
    return find_code(problem, None) or "server_error"


class ResponseEvents:
    """Events of /v1/responses."""

    def __init__(
        self,
        writer: ResponseWriter,
        items: ItemWriter,
        reader: AnswerReader,
        now: Callable[[], int],
        keep: Keep,
    ) -> None:
        """`now` returns the time in Unix seconds; `keep` is told a response that ends well."""
        self._writer = writer
        self._items = items
        self._fold = _Fold(reader, items.logprobs)
        self._now = now
        self._keep = keep
        self._sequence = 0
        self.output: list[replies.OutputItem] = []  # items that are done
        self._begun = False
        self._head = b""  # beginning of events with a piece of the block `_head_of`
        self._head_of = -1

    def step(self, tokens: list[Token]) -> bytes:
        """Return the events of tokens; the first time after those of the response."""
        events = b"" if self._begun else self._begin()
        for token in tokens:
            for change, block, text in self._fold.take(token):
                if change is BlockChange.MORE and block.kind is not BlockKind.CALL:
                    events += self._piece(block, text)
                else:
                    events += self._render(change, block, text, "completed")
        return events

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        """Return the last events."""
        events = [self.step(tokens)]
        status = _status(outcome)
        last: replies.ItemStatus = "incomplete" if status == "incomplete" else "completed"
        for change, block, text in self._fold.end(outcome):
            # A block before the last one is complete, even if it ends with the last piece of text.
            ends = change is BlockChange.CLOSE and block is self._fold.blocks.all[-1]
            events.append(self._render(change, block, text, last if ends else "completed"))
        usage = count_usage(outcome)
        whole = self._writer.json(status, self.output, usage, completed=self._now())
        self._keep(whole, self.output)
        events.append(self._event(f"response.{status}", response=msgspec.Raw(whole)))
        return b"".join(events)

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        """Return the events of the last tokens, then those of the error, also of a refusal.

        As OpenAI sends them: SDKs raise at the first, as their own kind of error; Codex reads the
        other.
        """
        events = self.step(tokens)
        told = ERRORS.describe(problem) | {"code": _code_of(problem)}
        flat = {name: told[name] for name in ("code", "message", "param")}
        events += self._event("error", **flat, error=told)
        failed = msgspec.Raw(self.write_failed(problem))
        return events + self._event("response.failed", response=failed)

    def write_failed(self, problem: Problem) -> bytes:
        """Return the response that ended with an error."""
        error = replies.ResponseError(_code_of(problem), describe_length(problem))
        return self._writer.json("failed", self.output, error=error)

    def queue(self) -> bytes:
        """Return the events of a response that waits, in the background."""
        queued = msgspec.Raw(self._writer.json("queued"))
        created = self._event("response.created", response=queued)
        return created + self._event("response.queued", response=queued)

    def show(self, status: replies.ResponseStatus | None = None) -> bytes:
        """Return the response as it is now; of its items those that are done.

        `status`: None while it runs.
        """
        running: replies.ResponseStatus = "in_progress" if self._begun else "queued"
        return self._writer.json(status or running, self.output)

    def _begin(self) -> bytes:
        self._begun = True
        under_way = msgspec.Raw(self._writer.json("in_progress"))
        created = b"" if self._sequence else self._event("response.created", response=under_way)
        return created + self._event("response.in_progress", response=under_way)

    def _event(self, type: str, **fields: Any) -> bytes:
        data = encode({"type": type, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), data)

    def _render(
        self, change: BlockChange, block: Block, text: str, status: replies.ItemStatus
    ) -> bytes:
        """Return the events for a change; `status`: of an item that ends."""
        called = block.kind is BlockKind.CALL
        way = self._items.box.find(block.name).way if called else Way.FUNCTION
        match change:
            case BlockChange.OPEN:
                return b"" if way is Way.CLIENT else self._opened(block)
            case BlockChange.MORE:
                return b"" if way is not Way.FUNCTION else self._piece(block, text)
            case BlockChange.CLOSE:
                return self._closed(block, way, status)

    def _piece(self, block: Block, text: str) -> bytes:
        """Written by template, since streams mostly consist of this."""
        if block.index != self._head_of:
            self._head, self._head_of = self._write_head(block), block.index
        sequence, self._sequence = self._sequence, self._sequence + 1
        field = b""
        if block.kind is BlockKind.TEXT:
            logprobs = self._items.logprobs
            field = b',"logprobs":%b' % (b"[]" if logprobs is None else logprobs.last_piece())
        return b'%b%d%b,"delta":%b}\n\n' % (self._head, sequence, field, text_json(text))

    def _write_head(self, block: Block) -> bytes:
        """Return the common beginning of all events with a piece of a block."""
        name, more = _SUMMARY if self._is_summary(block) else _DELTAS[block.kind]
        place = b'"item_id":"%b","output_index":%d' % (self._items.id(block).encode(), block.index)
        head = b'event: %b\ndata: {"type":"%b",%b%b,"sequence_number":'
        return head % (name, name, place, more)

    def _opened(self, block: Block) -> bytes:
        item = self._items.item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is BlockKind.CALL:
            return added
        place = self._place(block)
        if self._is_summary(block):
            part: Any = replies.SummaryTextPart("")
            return added + self._event("response.reasoning_summary_part.added", **place, part=part)
        part = replies.OutputTextPart("")
        if block.kind is BlockKind.THOUGHT:
            part = replies.ReasoningTextPart("")
        return added + self._event("response.content_part.added", **place, part=part)

    def _closed(self, block: Block, way: Way, status: replies.ItemStatus) -> bytes:
        item = self._items.item(block, status)
        events = [] if way is not Way.CLIENT else [self._opened(block)]
        events += self._done_events(block, item)
        self.output.append(item)
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return b"".join(events)

    def _done_events(self, block: Block, item: replies.OutputItem) -> Iterator[bytes]:
        """Yield the events that repeat an item's contents when it is complete."""
        place = {"item_id": item.id, "output_index": block.index}
        match item:
            case replies.ReasoningItem(summary=[summary]):
                at, kind = self._place(block), "response.reasoning_summary"
                yield self._event(f"{kind}_text.done", **at, text=summary.text)
                yield self._event(f"{kind}_part.done", **at, part=summary)
            case replies.ReasoningItem():
                at, text = self._place(block), block.text
                yield self._event("response.reasoning_text.done", **at, text=text)
                yield self._event("response.content_part.done", **at, part=item.content[0])
            case replies.MessageItem():
                at, part = self._place(block), item.content[0]
                fields = {"text": part.text, "logprobs": part.logprobs}
                yield self._event("response.output_text.done", **at, **fields)
                yield self._event("response.content_part.done", **at, part=part)
            case replies.FunctionCallItem():
                done = "response.function_call_arguments.done"
                yield self._event(done, **place, name=item.name, arguments=item.arguments)
            case replies.CustomToolCallItem():
                kind = "response.custom_tool_call_input"
                yield self._event(f"{kind}.delta", **place, delta=item.input)
                yield self._event(f"{kind}.done", **place, input=item.input)

    def _place(self, block: Block) -> dict[str, Any]:
        return {
            "item_id": self._items.id(block),
            "output_index": block.index,
            "summary_index" if self._is_summary(block) else "content_index": 0,
        }

    def _is_summary(self, block: Block) -> bool:
        return block.kind is BlockKind.THOUGHT and self._items.summarised
