"""Every exception the project raises on purpose; what HTTP makes of them is `router/http`'s."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar


class TgiTrioError(Exception):
    """Base of all our errors. Its text is written for the person who reads it."""

    # Path of the field of a request that is wrong, for APIs that tell it. None: the text begins
    # with it, or it is about none.
    param: str | None = None


AnyError = TypeVar("AnyError", bound=TgiTrioError)
Leaf = TypeVar("Leaf", bound=BaseException)


def find_first_leaf(group: BaseExceptionGroup[Leaf]) -> Leaf:
    """Return the first error in an exception group, or in those within it."""
    first = group.exceptions[0]
    return find_first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def tell_reason(error: BaseException, named: object = None) -> str:
    """Return why something failed, in words: `No space left on device: /tmp/x`, no `[Errno 28]`.

    `named`: the file that the rest of the sentence names. What other errors say is of use only
    with their type, where it is a mere name or speaks of Python's objects.
    """
    if isinstance(error, OSError) and error.strerror:
        file = error.filename
        if file is None or isinstance(file, int) or os.fsdecode(file) == str(named):
            return str(error.strerror)
        return f"{error.strerror}: {os.fsdecode(file)}"
    if isinstance(error, (LookupError, TypeError, AttributeError)) or not str(error):
        return repr(error)
    return str(error)


def name_param(error: AnyError, param: str | None) -> AnyError:
    """Return an error that names the field of a request that it is about."""
    error.param = param
    return error


@contextmanager
def naming_param(param: str | None, kind: type[TgiTrioError] | None = None) -> Iterator[None]:
    """Name the field that errors within are about, if they do not do so themselves.

    `kind`: those that are; default: `ValidationError`.
    """
    try:
        yield
    except TgiTrioError as error:
        if isinstance(error, kind or ValidationError) and error.param is None:
            error.param = param
        raise


class CorruptFrame(TgiTrioError):
    """A peer sent bytes that do not fit the wire table."""


class ConfigurationError(TgiTrioError):
    """Settings that cannot work: the text names the flag to change."""


class ModelLoadError(TgiTrioError):
    """A model folder, its files or its weights cannot be used; the text says which and why."""


class ValidationError(TgiTrioError):
    """A request that cannot be served as asked. The text is TGI's own where TGI has one."""


class PromptTooLong(ValidationError):
    """A prompt that leaves no room for an answer, or has more tokens than one may have."""

    def __init__(self, message: str, length: ExcessiveLength) -> None:
        super().__init__(message)
        self.length = length


@dataclass(frozen=True, slots=True)
class ExcessiveLength:
    """The length of a prompt that is too long, and what limits it, in tokens."""

    tokens: int  # of the prompt
    most: int  # that it may have
    total: int  # of prompt and answer together; of the prompt, where no more is known
    requested: int = 0  # of an answer, where that is what leaves no room


class GrammarError(ValidationError):
    """A grammar that cannot be served; the text says what is wrong with it, or how large it is."""


class TemplateError(TgiTrioError):
    """A chat cannot be rendered. The text is the template's own message where it raised one."""


class CannotContinue(TemplateError):
    """The template does not write the final message such that an answer could go on with it."""


class ToolError(TgiTrioError):
    """The tools of a chat, or its choice among them, cannot be used; the text says why."""


class Overloaded(TgiTrioError):
    """No permit or no queue space is left; the client may come back."""

    def __init__(self, message: str = "Model is overloaded", retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, for the Retry-After header


class Unavailable(TgiTrioError):
    """This request cannot be served now; the text says why. HTTP makes it a 503."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, for the Retry-After header


class Draining(Unavailable):
    """The server is shutting down and admits nothing new."""


class ShardCannotStart(TgiTrioError):
    """A shard ended before it was ready. The text is a whole report for the operator."""


class GenerationError(TgiTrioError):
    """A request failed while the shard was working on it."""


class ServerEnding(GenerationError):
    """This server can compute nothing any more, whatever was asked; another one may."""


class LibraryPanic(Exception):
    """A library written in Rust has panicked: a defect of it, which ends one request at most."""


class SegmentError(TgiTrioError):
    """Shared memory for a channel cannot be had; the text says what to do."""


class PeerError(TgiTrioError):
    """The process at the other end of a channel failed or broke the protocol."""

    def __init__(self, peer: str, problem: str) -> None:
        """`peer` says rank, pid, phase and step as the control page shows them at this moment."""
        super().__init__(f"{peer}: {problem}")
        self.peer = peer
        self.problem = problem


class CorruptRing(PeerError):
    """A length, head or tail written by the peer cannot be true."""


class RingFull(PeerError):
    """The peer did not make room in its ring before the deadline."""


class ProtocolMismatch(PeerError):
    """Both ends read shared memory differently: another version or another layout."""


class PeerGone(PeerError):
    """The peer's process has ended."""


class PeerStalled(PeerError):
    """The peer's process lives, but its heartbeat has stood still for too long."""
