"""Parsed answers, as bodies and as streams: thoughts, content and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import UNSET, UnsetType
from msgspec.json import encode

from tgi_trio.router.delta import Answer, CallDelta, Delta
from tgi_trio.router.http.messages import replies
from tgi_trio.router.http.messages.custom_calls import CustomInputs
from tgi_trio.router.http.messages.error_shapes import openai_event
from tgi_trio.router.http.messages.events import CHAT_GOING_ON, Envelope, chat_chunk_end
from tgi_trio.router.http.messages.extras import PLAIN, ChunkExtras, TokenExtras
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.messages.render import GOING_ON, ending_json, text_json, visible
from tgi_trio.router.http.messages.usage import UsageCount
from tgi_trio.router.request import FinishReason, Outcome, ReadToken, Token
from tgi_trio.router.text.answer import fold
from tgi_trio.router.text.tools.custom import read_input


class AnswerReader:
    """Returns an answer's deltas, token by token, as `text/answer_text.py` has parsed them.

    Tokens that were not parsed are content.
    """

    def __init__(self, *, show_thoughts: bool = True) -> None:
        """`show_thoughts`: if false, thoughts are left out, but counted."""
        self._show_thoughts = show_thoughts
        self._called = False
        self._last: Token | None = None

    def take(self, token: Token) -> Delta:
        """Return the delta of one token."""
        self._last = token
        if not isinstance(token, ReadToken):
            return Delta(visible(token))
        return self._shown(token.delta)

    def end(self, tail: str) -> Delta:
        """Return the last delta; `tail` is text without a token."""
        last = self._last
        if not isinstance(last, ReadToken):
            return Delta(tail)
        return self._shown(last.end or Delta())

    def called(self) -> bool:
        """Return whether a call has begun."""
        return self._called

    def called_tools(self, outcome: Outcome) -> bool:
        """Return whether the answer ended with complete calls."""
        end = outcome.answer
        return end is not None and end.called and outcome.reason is not FinishReason.LENGTH

    def ending(self, outcome: Outcome) -> bytes:
        """Return what `ending_json` does, but with OpenAI's own finish reason for calls."""
        return ending_json(outcome, b'"tool_calls"' if self.called_tools(outcome) else None)

    def _shown(self, delta: Delta) -> Delta:
        if delta.calls:
            self._called = True
        if delta.thought and not self._show_thoughts:
            return Delta(delta.content, delta.calls)
        return delta


# ---- bodies ------------------------------------------------------------------------------------


def read_answer(reader: AnswerReader, tokens: Iterable[Token], tail: str) -> Answer:
    """Return the answer that the tokens make up."""
    answer = Answer()
    for token in tokens:
        answer.add(reader.take(token))
    answer.add(reader.end(tail))
    return answer


def message_json(answer: Answer, outcome: Outcome, custom: Collection[str] = ()) -> bytes:
    """Return an answer as OpenAI's message; `custom`: names of custom tools.

    Its content is null if there are calls instead, or if it was cut off in a thought.
    """
    calls = [_output_call(call, custom) for call in answer.calls]
    end = outcome.answer
    cut = end is not None and end.thinking and outcome.reason is FinishReason.LENGTH
    content = None if (calls or cut) and not answer.content else answer.content
    thought = answer.thought or UNSET
    return encode(replies.OutputMessage("assistant", content, calls or UNSET, thought, thought))


def _output_call(call: CallDelta, custom: Collection[str]) -> replies.OutputToolCall:
    id, name = call.id or "", call.name or ""
    if name in custom:
        made = replies.CalledCustomTool(name, read_input(call.arguments))
        return replies.OutputToolCall(id, "custom", custom=made)
    return replies.OutputToolCall(id, "function", replies.CalledFunction(name, call.arguments))


def answer_tokens(tokens: Iterable[Token]) -> list[Token]:
    """Return the tokens whose log-probabilities are shown: those of the answer, not of thoughts."""
    return [token for token in tokens if not (isinstance(token, ReadToken) and token.thought)]


# ---- streams -----------------------------------------------------------------------------------


