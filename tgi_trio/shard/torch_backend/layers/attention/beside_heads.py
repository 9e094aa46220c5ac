"""What reads a layer's input beside its heads, and can be in one launch with their rotation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch


class HeadLaunch(NamedTuple):
    """What `rotate_and_write` is launched with."""

    query: torch.Tensor  # [T, heads, head_dim]: what it writes, or what is not changed
    programs: int  # of a token
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def total(self) -> int:
        """How many programs there are, of all tokens."""
        return len(self.query) * self.programs


class BesideHeads(ABC):
    """Work that depends on nothing of attention's; done once, when heads are rotated."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: torch.Tensor | None = None

    @property
    def found(self) -> torch.Tensor:
        """What was computed; raises RuntimeError before that."""
        if self._found is None:
            raise RuntimeError("what is beside heads has not been computed")
        return self._found

    def compute(self) -> None:
        """Do the work by itself."""
        self._found = self._compute()

    def compute_with(self, heads: HeadLaunch) -> None:
        """Do it in one launch with `heads`, where it `joins` them."""
        self._found = self._launch_with(heads)

    @property
    @abstractmethod
    def joins(self) -> bool:
        """Whether it can be in one launch with heads."""

    @abstractmethod
    def _compute(self) -> torch.Tensor: ...

    @abstractmethod
    def _launch_with(self, heads: HeadLaunch) -> torch.Tensor: ...
