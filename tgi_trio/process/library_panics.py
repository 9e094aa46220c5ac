"""Panics of libraries that are written in Rust, as errors like others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from tgi_trio.errors import LibraryPanic

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def is_panic(error: BaseException) -> bool:
    """Return whether a library has panicked: the class of such errors cannot be imported."""
    return type(error).__name__ == "PanicException"


def raising_panics(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function`, which raises LibraryPanic where a library that it calls panics.

    Python gets a panic as a BaseException, as if this process were to end: nothing that answers one
    request for its own errors would catch it.
    """

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise LibraryPanic(str(error)) from error

    return call
