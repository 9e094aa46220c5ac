"""All checks together.

    sanitizer = Sanitizer()
    with sanitizer.on():
        ...  # launches kernels
    assert not sanitizer.findings.take()

- **Bounds.** Each lane stays in the tensor that its pointer came from, and is aligned. Lanes that
  stray are left out and the kernel goes on (`memory.py`). What the compiler is told to be a
  multiple is one.
- **Races** between programs, and between lanes of a program without a barrier (`races.py`).
- **Order.** Programs run in order, backwards and shuffled, and leave the same bits (`launches.py`).
- **Memory that nothing has written** changes no results (`unwritten.py`).
- **Counters**, which atomics change, are zero before a launch and behind it (`launches.py`).
- **Dependent launches** use nothing before their wait that may still be written (`dependent.py`).
- **Pinned memory** keeps what is copied until an event tells that it has been read (`sending.py`).

What is not seen: which threads share a lane in layouts that Triton chooses, what happens in shared
memory, and defects of sizes that no test has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch

from tgi_trio.testing.sanitizer.dependent import Dependent
from tgi_trio.testing.sanitizer.expected import EXPECTED
from tgi_trio.testing.sanitizer.findings import Expected, Findings
from tgi_trio.testing.sanitizer.interpreting import Interpreting
from tgi_trio.testing.sanitizer.sending import Sending
from tgi_trio.testing.sanitizer.unwritten import Unwritten


class _Part(Protocol):
    def patched(self) -> AbstractContextManager[None]: ...


class Sanitizer:
    """Watches what Triton's interpreter runs while it is `on`; collects what it finds."""

    def __init__(
        self, expected: tuple[Expected, ...] = EXPECTED, *, bounds_only: bool = False
    ) -> None:
        """`bounds_only`: each launch runs once, and nothing but bounds is checked."""
        self.findings = Findings(expected)
        self._interpreting = Interpreting(self.findings, again=not bounds_only)
        self._unwritten = Unwritten()
        self._parts: list[_Part] = [self._interpreting]
        if not bounds_only:
            dependent, sending = Dependent(self._interpreting), Sending(self.findings)
            self._parts += [self._unwritten, dependent, sending]
            self._interpreting.prepare.append(self._unwritten.prepare)

    @contextmanager
    def on(self) -> Iterator[Findings]:
        """Watch everything inside the block, in all threads."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.patched())
            yield self.findings

    def host(self) -> AbstractContextManager[None]:
        """Follow what this thread writes to memory of the host, for kernels that are given it."""
        return self._unwritten.of_host()

    def place_far(self, tensor: torch.Tensor, numbers: int) -> None:
        """Have kernels see a tensor so many numbers before its place: offsets grow by as many.

        Places that only 64 bits can reach are then those of small memory, and an offset that was
        computed in fewer bits leaves it.
        """
        self._interpreting.far[tensor.data_ptr()] = numbers * tensor.element_size()
