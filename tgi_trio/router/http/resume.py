"""What a front of several replicas asks of one of them: to go on where another one was lost.

A front lets no stream die with its replica: it sends the same body to another one, with the token
ids that its client has got. They are replayed into everything that depends on them (text, stop
strings, parsers, grammar, penalties, usage), and what comes after them is sent. docs/cluster.md has
the protocol.
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
LOAD: Final = b"x-tgi-load"  # of an answer: requests that are here / sequences run at once
_HEADERS: Final = (FRONT, SEED, BEGAN, EMITTED, WAITED)

_NUMBER = re.compile(rb"[0-9]{1,20}")
_CHOICE = re.compile(rb"([0-9]{1,6}):([0-9,]*)(!?)")
_IDS = msgspec.json.Decoder(tuple[Annotated[int, msgspec.Meta(lt=1 << 31)], ...])
SLICE: Final = 128  # tokens that a turn of trio's loop replays: some 0.5 ms
_SEEDS: Final = 1 << 64
# Between the seeds of two prompts of one call; those of a prompt's choices follow each other.
_APART: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Said:
    """What a client has got of one choice."""

    ids: tuple[int, ...] = ()
    ended: bool = False


_NOTHING: Final = Said()


@dataclass(slots=True)
class Front:
    """What a front says of one request."""

    ids: random.Random  # where the ids of its answer come from
    seed: int | None = None
    began: int | None = None  # Unix seconds
    said: Mapping[int, Said] = field(default_factory=dict)  # by the index of the choice
    waited: float = 0.0  # seconds that the request has had before it came here
    prompts: int = 0  # that have a seed by now

    def next_seed(self) -> int | None:
        """Return the seed of the first choice of the next prompt, where the client gave none."""
        if self.seed is None:
            return None
        seed = (self.seed + self.prompts * _APART) % _SEEDS
        self.prompts += 1
        return seed


def read_front(headers: Mapping[bytes, bytes], secret: bytes | None) -> Front | None:
    """Return what a front says; None where nobody says that it is one.

    `secret`: that of the cluster, None where there is none. Raises Refused: 403 for headers of a
    front from somebody else, 400 for what they cannot say.
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
    # Two replicas make the same ids of it, and nobody who does not know the secret does.
    ids: random.Random = random.SystemRandom()
    if seed is not None:
        ids = random.Random(hmac.digest(secret, b"%d" % seed, "sha256"))
    waited = (_number(headers, WAITED, 1 << 40) or 0) / 1e3
    said = _read_said(headers.get(EMITTED, b""))
    return Front(ids, seed, _number(headers, BEGAN, 1 << 40), said, waited)


def _number(headers: Mapping[bytes, bytes], name: bytes, most: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or int(text) >= most:
        raise Refused(400, f"`{name.decode()}` must be a number >= 0 and < {most}", "resume")
    return int(text)


def _read_said(text: bytes) -> dict[int, Said]:
    """Return what `x-tgi-emitted` says, such as `0:17,4;1:5!`; raises Refused."""
    said: dict[int, Said] = {}
    for part in text.split(b";") if text else ():
        try:
            choice, each = _read_choice(part)
        except ValueError:
            choice = -1
        if choice < 0 or choice in said:
            shown = part[:40].decode("latin-1")
            raise Refused(
                400, f"`x-tgi-emitted` must be like 0:17,4;1:5! and says {shown!r}", "resume"
            )
        said[choice] = each
    return said


def _read_choice(part: bytes) -> tuple[int, Said]:
    """Return what is said of one choice; raises ValueError."""
    found = _CHOICE.fullmatch(part)
    if found is None:
        raise ValueError("no choice")
    # As JSON: there may be a hundred thousand of them, and `int` takes ten times as long.
    return int(found[1]), Said(_IDS.decode(b"[%b]" % found[2]), bool(found[3]))


@dataclass(frozen=True, slots=True)
class ResumedStream:
    """The generations of a stream that goes on."""

    requests: list[Request | None]  # None: it has ended
    outputs: list[OutputText]  # which have taken what was emitted
    events: list[Events]  # which have as well
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
    """Return the generations with what a front's client has got of them.

    Streams that go on at the same time have `turns`, so that a turn of trio's loop replays no more
    than `SLICE` tokens of all of them. Raises Refused (400) for what cannot have been generated.
    """
    for choice, said in front.said.items():
        _check(choice, said, requests, vocab_size)
    resumed = ResumedStream([], [], [], lambda: _tell(last(), b"0:!"))
    for i, (request, render) in enumerate(zip(requests, events, strict=True)):
        said = front.said.get(i, _NOTHING)
        output = output_text(tokenizer, request)
        held = await _replay(turns, output, render, said)
        if said.ended:
            _end_again(request, output, render, held, len(said.ids))
        resumed.requests.append(None if said.ended else replace(request, emitted=said.ids))
        resumed.outputs.append(output)
        resumed.events.append(ToldEvents(render, i))
    return resumed


async def _replay(turns: trio.Lock, output: OutputText, render: Events, said: Said) -> list[Token]:
    """Have both take the tokens that the client has, and forget what comes of it.

    Returns the last one where it is for the end of the generation to take.
    """
    whole = len(said.ids) - 1 if said.ended and said.ids else len(said.ids)
    for start in range(0, whole, SLICE):
        async with turns:
            for id in said.ids[start : min(start + SLICE, whole)]:
                render.step([output.push(id, math.nan)])
    return [output.push(id, math.nan) for id in said.ids[whole:]]


def _check(choice: int, said: Said, requests: Sequence[Request], vocab_size: int) -> None:
    if choice >= len(requests):
        raise Refused(
            400, f"`x-tgi-emitted` names choice {choice} of {len(requests)}, from 0", "resume"
        )
    if max(said.ids, default=0) >= vocab_size:
        raise Refused(400, f"`x-tgi-emitted` must hold token ids < {vocab_size}", "resume")
    most = requests[choice].stopping.max_new_tokens
    if len(said.ids) >= most + said.ended:
        raise Refused(
            400,
            f"`x-tgi-emitted` has {len(said.ids)} tokens of choice {choice}, which has at most "
            f"{most} and has not ended: one that has is marked with `!`",
            "resume",
        )


def _end_again(
    request: Request, output: OutputText, render: Events, last: list[Token], count: int
) -> None:
    """Have `render` count a generation whose events its client has.

    How many tokens of its prompt were cached is not known here: none, for all that is.
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


class ToldEvents:
    """Events of a generation with the token ids that each completes, for a front.

    `:i 0:17,4` stands before the last event that a token brings, so that a front which passes on
    what it has the ids of passes on all or nothing of a token.
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
        return events + self._told(self._events.end(last, outcome), b"!")

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + self._told(self._events.error([], problem), b"!")

    def _take(self, token: Token) -> bytes:
        """Return the events of one token: a stream may be cut between any two tokens."""
        events = self._events.step([token])
        self._ids.append(token.id)
        return self._told(events) if events else b""

    def _told(self, events: bytes, end: bytes = b"") -> bytes:
        ids, self._ids = self._ids, []
        return _tell(events, self._choice + b",".join([b"%d" % id for id in ids]) + end)


def _tell(events: bytes, what: bytes) -> bytes:
    """Return events with a comment for the front before the last of them."""
    if not events:
        return b""
    others, between, last = events[:-2].rpartition(b"\n\n")
    return b"%b%b:i %b\n%b\n\n" % (others, between, what, last)
