"""Resuming streams: what a front of several replicas asks of one when another one was lost.

A front lets no stream die with its replica: it sends the same body to another replica, with the
token ids that its client has got. These are replayed into everything that depends on them (text,
stop strings, parsers, grammar, penalties, usage), and only what follows is sent. docs/cluster.md
has the protocol.
"""

from __future__ import annotations

import hmac
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec
import trio

from tgi_trio.router.http.messages.events import Events
from tgi_trio.router.http.messages.problems import Problem, Refused
from tgi_trio.router.request import FinishReason, Outcome, Request, Token
from tgi_trio.router.text.answer_text import output_text
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.tokenizer import Tokenizer

FRONT: Final = b"x-tgi-front"  # the cluster's secret
SEED: Final = b"x-tgi-seed"
BEGAN: Final = b"x-tgi-began"  # Unix seconds
EMITTED: Final = b"x-tgi-emitted"
WAITED: Final = b"x-tgi-waited"  # milliseconds
LOAD: Final = b"x-tgi-load"  # of an answer: requests with a permit / sequences run at once
_HEADERS: Final = (FRONT, SEED, BEGAN, EMITTED, WAITED)

_NUMBER = re.compile(rb"[0-9]{1,20}")
_CHOICE = re.compile(rb"([0-9]{1,6}):([0-9,]*)(!?)")
_IDS = msgspec.json.Decoder(tuple[Annotated[int, msgspec.Meta(lt=1 << 31)], ...])
SLICE: Final = 128  # tokens that a turn of trio's loop replays: some 0.5 ms
_SEEDS: Final = 1 << 64
# Between the seeds of two prompts of one call; those of a prompt's choices follow each other.
_APART: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a client has got of one choice, from another server."""

    ids: tuple[int, ...] = ()
    ended: bool = False


_NOTHING: Final = Emitted()


@dataclass(slots=True)
class Front:
    """What a front adds to a request."""

    ids: random.Random  # where the ids of its answer come from
    seed: int | None = None
    began: int | None = None  # Unix seconds
    emitted: Mapping[int, Emitted] = field(default_factory=dict)  # by the index of the choice
    waited: float = 0.0  # seconds since the front got the request
    prompts: int = 0  # that have been given a seed by now

    def next_seed(self) -> int | None:
        """Return the seed of the first choice of the next prompt, where the client gave none."""
        if self.seed is None:
            return None
        seed = (self.seed + self.prompts * _APART) % _SEEDS
        self.prompts += 1
        return seed


def read_front(headers: Mapping[bytes, bytes], secret: bytes | None) -> Front | None:
    """Return what a front adds to a request; None where the request does not come from a front.

    `secret`: that of the cluster, None where there is none. Raises Refused: 403 for headers of a
    front without its secret, 400 for impossible values.
    """
    given = [name for name in _HEADERS if name in headers]
    if not given:
        return None
    if secret is None or not hmac.compare_digest(headers.get(FRONT, b""), secret):
        raise Refused(
            403,
            f"`{given[0].decode()}` is for fronts, which show the secret of this server's "
            "--cluster-secret-file as `x-tgi-front`",
            "forbidden",
        )
    seed = _number(headers, SEED, _SEEDS)
    # All replicas derive the same ids from the seed, which cannot be guessed without the secret.
    ids: random.Random = random.SystemRandom()
    if seed is not None:
        ids = random.Random(hmac.digest(secret, b"%d" % seed, "sha256"))
    waited = (_number(headers, WAITED, 1 << 40) or 0) / 1e3
    emitted = _read_emitted(headers.get(EMITTED, b""))
    return Front(ids, seed, _number(headers, BEGAN, 1 << 40), emitted, waited)


def _number(headers: Mapping[bytes, bytes], name: bytes, most: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or int(text) >= most:
        raise Refused(400, f"`{name.decode()}` must be a number >= 0 and < {most}", "resume")
    return int(text)


def _read_emitted(text: bytes) -> dict[int, Emitted]:
    """Return what `x-tgi-emitted` says, such as `0:17,4;1:5!`; raises Refused."""
    emitted: dict[int, Emitted] = {}
    for part in text.split(b";") if text else ():
        try:
            choice, each = _read_choice(part)
        except ValueError:
            choice = -1
        if choice < 0 or choice in emitted:
            shown = part[:40].decode("latin-1")
            raise Refused(
                400, f"`x-tgi-emitted` must be like 0:17,4;1:5! and says {shown!r}", "resume"
            )
        emitted[choice] = each
    return emitted


def _read_choice(part: bytes) -> tuple[int, Emitted]:
    """Return the index of a choice, and what its client has got; raises ValueError."""
    found = _CHOICE.fullmatch(part)
    if found is None:
        raise ValueError("no choice")
    # As JSON: there may be a hundred thousand of them, and `int` takes ten times as long.
    return int(found[1]), Emitted(_IDS.decode(b"[%b]" % found[2]), bool(found[3]))


@dataclass(frozen=True, slots=True)
class ResumedStream:
    """The generations of a stream that goes on."""

    requests: list[Request | None]  # None: it has ended
    outputs: list[OutputText]  # with the emitted tokens replayed
    events: list[Events]  # likewise
    last: Callable[[], bytes]  # what follows the end of the last one


async def resume_stream(
    front: Front,
    turns: trio.Lock,
    tokenizer: Tokenizer,
    vocab_size: int,
    requests: Sequence[Request],
    events: Sequence[Events],
    last: Callable[[], bytes],
) -> ResumedStream:
    """Return the generations, with what the front's client has got of them replayed.

    `turns` is shared by all streams that are being resumed, so that a turn of trio's loop replays
    no more than `SLICE` tokens. Raises Refused (400) for tokens that cannot have been generated.
    """
    for choice, emitted in front.emitted.items():
        _check(choice, emitted, requests, vocab_size)
    resumed = ResumedStream([], [], [], lambda: _annotate(last(), b"0:!"))
    for i, (request, render) in enumerate(zip(requests, events, strict=True)):
        emitted = front.emitted.get(i, _NOTHING)
        output = output_text(tokenizer, request)
        held = await _replay(turns, output, render, emitted)
        if emitted.ended:
            _end_again(request, output, render, held, len(emitted.ids))
        resumed.requests.append(None if emitted.ended else replace(request, emitted=emitted.ids))
        resumed.outputs.append(output)
        resumed.events.append(AnnotatedEvents(render, i))
    return resumed


async def _replay(
    turns: trio.Lock, output: OutputText, render: Events, emitted: Emitted
) -> list[Token]:
    """Replay the tokens that the client has into `output` and `render`, and drop the events.

    Returns the last token if the generation has ended with it: `_end_again` needs it.
    """
    whole = len(emitted.ids) - 1 if emitted.ended and emitted.ids else len(emitted.ids)
    for start in range(0, whole, SLICE):
        async with turns:
            for id in emitted.ids[start : min(start + SLICE, whole)]:
                render.step([output.push(id, math.nan)])
    return [output.push(id, math.nan) for id in emitted.ids[whole:]]


def _check(choice: int, emitted: Emitted, requests: Sequence[Request], vocab_size: int) -> None:
    if choice >= len(requests):
        raise Refused(
            400, f"`x-tgi-emitted` names choice {choice} of {len(requests)}, from 0", "resume"
        )
    if max(emitted.ids, default=0) >= vocab_size:
        raise Refused(400, f"`x-tgi-emitted` must hold token ids < {vocab_size}", "resume")
    most = requests[choice].stopping.max_new_tokens
    if len(emitted.ids) >= most + emitted.ended:
        raise Refused(
            400,
            f"`x-tgi-emitted` has {len(emitted.ids)} tokens of choice {choice}, which has at most "
            f"{most} and has not ended: one that has is marked with `!`",
            "resume",
        )


def _end_again(
    request: Request, output: OutputText, render: Events, last: list[Token], count: int
) -> None:
    """Have `render` count a generation of which its client has everything.

    How many tokens of its prompt were cached is not known here: it counts as none.
    """
    tail = output.finish()
    render.end(
        last,
        Outcome(
            reason=FinishReason.STOP_SEQUENCE,
            text=output.generated_text,
            generated_tokens=count,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=0,
            seed=None,
            tail=tail,
            answer=output.answer_end,
        ),
    )


class AnnotatedEvents:
    """Events of a generation, annotated for a front with the token ids that they complete.

    `:i 0:17,4` precedes the last event that a token brings: a front passes events on up to the last
    annotated one, and so all events of a token or none.
    """

    def __init__(self, events: Events, choice: int) -> None:
        self._events = events
        self._choice = b"%d:" % choice
        self._ids: list[int] = []  # of tokens that have brought no event yet

    def step(self, tokens: list[Token]) -> bytes:
        return b"".join([self._take(token) for token in tokens])

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        events, last = self.step(tokens[:-1]), tokens[-1:]
        self._ids += [token.id for token in last]
        return events + self._annotated(self._events.end(last, outcome), b"!")

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + self._annotated(self._events.error([], problem), b"!")

    def _take(self, token: Token) -> bytes:
        """Return the events of one token: a stream may be cut between any two tokens."""
        events = self._events.step([token])
        self._ids.append(token.id)
        return self._annotated(events) if events else b""

    def _annotated(self, events: bytes, end: bytes = b"") -> bytes:
        ids, self._ids = self._ids, []
        return _annotate(events, self._choice + b",".join([b"%d" % id for id in ids]) + end)


def _annotate(events: bytes, what: bytes) -> bytes:
    """Return events with a comment for the front before the last of them."""
    if not events:
        return b""
    others, between, last = events[:-2].rpartition(b"\n\n")
    return b"%b%b:i %b\n%b\n\n" % (others, between, what, last)
