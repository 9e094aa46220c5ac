"""OpenAI's transcriptions: the text of a sound, by a model that hears and writes."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import orjson

from tgi_trio.errors import TemplateError, ValidationError
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.http.answer_fields import use_model
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.call_validation import refuse_media, validate_request
from tgi_trio.router.http.conversation import Conversation
from tgi_trio.router.http.generation import collect_results, stream_events, take_permits
from tgi_trio.router.http.messages.error_shapes import OpenAIShape, openai_event
from tgi_trio.router.http.messages.multipart import FormData, read_form, wrong_field
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.messages.render import text_json, visible
from tgi_trio.router.http.messages.shared_fields import read_seed
from tgi_trio.router.http.messages.tool_calls import read_answer
from tgi_trio.router.http.preparing import Prepared, prepare
from tgi_trio.router.media.image_prompt import ImagePrompt
from tgi_trio.router.media.layouts.spoken import SpokenLayout, Transcription
from tgi_trio.router.media.links import MediaLink, to_audio_link
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.request import Outcome, Request, Token
from tgi_trio.router.text.turns import Turn

_FIELDS: Final = (
    *("file", "model", "language", "prompt", "response_format", "temperature", "stream"),
    *("max_completion_tokens", "seed"),
)
_SPEAKERS: Final = "speakers are not told apart"
# Fields of OpenAI's that are not read, and why, or what is.
_UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chunking_strategy": "a sound is heard as a whole",
        "include": "answers have no log-probabilities; those of chats have",
        "keywords": "use `prompt`, if the model reads one",
        "known_speaker_names": _SPEAKERS,
        "known_speaker_references": _SPEAKERS,
        "languages": "use `language`",
        "timestamp_granularities": "models tell no times",
    }
)
_FORMATS: Final = ("json", "text")
_COUNT: Final = re.compile("[0-9]{1,18}")
_SEED: Final = re.compile("-?[0-9]{1,20}")
_LANGUAGE: Final = re.compile(r"[A-Za-z][A-Za-z -]{1,30}")
_INLINE: Final = 1 << 16  # bytes that are written as base64 without a thread
_SLICE: Final = 3 << 16  # bytes that are written at once: 0.2 ms


@dataclass(slots=True)
class TranscriptionRequest:
    """A form as it is read."""

    sound: bytes
    model: str | None
    language: str | None
    prompt: str | None
    format: str
    stream: bool
    parameters: GenerationParameters
    # As other bodies may have.
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @classmethod
    def read(cls, form: FormData) -> TranscriptionRequest:
        """Return what a form asks for. Raises ValidationError."""
        form.refuse_others(_FIELDS, _UNSERVED)
        fields = form.fields
        if "file" not in form.files:
            raise wrong_field("file", "is to be a file: a sound")
        language = fields.get("language") or None
        if language is not None and not _LANGUAGE.fullmatch(language):
            raise wrong_field("language", "is to be a code like `en`, or a name")
        written = fields.get("response_format", "json")
        if written not in _FORMATS:
            raise wrong_field("response_format", "is to be `json` or `text`: no times are known")
        stream = fields.get("stream", "false").lower()
        if stream not in ("true", "false"):
            raise wrong_field("stream", "is to be `true` or `false`")
        warm = _read_number(form, "temperature")
        most = _read_whole(form, "max_completion_tokens", _COUNT)
        seed = read_seed(_read_whole(form, "seed", _SEED))
        parameters = GenerationParameters(
            temperature=warm or None, do_sample=bool(warm), max_new_tokens=most, seed=seed
        )
        transcription = (fields.get("model"), language, fields.get("prompt") or None, written)
        return cls(form.files["file"], *transcription, stream == "true", parameters)


def _read_number(form: FormData, name: str) -> float | None:
    text = form.fields.get(name)
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 100:
        raise wrong_field(name, "is to be a number from 0 to 100")
    return found


def _read_whole(form: FormData, name: str, pattern: re.Pattern[str]) -> int | None:
    text = form.fields.get(name)
    if text is None:
        return None
    if not pattern.fullmatch(text):
        raise wrong_field(name, "is to be a whole number")
    return int(text)


async def transcribe(call: Call) -> Reply:
    """POST /v1/audio/transcriptions, as a body or as a stream."""
    form = await call.compute(partial(read_form, call.headers, call.body))
    transcription = TranscriptionRequest.read(form)
    call.body = b""  # megabytes that are not needed any more
    call.engine.metrics.inc("tgi_request_count")
    await use_model(call, transcription.model)
    if len(transcription.sound) > _INLINE:
        text = await run_in_thread(partial(_encode, transcription.sound))
    else:
        text = _encode(transcription.sound)
    link = to_audio_link(text, "`file`", "file")
    refuse_media(call, link)
    prepared: Prepared | None = None
    written = _find_transcription(call)
    if written.begin:
        prompt = _write_prompt(call, written, transcription, link)
    else:
        prepared = await _prepare_chat(call, written, transcription, link)
        if transcription.stream and not prepared.plain:
            raise ValidationError("`stream` is not served: this model thinks before it answers")
    take_permits(call)
    if prepared is not None:
        request = await prepared.validate(call, transcription)
    else:
        whole = transcription.parameters
        request = await validate_request(
            call, prompt, whole, transcription, add_special_tokens=False
        )
    if transcription.stream:
        begun = transcription.language is not None and written.forced
        events = [TranscriptEvents(len(request.prompt_ids), written, begun=bool(begun))]
        return event_stream(call, await stream_events(call, [request], events), 0)
    return await _answer(call, request, prepared, written, transcription.format)


def _encode(sound: bytes) -> str:
    """Return base64, slice by slice: each call holds the interpreter (GIL), and the loop waits."""
    slices = (sound[start : start + _SLICE] for start in range(0, len(sound), _SLICE))
    return "".join(base64.b64encode(each).decode() for each in slices)


def _find_transcription(call: Call) -> Transcription:
    images = call.engine.images
    layout = None if images is None else images.others.get("audio")
    if not isinstance(layout, SpokenLayout):
        raise RuntimeError("a model that hears lays no sounds out")
    return layout.transcription


def _write_prompt(
    call: Call, written: Transcription, transcription: TranscriptionRequest, link: MediaLink
) -> ImagePrompt:
    """Return a prompt that is no chat. Raises ValidationError."""
    tokenizer = call.text_processor.tokenizer
    if written.mark not in tokenizer.added_tokens:
        raise ValidationError(
            f"this model transcribes by the token {written.mark!r}, which its tokenizer lacks"
        )
    if transcription.prompt is not None:
        raise wrong_field("prompt", "is not read by this model, only `language`")
    language = ""
    if transcription.language is not None:
        if not re.fullmatch("[A-Za-z]{2}", transcription.language):
            raise wrong_field("language", "is to be a code of two letters like `en`")
        language = f"lang:{transcription.language.lower()}"
    begin = tokenizer.special_tokens.get("bos_token", "") + written.begin
    return ImagePrompt((begin, link, f"{written.end}{language}{written.mark}"))


async def _prepare_chat(
    call: Call, written: Transcription, transcription: TranscriptionRequest, link: MediaLink
) -> Prepared:
    """Return a chat that asks for a transcription. Raises ValidationError and TemplateError."""
    if call.text_processor.chat_template is None:
        raise TemplateError("template not found")
    if not written.instruction:
        return await _prepare_begun(call, written, transcription, link)
    if transcription.prompt is not None and transcription.language is not None:
        raise wrong_field(
            "language", "stands in the instruction, which `prompt` replaces: give one of both"
        )
    text = transcription.prompt or written.instruction
    if transcription.language is not None:
        text = f"{text}. The language is {transcription.language}."
    turn = Turn.of("user", [text, link] if written.asks_before else [link, text])
    return await prepare(call, Conversation([turn], thinking=False), transcription.parameters)


async def _prepare_begun(
    call: Call, written: Transcription, transcription: TranscriptionRequest, link: MediaLink
) -> Prepared:
    """Return a chat of a sound alone, behind what a client says of it, with the answer begun where
    its language is told. Raises ValidationError and TemplateError.
    """
    begun = ""
    if (told := transcription.language) is not None:
        names = {name.lower(): name for name in written.languages.values()}
        language = written.languages.get(told.lower()) or names.get(told.lower())
        if language is None:
            known = ", ".join(f"{code} ({name})" for code, name in written.languages.items())
            raise wrong_field("language", f"is to be one that this model was trained for: {known}")
        begun = written.forced.format(language)
    turns = [Turn.of("user", [link])]
    if transcription.prompt is not None:
        turns.insert(0, Turn("system", transcription.prompt))
    prepared = await prepare(call, Conversation(turns, thinking=False), transcription.parameters)
    if not begun or not isinstance(prepared.prompt, ImagePrompt):
        return prepared
    return replace(prepared, prompt=ImagePrompt((*prepared.prompt.pieces, begun)))


async def _answer(
    call: Call, request: Request, prepared: Prepared | None, how: Transcription, written: str
) -> Reply:
    read = prepared is not None and not prepared.plain
    (result,) = await collect_results(call, [request], keep_tokens=read)
    text = result.outcome.text
    if prepared is not None and read:
        text = read_answer(prepared.reader(), result.tokens, result.outcome.tail).content
    headers = timing_headers(call, 0, [result])
    text = how.read(text)
    if written == "text":
        body = f"{text}\n".encode("utf-8", "replace")
        return Reply(body, content_type=b"text/plain; charset=utf-8", headers=headers)
    usage = _usage(len(request.prompt_ids), result.outcome)
    return Reply(b'{"text":%b,"usage":%b}' % (text_json(text), usage), headers=headers)


def _usage(prompt: int, outcome: Outcome) -> bytes:
    """Return the usage of OpenAI's transcriptions."""
    made = outcome.generated_tokens
    return orjson.dumps(
        {
            **{"type": "tokens", "input_tokens": prompt, "output_tokens": made},
            "total_tokens": prompt + made,
        }
    )