class ReadChatEvents:
    """Events of /v1/chat/completions with parsed answers: a chunk for each delta.

    A token of markup has no chunk; its log-probability and id are in the next one. Without tools,
    every other token has a chunk, and the last one has the finish reason, as if the answer were not
    parsed.
    """

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        usage: UsageCount,
        reader: AnswerReader,
        shown: TokenExtras = PLAIN,
        extras: ChunkExtras | None = None,
        *,
        tools: bool = True,
        custom: Collection[str] = (),
    ) -> None:
        """`tools`: some may be called; `custom`: names of custom tools."""
        self._tools = tools
        self._inputs = CustomInputs(custom)
        self._envelope = envelope
        self._head = (
            b'data: {"object":"chat.completion.chunk",%b,"choices":[{"index":%d,"delta":'
            % (envelope.fields(), index)
        )
        self._usage = usage
        self._reader = reader
        self._logprobs = shown.logprobs
        self._extras = extras
        self._keep = shown.logprobs is not None or extras is not None
        self._silent: list[Token] = []  # tokens without a chunk so far, if they are to be shown

    def step(self, tokens: list[Token]) -> bytes:
        if len(tokens) == 1:  # nearly always
            return self._event(tokens[0])
        return b"".join([self._event(token) for token in tokens])

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        self._usage.add(outcome)
        last = Delta()
        if tokens and not self._tools:
            *tokens, token = tokens
            events = self.step(tokens)
            last = self._take(token)
        else:
            events = self.step(tokens)
        delta = self._inputs.end(fold((last, self._reader.end(outcome.tail))))
        return events + self._chunk(delta, self._reader.ending(outcome))

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + openai_event(problem, self._envelope.id)

    def _event(self, token: Token) -> bytes:
        delta = self._take(token)
        if not delta and (self._tools or (isinstance(token, ReadToken) and token.silent)):
            return b""
        if self._keep:
            return self._chunk(delta, GOING_ON)
        return b"%b%b%b" % (self._head, self._delta_json(delta), CHAT_GOING_ON)

    def _take(self, token: Token) -> Delta:
        if self._keep:
            self._silent.append(token)
        delta = self._reader.take(token)
        return self._inputs.take(delta) if delta.calls else delta

    def _chunk(self, delta: Delta, ending: bytes) -> bytes:
        tokens, self._silent = self._silent, []
        logprobs = b"null"
        if self._logprobs is not None and (shown := answer_tokens(tokens)):
            logprobs = self._logprobs.chat(shown)
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            self._delta_json(delta),
            logprobs,
            ending,
            chat_chunk_end(self._extras, tokens),
        )

    def _delta_json(self, delta: Delta) -> bytes:
        if delta.calls:
            return self._calls_json(delta)
        if not delta.thought:
            if delta.content or not self._reader.called():
                return b'{"role":"assistant","content":%b}' % text_json(delta.content)
            return b'{"role":"assistant"}'
        # Under both names that clients look for: DeepSeek's and vLLM's.
        thought = text_json(delta.thought)
        content = b',"content":%b' % text_json(delta.content) if delta.content else b""
        return b'{"role":"assistant"%b,"reasoning_content":%b,"reasoning":%b}' % (
            content,
            thought,
            thought,
        )

    def _calls_json(self, delta: Delta) -> bytes:
        content: str | UnsetType = delta.content or UNSET
        calls = [_call_delta(call, self._inputs.custom(call)) for call in delta.calls]
        thought = delta.thought or UNSET
        return encode(replies.DeltaMessage("assistant", content, calls, thought, thought))


def _call_delta(call: CallDelta, custom: bool) -> replies.ToolCallDelta:
    name = UNSET if call.name is None else call.name
    made = replies.ToolCallDelta(index=call.index)
    if call.id is not None:
        made.id, made.type = call.id, "custom" if custom else "function"
    if custom:
        made.custom = replies.CustomDelta(name=name, input=call.arguments)
    else:
        made.function = replies.FunctionDelta(name=name, arguments=call.arguments)
    return made
