"""The router's types for one generation: its request, tokens, timings and outcome."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.delta import Delta
from tgi_trio.router.media.prompt_image import PromptImage


class FinishReason(enum.Enum):
    """Why a generation ended, in TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class Expression(Protocol):
    """A regular expression as an automaton (`text/regexes.py`); sets of positions are bit masks."""

    text: str  # as the client wrote it
    first: int  # positions with which a match may begin
    last: int  # positions with which it may end

    def taking(self, character: str) -> int:
        """Return the positions that accept a character."""

    def after(self, positions: int) -> int:
        """Return all positions that may follow these."""


class AnswerParsing(Protocol):
    """The incremental parser of one answer (`text/answer.py`)."""

    @property
    def calls(self) -> int:
        """Number of calls begun so far."""

    @property
    def complete(self) -> bool:
        """Whether there are calls, and all of them are complete."""

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to a thought, as far as is known."""

    @property
    def calling(self) -> bool:
        """Whether the latest text of a thought may turn out to begin a call."""

    @property
    def answering(self) -> bool:
        """Whether the next text can only be content or calls."""

    def push(self, text: str) -> Delta:
        """Parse `text`; returns what has become certain with it."""

    def finish(self) -> Delta:
        """Return what is certain at the end of the text."""


class AnswerForm(Protocol):
    """How the answers to a chat are to be parsed."""

    @property
    def marks(self) -> Mapping[int, str]:
        """Token id -> text, of special tokens that are part of the form."""

    def read(self) -> AnswerParsing:
        """Return a parser for one answer."""


class Detokenizing(Protocol):
    """The text of the tokens of one generation (`text/detokenizer.py`)."""

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""

    def flush(self) -> str:
        """Return what is held back at the end."""


class TokenTexts(Protocol):
    """The texts of tokens (`text/tokenizer.py`)."""

    special_ids: frozenset[int]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself."""

    def detokenizer(self, prompt_ids: Sequence[int] | NDArray[np.int32]) -> Detokenizing:
        """Return what turns the tokens behind a prompt into text."""


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Where a text between two others ends early, as llama.cpp has it; both begin behind a line."""

    indent: int = 0  # spaces and tabs that every further line begins with at least
    seconds: float | None = None  # since the first token: then it ends with its line


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """When a generation ends. The shard checks EOS and length, the router strings.

    If the answer is parsed (`Request.answer`), strings and expressions are looked for in its
    content alone, not in thoughts and calls. Token ids end it anywhere.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[Expression, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # tokens that end it, beside the model's own
    keep_stop: bool = True  # TGI keeps the stop text in the output, OpenAI drops it
    lines: LineLimits | None = None  # of a text that is not parsed


@dataclass(frozen=True, slots=True)
class Request:
    """One validated generation, ready for the queue."""

    prompt_ids: NDArray[np.int32]  # [prompt_length]
    sampling: SamplingParameters
    stopping: StoppingCriteria
    priority: int = 0  # lower goes first
    deadline: float | None = None  # trio clock, seconds
    cache_salt: str = ""  # prefixes are shared only among requests of equal salt
    name: str = ""  # the client's request id, for logs
    answer: AnswerForm | None = None  # None: the answer is not parsed
    images: tuple[PromptImage, ...] = ()  # in order of their positions in the prompt
    tokenizer: TokenTexts | None = None  # that its text is written with; None: the model's
    emitted: tuple[int, ...] = ()  # tokens that the client has got from another server


@dataclass(slots=True)
class Token:
    """One generated token as clients see it."""

    id: int
    text: str  # incremental text; "" while a character is incomplete or text is held back
    logprob: float
    special: bool
    top: Sequence[Token] = ()  # the likeliest tokens, if requested


@dataclass(slots=True)
class ReadToken(Token):
    """A token of a parsed answer; `text` is the token's own text, marks included."""

    delta: Delta = field(default_factory=Delta)  # what has become certain with it
    thought: bool = False  # part of a thought, of its marks, or of the space behind them
    silent: bool = False  # markup, or not certain yet what it is
    end: Delta | None = None  # last token only: what has become certain at the end


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How a parsed answer ended."""

    called: bool  # it has calls, and all of them are complete
    thinking: bool  # it ended within a thought
    thought_tokens: int  # number of tokens in thoughts and their marks


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
    """The result of a generation that ended without an error."""

    reason: FinishReason
    text: str  # generated text, special tokens left out
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    seed: int | None  # None when greedy
    tail: str = ""  # end of `text` that was held back until the end, in no token's text
    matched: str | int | None = None  # the stop string, expression or token id that ended it
    prompt_logprobs: tuple[float, ...] = ()  # NaN for the first token; empty unless requested
    prompt_tops: tuple[Sequence[tuple[int, float]], ...] = ()  # alternatives for each of these
    answer: AnswerEnd | None = None  # None: the answer was not parsed


# Called by the engine's fan-out with what one step brought: new tokens, and the end when it came.
# A sink must neither block nor raise.
Sink = Callable[[list[Token], Outcome | BaseException | None], None]
