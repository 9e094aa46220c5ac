"""A generation as the router sees it: what was asked, what comes back."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.delta import Delta
from tgi_trio.router.images.prompt_image import PromptImage


class FinishReason(enum.Enum):
    """Why a generation ended, in TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class Expression(Protocol):
    """A regular expression as an automaton (`text/regexes.py`); sets of positions are bits."""

    text: str  # as the client wrote it
    first: int  # positions that a match may begin with
    last: int  # those it may end with

    def taking(self, character: str) -> int:
        """Return the positions that take a character."""

    def after(self, positions: int) -> int:
        """Return all positions that may come behind these."""


class Reading(Protocol):
    """One answer as it is read (`text/answer.py`)."""

    @property
    def calls(self) -> int:
        """Calls begun so far."""

    @property
    def complete(self) -> bool:
        """Whether there are calls, and all of them whole."""

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to a thought, as far as is known."""

    @property
    def answering(self) -> bool:
        """Whether the next text can only be content or calls."""

    def push(self, text: str) -> Delta:
        """Return what became certain with `text`."""

    def finish(self) -> Delta:
        """Return what is left to tell, now that no text will follow."""


class AnswerForm(Protocol):
    """How the answer to a chat is to be read."""

    @property
    def marks(self) -> Mapping[int, str]:
        """Texts of the tokens, by id, that are a part of the form though special."""

    def read(self) -> Reading:
        """Begin to read one answer."""


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """When a generation ends. EOS and length are the shard's to see, strings the router's.

    Where an answer is read (`Request.answer`), strings and expressions end what it says alone: they
    may stand in thoughts and in calls. Token ids end it anywhere.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[Expression, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # tokens that end it, beside the model's own
    keep_stop: bool = True  # TGI keeps the stop text in the output, OpenAI drops it


@dataclass(frozen=True, slots=True)
class Request:
    """One validated generation, ready for the queue."""

    prompt_ids: NDArray[np.int32]  # [prompt_length]
    sampling: SamplingParameters
    stopping: StoppingCriteria
    priority: int = 0  # lower is sooner
    deadline: float | None = None  # trio clock, seconds
    cache_salt: str = ""  # sequences share prefixes only within one salt
    name: str = ""  # the client's request id, for logs
    answer: AnswerForm | None = None  # None: the answer is its text
    images: tuple[PromptImage, ...] = ()  # in the order of their places among the ids
    emitted: tuple[int, ...] = ()  # tokens that its client has got from another server


@dataclass(slots=True)
class Token:
    """One generated token as clients see it."""

    id: int
    text: str  # incremental text; "" while a character is incomplete or text is held back
    logprob: float
    special: bool
    top: Sequence[Token] = ()  # likelier choices, where they were asked for


@dataclass(slots=True)
class ReadToken(Token):
    """A token of an answer that is read; its text is the token's own, marks included."""

    delta: Delta = field(default_factory=Delta)  # what became certain with it
    thought: bool = False  # it belongs to a thought, to its marks, or to the space behind them
    silent: bool = False  # it is markup, or not certain yet what it is
    end: Delta | None = None  # of the last one: what the answer's end made certain


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer that was read ended."""

    called: bool  # there are calls, and all of them whole
    thinking: bool  # it ended within a thought
    thought_tokens: int  # of all tokens, those of thoughts and their marks


@dataclass(slots=True)
class Timings:
    """Moments of one request on the trio clock, in seconds; None until they happen."""

    received: float
    queued: float | None = None  # validated, in the queue
    started: float | None = None  # first sent to the shard
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended well."""

    reason: FinishReason
    text: str  # generated text, special tokens left out
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    seed: int | None  # None when greedy
    tail: str = ""  # end of `text` that no token carried: it was held back until the end
    matched: str | int | None = None  # the stop string, expression or token id that ended it
    prompt_logprobs: tuple[float, ...] = ()  # NaN for the first; empty unless asked for
    prompt_tops: tuple[Sequence[tuple[int, float]], ...] = ()  # alternatives of each; likewise
    answer: AnswerEnd | None = None  # where the answer was read