class TranscriptEvents:
    """Events of a transcription: `transcript.text.delta`, and at the end `transcript.text.done`."""

    __slots__ = ("_held", "_how", "_mark", "_prompt")

    def __init__(self, prompt: int, how: Transcription, *, begun: bool) -> None:
        """`prompt`: its tokens; `begun`: what stands before the text is part of the prompt."""
        self._prompt = prompt
        self._how = how
        self._mark = "" if begun else how.text_mark  # until it comes, nothing is text
        self._held = ""

    def step(self, tokens: list[Token]) -> bytes:
        return self._delta(self._take("".join(map(visible, tokens))))

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        more = self._take("".join(map(visible, tokens)) + outcome.tail)
        said = self._delta(more or self._held)  # without the mark, all is text
        usage = _usage(self._prompt, outcome)
        return said + b'data: {"type":"transcript.text.done","text":%b,"usage":%b}\n\n' % (
            text_json(self._how.read(outcome.text)),
            usage,
        )

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + openai_event(problem, "")

    def _take(self, text: str) -> str:
        """Return what is text, of what is said next."""
        if not self._mark:
            return text
        self._held += text
        _, mark, behind = self._held.partition(self._mark)
        if mark:
            self._mark = self._held = ""
        return behind

    def _delta(self, text: str) -> bytes:
        if not text:
            return b""
        return b'data: {"type":"transcript.text.delta","delta":%b}\n\n' % text_json(text)


_ERRORS = OpenAIShape(
    frozenset((*_FIELDS, *_UNSERVED)), {"inputs": "file", "max_new_tokens": _FIELDS[-2]}
)

ROUTES = (Route("POST", "/v1/audio/transcriptions", transcribe, dialect=_ERRORS),)
